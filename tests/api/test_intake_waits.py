"""A request that waits for a thread: its deadline and its client count there as anywhere."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.endpoints import INTAKE_THREADS
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import FakeDispatcher, serving_one
from tests.api.server import serving


class Jammed:
    """A server whose every intake thread is kept by a prompt that takes its time."""

    def __init__(self, url: str, dispatcher: FakeDispatcher) -> None:
        self.url = url
        self.dispatcher = dispatcher
        self.begun: list[str] = []
        self.release = threading.Event()


@pytest.fixture
def jammed(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jammed]:
    codec, dispatcher, all_busy = TextCodec.load(card.checkpoint), FakeDispatcher(), threading.Event()
    encode = codec.encode_prompt
    with serving(create_app(models=serving_one(card, codec, dispatcher))) as url:
        door = Jammed(url, dispatcher)

        def encode_slowly(prompt: str) -> tuple[int, ...]:
            door.begun.append(prompt)
            if len(door.begun) == INTAKE_THREADS:
                all_busy.set()
            door.release.wait(10)
            return encode(prompt)

        monkeypatch.setattr(codec, "encode_prompt", encode_slowly)
        jams = [threading.Thread(target=post, args=(url, "the")) for _ in range(INTAKE_THREADS)]
        for jam in jams:
            jam.start()
        try:
            assert all_busy.wait(10)
            yield door
        finally:
            door.release.set()
            for jam in jams:
                jam.join()


def post(url: str, prompt: str, **fields: float) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **fields}, timeout=10)


def metrics(door: Jammed) -> str:
    return httpx.get(f"{door.url}/metrics").text


def test_at_its_deadline_it_is_answered_and_never_begun(jammed: Jammed) -> None:
    response = post(jammed.url, "fox", timeout=0.05)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    jammed.release.set()
    assert post(jammed.url, "quick").status_code == 200
    assert jammed.begun == ["the"] * INTAKE_THREADS + ["quick"]


def test_a_thread_that_has_begun_keeps_nobody_waiting(jammed: Jammed) -> None:
    jammed.release.set()
    assert post(jammed.url, "quick").status_code == 200
    jammed.release.clear()
    response = post(jammed.url, "fox", timeout=0.05)
    assert response.status_code == 504
    assert jammed.begun[-1] == "fox"
    assert len(jammed.dispatcher.opened) == INTAKE_THREADS + 1


def test_when_its_client_goes_it_is_over_and_never_begun(jammed: Jammed) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{jammed.url}/v1/completions", json={"prompt": "fox"}, timeout=0.2)
    gone = 'shoal_http_requests_total{endpoint="/v1/completions",status="499"} 1.0'
    for _ in range(100):
        if gone in metrics(jammed):
            break
    else:
        pytest.fail("nobody noticed that the client had gone")
    jammed.release.set()
    assert post(jammed.url, "quick").status_code == 200
    assert "fox" not in jammed.begun
