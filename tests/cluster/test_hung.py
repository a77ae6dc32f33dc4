"""A process that is stopped hears nothing. `ray.kill` has its node end it, and it is replaced."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from shoal.cluster.bench.two_nodes import another_node, on
from tests.cluster.served import Served, wait_for
from tests.cluster.test_serving import PROMPT, complete


@pytest.fixture(scope="module")
def full(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    """Two engines that take all eight CPUs: no successor has room while its predecessor keeps them."""
    with Served.start(checkpoint, ray_address, "--threads", "4", engines=2) as cluster:
        cluster.wait_until_ready()
        wait_for(cluster.store_names, "a store")
        yield cluster


def stop_one(served: Served, name: str) -> int:
    stopped = served.pid(name)
    os.kill(stopped, signal.SIGSTOP)
    return stopped


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def is_whole(served: Served) -> bool:
    try:
        return (
            len(served.ready_engines()) == 2 and len(served.store_names()) == 1 and len(served.loads()) == 2
        )
    except (ValueError, RayError):  # no router, or it is about to go
        return False


class Process:
    """Any actor's."""

    def pid(self) -> int:
        return os.getpid()


def test_one_on_another_node_is_ended_there_and_leaves_its_cpus(ray_address: str) -> None:
    with another_node(80 << 20) as there:
        actor: Any = ray.remote(Process)
        all_there = actor.options(num_cpus=4, scheduling_strategy=on(there))
        stopped = all_there.remote()
        number = ray.get(stopped.pid.remote(), timeout=60)
        os.kill(number, signal.SIGSTOP)
        ray.kill(stopped)
        wait_for(lambda: not is_alive(number), "it is ended")
        assert ray.get(all_there.remote().pid.remote(), timeout=60) != number


@pytest.mark.parametrize("role", ["engine", "router", "store", "ingress"])
def test_one_that_is_stopped_is_ended_and_replaced(full: Served, role: str) -> None:
    name = next(name for name in sorted(full.names()) if name.startswith(role))
    number = stop_one(full, name)
    if role == "engine":
        assert all(complete(full, f"{i} {PROMPT}") for i in range(8)), "they are placed again"
        assert is_alive(number), "nobody had to wait for its end"
    wait_for(lambda: not is_alive(number), "it is ended")
    wait_for(lambda: full.get("/ready") == 200 and is_whole(full), f"a new {role}")
    assert complete(full, PROMPT)


def test_a_supervisor_that_is_stopped_is_ended_and_its_successor_adopts_what_runs(full: Served) -> None:
    others = {name: full.pid(name) for name in full.names() - {"supervisor"}}
    number = stop_one(full, "supervisor")
    wait_for(lambda: not is_alive(number), "the driver ends it")
    assert complete(full, PROMPT), "nobody needs it to serve"
    wait_for(lambda: is_whole(full), "a new supervisor")
    assert {name: full.pid(name) for name in full.names() - {"supervisor"}} == others
    assert full.process.poll() is None


def test_an_engine_and_then_the_supervisor_are_stopped(full: Served) -> None:
    """Whoever takes over has never heard of the engine's process, nor does that answer."""
    engine = full.engine_names()[0]
    numbers = [stop_one(full, name) for name in (engine, "supervisor")]
    wait_for(lambda: not any(map(is_alive, numbers)), "both are ended", within_s=180)
    wait_for(lambda: is_whole(full) and engine not in full.engine_names(), "a new engine")
    assert complete(full, PROMPT)
