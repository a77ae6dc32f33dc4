"""Several front doors over the same engines."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.served import Served, wait_for
from tests.cluster.test_serving import PROMPT


@pytest.fixture(scope="module")
def served(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    with Served.start(
        checkpoint, ray_address, "--ingresses", "2", "--kv-store-memory", "0", engines=2
    ) as both:
        both.wait_until_ready()
        yield both


def text(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_each_answers_on_a_port_of_its_own(served: Served) -> None:
    assert len(set(served.urls)) == 2
    for url in served.urls:
        assert (served.get("/health", url), served.get("/ready", url)) == (200, 200)
    assert len({text(url) for url in served.urls}) == 1


def test_one_that_dies_costs_the_other_nothing_and_comes_back_where_it_was(served: Served) -> None:
    first, second = served.urls
    body = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{second}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(served.pid("ingress-0"), signal.SIGKILL)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_for(lambda: served.get("/ready", first) == 200, "a new ingress on the same port")
    assert text(first) == text(second)
