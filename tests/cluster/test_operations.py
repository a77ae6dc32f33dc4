"""What an operator does to a cluster that runs: streams are open all the while, and none is cut."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cluster.launcher import groups_of
from tests.checkpoints import tiny_qwen3
from tests.cluster.served import Served, environment, serve_command, shoal, wait_for
from tests.cluster.streamed import Body, Said, bodies, spoken

NAME = "operated"


@pytest.fixture(scope="module")
def detached(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    with Served.start(checkpoint, ray_address, "--detached", "--stop-grace", "60s", name=NAME) as cluster:
        cluster.wait_until_ready()
        assert cluster.process.wait(timeout=30) == 0
        yield cluster
        told(cluster, "stop")
        assert cluster.names() == set()
        assert groups_of(cluster.namespace) == {}


def told(cluster: Served, *words: str, status: int = 0) -> str:
    command = shoal(*words, "--url", cluster.url)
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == status, ran.stderr + ran.stdout
    return ran.stderr if status else ran.stdout


def status(cluster: Served) -> dict[str, Any]:
    command = shoal("status", "--json", "--url", cluster.url)
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    said: dict[str, Any] = json.loads(ran.stdout)
    assert ran.returncode == (0 if said["ready"] else 2)
    return said


def phases(cluster: Served) -> list[str]:
    return [engine["phase"] for model in status(cluster)["models"] for engine in model["engines"]]


@contextmanager
def spoken_meanwhile(cluster: Served, asked: Sequence[Body]) -> Iterator[None]:
    """Every stream tells on the way what it tells in peace."""
    undisturbed = [spoken(cluster.url, body) for body in asked]
    is_over: list[bool] = []

    def again_and_again(body: Body) -> list[Said]:
        said = [spoken(cluster.url, body)]
        while not is_over:
            said.append(spoken(cluster.url, body))
        return said

    with ThreadPoolExecutor(len(asked)) as pool:
        streams: list[Future[list[Said]]] = [pool.submit(again_and_again, body) for body in asked]
        try:
            wait_for(lambda: cluster.num_requests() >= len(asked) // 2, "streams are open")
            yield
        finally:
            is_over.append(True)
        for stream, alone in zip(streams, undisturbed, strict=True):
            for said in stream.result(timeout=120):
                assert said == alone


def test_it_grows_and_shrinks_under_streams(detached: Served) -> None:
    with spoken_meanwhile(detached, bodies(detached.url, 8, max_tokens=120)):
        told(detached, "scale", "3")
        wait_for(lambda: phases(detached) == ["ready"] * 3, "three engines")
        assert len(groups_of(detached.namespace)) == 3
        told(detached, "scale", "1")
        wait_for(lambda: phases(detached) == ["ready"], "two have finished and gone")
    assert len(detached.engine_names()) == len(groups_of(detached.namespace)) == 1


def test_an_engine_is_replaced_when_it_has_finished(detached: Served) -> None:
    (before,) = detached.engine_names()
    with spoken_meanwhile(detached, bodies(detached.url, 4, max_tokens=120)):
        told(detached, "drain", "--engine", before)
        wait_for(lambda: before not in detached.names() and phases(detached) == ["ready"], "another")


def test_it_becomes_another_under_streams_while_its_supervisor_is_killed(
    detached: Served, ray_address: str, checkpoint: Path
) -> None:
    before = set(detached.engine_names())
    again = serve_command(checkpoint, ray_address, "--detached", "--stop-grace", "60s", engines=2, name=NAME)
    with spoken_meanwhile(detached, bodies(detached.url, 32, max_tokens=120)):
        changing = subprocess.Popen([*again, "--max-num-batched-tokens", "64"], env=environment())
        wait_for(lambda: len(status(detached)["models"]) == 2, "the change is begun")
        os.kill(detached.pid("supervisor"), signal.SIGKILL)
        assert changing.wait(timeout=120) == 0
        wait_for(lambda: len(status(detached)["models"]) == 1, "the old ones are gone")
    assert phases(detached) == ["ready", "ready"]
    assert not before & set(detached.engine_names())
    settled = detached.names()
    unchanged = subprocess.run([*again, "--max-num-batched-tokens", "64"], env=environment(), check=False)
    assert (unchanged.returncode, detached.names()) == (0, settled)


def test_what_cannot_be_is_one_line(detached: Served, ray_address: str, checkpoint: Path) -> None:
    assert told(detached, "drain", "--node", "zz", status=1).startswith("error: node: 'zz' names 0 of ")
    assert "is the last one" in told(
        detached, "drain", "--node", status(detached)["ingresses"][0]["node"], status=1
    )
    assert "no answer from" in told_nobody()
    command = serve_command(checkpoint, ray_address, engines=1, name=NAME)
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "runs in this Ray already" in ran.stderr) == (1, True)


def told_nobody() -> str:
    command = shoal("scale", "2", "--url", "http://127.0.0.1:9")
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    return ran.stderr


def test_two_models_in_one_cluster_and_one_that_crashes_costs_the_other_nothing(
    ray_address: str, checkpoint: Path, tmp_path: Path
) -> None:
    other = tiny_qwen3(tmp_path / "other")
    file = tmp_path / "two.yaml"
    engine = {"threads": 1, "memory": "300MiB", "max_num_seqs": 8, "block_size": 16, "max_model_len": 256}
    models = [
        {"model_id": name, "model_source": str(path), "engine_kwargs": engine}
        for name, path in (("a", checkpoint), ("b", other))
    ]
    file.write_text(yaml.safe_dump({"http": {"port": 0}, "models": models}))
    with Served.of(
        shoal("serve", "--config", str(file), "--address", ray_address, "--name", "two"), "two"
    ) as two:
        two.wait_until_ready()
        assert [model["model"] for model in status(two)["models"]] == ["a", "b"]
        assert [model.id for model in two.client().models.list().data] == ["a", "b"]
        body = {"prompt": list(range(3, 60)), "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        of_a, of_b = (spoken(two.url, {**body, "model": name}) for name in "ab")
        assert of_a != of_b
        (victim,) = [name for name in two.engine_names() if name.startswith("engine-a.")]
        others = set(two.engine_names()) - {victim}
        os.kill(two.pid(victim), signal.SIGKILL)
        assert spoken(two.url, {**body, "model": "b"}) == of_b
        wait_for(lambda: two.ready_engines() - {victim, *others}, "a's engine is back")
        assert spoken(two.url, {**body, "model": "a"}) == of_a
        assert two.get("/v1/models/c") == 404


def test_streams_that_are_open_when_it_is_stopped_are_finished(ray_address: str, checkpoint: Path) -> None:
    with Served.start(checkpoint, ray_address, "--stop-grace", "60s", "--kv-store-memory", "0") as cluster:
        cluster.wait_until_ready()
        asked = bodies(cluster.url, 8, max_tokens=400)
        alone = [spoken(cluster.url, body) for body in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            streams = [pool.submit(spoken, cluster.url, body) for body in asked]
            wait_for(lambda: cluster.num_requests() >= len(asked), "they are open")
            assert cluster.stop() == 0, cluster.output
            assert [stream.result(timeout=60) for stream in streams] == alone
        assert cluster.names() == set()
        assert groups_of(cluster.namespace) == {}
