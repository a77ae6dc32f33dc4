"""Any actor may be killed at any time, and is replaced. Of streams see test_continuation.py."""

import os
import signal
import time
from collections.abc import Callable

import httpx
import pytest
import ray
from openai import InternalServerError

from tests.cluster.served import Served, wait_for
from tests.cluster.test_serving import PROMPT, complete, model


def everybody_is_back(served: Served, *, but: str) -> bool:
    """The supervisor has noticed that `but` is gone, and has made the cluster whole again."""
    engines = served.ready_engines()
    return len(engines) == 2 and but not in engines and served.get("/ready") == 200


def hang(served: Served, name: str) -> None:
    """Its event loop stands still, as in a deadlock."""
    served.actor(name).__ray_call__.remote(lambda _: time.sleep(600))


def test_an_engine_killed_while_idle_costs_no_request(served: Served) -> None:
    """Until the supervisor notices, the router would place on it: the ingress knows better."""
    victim = served.engine_names()[0]
    os.kill(served.pid(victim), signal.SIGKILL)
    time.sleep(0.1)  # the stream's end reaches the ingress in some milliseconds
    for _ in range(20):
        assert complete(served, PROMPT, 2)
    wait_for(lambda: everybody_is_back(served, but=victim), "a new engine")


def test_an_engine_that_no_longer_answers_is_replaced(served: Served) -> None:
    victim = served.engine_names()[0]
    hang(served, victim)
    wait_for(lambda: victim not in served.names(), "the hung engine is killed")
    wait_for(lambda: everybody_is_back(served, but=victim), "a new engine")


@pytest.mark.parametrize(
    ("name", "how"), [("router", "killed"), ("ingress-0", "killed"), ("ingress-0", "hung")]
)
def test_router_and_ingress_are_replaced(served: Served, name: str, how: str) -> None:
    """A hung ingress still holds the port that its successor needs."""
    engines = served.engine_names()
    first = served.actor(name)
    if how == "killed":
        os.kill(served.pid(name), signal.SIGKILL)
    else:
        hang(served, name)
    wait_for(lambda: served.is_replaced(name, first), f"a new {name}")
    wait_for(lambda: served.get("/ready") == 200, "ready again")
    wait_for(lambda: len(served.loads()) == 2, "the router knows the engines")
    assert complete(served, PROMPT)
    assert served.engine_names() == engines, "the engines were left alone"


def test_a_supervisor_that_dies_comes_back_and_adopts_what_runs(served: Served) -> None:
    before = {name: served.pid(name) for name in served.names()}
    asked_before = num_snapshots(served)
    os.kill(before["supervisor"], signal.SIGKILL)
    assert complete(served, PROMPT), "nobody needs it to serve"
    wait_for(served.ready_engines, "the supervisor is back")
    assert num_snapshots(served) == asked_before, "the router has forgotten nothing"
    after = {name: served.pid(name) for name in served.names()}
    assert after.pop("supervisor") != before.pop("supervisor")
    assert after == before
    assert served.process.poll() is None


def test_an_ingress_killed_under_a_stream_leaves_nothing_on_the_engines(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": True}
    with (
        pytest.raises(httpx.TransportError),
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        ray.kill(served.actor("ingress-0"))
        for _ in lines:
            pass
    wait_for(lambda: served.get("/ready") == 200, "a new ingress")
    wait_for(lambda: served.num_requests() == 0, "its predecessor's request is dropped")


def test_63_an_engine_that_fails_inside_answers_500_and_serves_on(served: Served) -> None:
    """The runner of every engine is made to fail once."""
    for name in served.engine_names():
        ray.get(served.actor(name).__ray_call__.remote(_fail_once), timeout=10)
    client = served.client()
    for _ in range(2):
        with pytest.raises(InternalServerError) as failure:
            client.completions.create(model=model(served), prompt=PROMPT)
        assert failure.value.status_code == 500
        assert "out of luck" not in failure.value.message
    assert complete(served, PROMPT)


def _fail_once(actor: object) -> None:
    engine = actor._loop._engine  # type: ignore[attr-defined]
    runner, prepare = engine._runner, engine._runner.prepare

    def fail() -> None:
        raise RuntimeError("out of luck")

    def fail_once(plan: object) -> Callable[[], None]:
        runner.prepare = prepare
        return fail

    runner.prepare = fail_once


def num_snapshots(served: Served) -> int:
    """That the router has asked for."""
    answer = served.actor("router").__ray_call__.remote(lambda router: router._members.num_snapshots)
    return int(ray.get(answer, timeout=10))
