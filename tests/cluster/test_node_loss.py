"""A node goes, with all that is on it. By itself, since its engines take all CPUs of the other node."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from shoal.cluster.bench.two_nodes import another_node
from tests.cluster.chaos import metric
from tests.cluster.served import Served, wait_for
from tests.cluster.streamed import spoken

LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def test_case_54_a_stream_outlives_the_node_of_its_engine(ray_address: str, checkpoint: Path) -> None:
    """Engine, its node's store and all that this node knew are gone at once."""
    with Served.start(checkpoint, ray_address, "--threads", "4", engines=2) as served:
        served.wait_until_ready()  # all on the only node
        here = node_process(served, "router")
        with another_node(80 << 20):
            ray.get(served.actor("supervisor").scale.remote(None, 3), timeout=10)
            wait_for(lambda: len(served.ready_engines()) == 3, "one more, for which there is room there")
            (there,) = {node_process(served, name) for name in served.engine_names()} - {here}
            asked = [{**LONG, "prompt": list(range(i, i + 57))} for i in (3, 70, 140)]
            expected = [spoken(served.url, body) for body in asked]
            before = metric(served, "shoal_continuations_total")
            with ThreadPoolExecutor(3) as pool:
                answers = [pool.submit(spoken, served.url, body) for body in asked]
                wait_for(lambda: all(served.holds_a_request(name) for name in served.engine_names()), "all")
                os.kill(there, signal.SIGKILL)
                assert [answer.result(timeout=120) for answer in answers] == expected
            assert metric(served, "shoal_continuations_total") == before + 1


def node_process(served: Served, name: str) -> int:
    """Of the node that this actor is on, the process that all of its actors end with."""
    return int(ray.get(served.actor(name).__ray_call__.remote(lambda _: os.getppid()), timeout=10))
