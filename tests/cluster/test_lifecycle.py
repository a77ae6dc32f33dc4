"""How a cluster ends, and how it refuses to begin: nothing is left running, and one line says why."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray

from shoal.cluster.launcher import groups_of
from tests.checkpoints import tiny_llama
from tests.cluster.served import Served, wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_everything(ray_address: str, checkpoint: Path, number: signal.Signals) -> None:
    with Served.start(checkpoint, ray_address, "--api-key", "secret") as cluster:
        cluster.wait_until_ready()
        url = f"{cluster.url}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": "Bearer secret"}).status_code == 200
        assert "secret" not in cluster.output
        assert cluster.stop(number) == 0, cluster.output
        assert cluster.names() == set()
        assert "Traceback" not in cluster.output


def test_a_request_that_runs_when_everything_ends_is_answered(ray_address: str, checkpoint: Path) -> None:
    with Served.start(checkpoint, ray_address, "--kv-store-memory", "0") as cluster:
        cluster.wait_until_ready()
        body = {"prompt": ["the quick brown fox"] * 100, "max_tokens": 4000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{cluster.url}/v1/completions", json=body, timeout=60)
            wait_for(lambda: cluster.num_requests() == 100, "its prompts wait and run")
            assert cluster.stop() == 0, cluster.output
            response = asked.result()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "stopping"


@pytest.mark.parametrize("supervisor_dies_too", [False, True])
def test_57_a_driver_that_is_killed_takes_its_cluster_along(
    ray_address: str, checkpoint: Path, supervisor_dies_too: bool
) -> None:
    with Served.start(checkpoint, ray_address) as cluster:
        cluster.wait_until_ready()
        cluster.process.kill()
        if supervisor_dies_too:
            os.kill(cluster.pid("supervisor"), signal.SIGKILL)
        wait_for(lambda: cluster.names() == set(), "the lease ran out and everything ended")
        wait_for(lambda: groups_of(cluster.namespace) == {}, "its places are given back")


def test_a_supervisor_killed_in_the_middle_of_a_start(ray_address: str, checkpoint: Path) -> None:
    """It comes back, finds actors that are still starting, and waits for the same start."""
    with Served.start(checkpoint, ray_address, "--kv-store-memory", "0", engines=2) as cluster:
        wait_for(lambda: len(cluster.names()) == 5, "every actor is made")
        ray.kill(cluster.actor("supervisor"), no_restart=False)
        cluster.wait_until_ready()
        assert len(cluster.names()) == 5


def test_weights_that_are_gone_are_said_and_tried_again(ray_address: str, tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    weights, elsewhere = checkpoint / "model.safetensors", tmp_path / "model.safetensors"
    with Served.start(checkpoint, ray_address) as cluster:
        wait_for(lambda: "starting" in cluster.output, "the driver has looked at the folder")
        weights.rename(elsewhere)
        wait_for(lambda: "model.safetensors" in cluster.output and "trying again" in cluster.output, "a word")
        elsewhere.rename(weights)
        cluster.wait_until_ready()


def test_57_actors_left_without_driver_and_supervisor_are_ended(ray_address: str, checkpoint: Path) -> None:
    with Served.start(checkpoint, ray_address) as first:
        first.wait_until_ready()
        first.process.kill()
        ray.kill(first.actor("supervisor"))
        (leftover,) = first.engine_names()
        with Served.start(checkpoint, ray_address, name=first.name) as second:
            second.wait_until_ready()
            assert leftover not in second.engine_names()


def test_82_too_little_memory(ray_address: str, checkpoint: Path) -> None:
    with Served.start(checkpoint, ray_address, "--memory", "1MiB") as cluster:
        assert cluster.process.wait(timeout=90) == 1
        assert error_line(cluster).startswith("error: not enough memory: one sequence of max_model_len 4096")
        assert cluster.names() == set()


def test_a_port_that_is_taken(ray_address: str, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Served.start(checkpoint, ray_address, "--port", str(port)) as cluster:
            assert cluster.process.wait(timeout=90) == 1
            assert error_line(cluster).startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
            assert cluster.names() == set()


def test_82_a_store_that_no_node_has_room_for(ray_address: str, checkpoint: Path) -> None:
    with Served.start(checkpoint, ray_address, "--kv-store-memory", "1GiB") as cluster:
        assert cluster.process.wait(timeout=90) == 1
        assert error_line(cluster).startswith("error: --kv-store-memory 1GiB is more than 60% of the largest")
        assert cluster.names() == set()


def error_line(cluster: Served) -> str:
    (line,) = [line for line in cluster.output.splitlines() if line.startswith("error: ")]
    return line
