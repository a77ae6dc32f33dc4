"""Nodes that share no files: each gets a model itself, once, with its own token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.fingerprint import digest_content
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import DeploymentCard, DeploymentId, EngineId, HttpConfig, ModelCard
from shoal.cluster import node_files
from shoal.cluster.bench.two_nodes import actor_on, another_node
from tests.cluster_unit.test_sources_hub import COMMIT, MODEL, FakeHub, serve

TOKEN = "hf_secret"
SOURCE = f"hf://{MODEL}@{COMMIT}"
START_DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> FakeHub:
    """It takes its time with the weights, and wants a token."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    return FakeHub(files=files, token=TOKEN, pause_s=1.0)


@contextmanager
def a_node(root: Path, url: str, **more: str) -> Iterator[str]:
    """One with caches of its own, as if it had a disk of its own."""
    own = {"SHOAL_CACHE": f"{root}/shoal", "HF_HOME": f"{root}/hf", "HF_ENDPOINT": url, **more}
    with another_node(80 << 20, prefix=["env", *(f"{name}={value}" for name, value in own.items())]) as node:
        yield node


def config_of(checkpoint: str) -> EngineConfig:
    return EngineConfig(
        checkpoint=checkpoint, max_model_len=64, memory_bytes=256 << 20, threads=1, block_size=16
    )


def an_engine(node: str, name: str) -> Any:
    return actor_on(node, EngineActor, EngineId(name), config_of(SOURCE), fetch=node_files.whole)


def test_two_engines_of_a_node_get_one_copy_of_its_own_and_a_front_door_no_weights(
    ray_address: str, checkpoint: Path, hub: FakeHub, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    card = ModelCard(name="m", checkpoint=SOURCE, max_model_len=64, block_size=16, fingerprint=b"")
    models = [DeploymentCard(deployment_id=DeploymentId("d"), model=card, weight=1)]
    with serve(hub) as url, a_node(here, url, HF_TOKEN=TOKEN) as node:
        door = actor_on(node, IngressActor, HttpConfig(port=0), models, fetch=node_files.without_weights)
        info = ray.get(door.start.remote(), timeout=START_DEADLINE_S)
        assert info.node == node
        assert set(hub.downloads) == hub.files.keys() - {"model.safetensors"}
        engines = [an_engine(node, f"engine-{i}") for i in range(2)]
        infos = ray.get([engine.start.remote() for engine in engines], timeout=START_DEADLINE_S)
        assert {info.content for info in infos} == {digest_content(config_of(str(checkpoint)))}
        assert hub.downloads.count("model.safetensors") == 1, "one got it, and the other waited"
        assert list(here.rglob("model.safetensors"))
        with a_node(there, url) as tokenless:
            refused = an_engine(tokenless, "engine-2")
            with pytest.raises(RayTaskError, match=r"org/tiny is gated: .* then set HF_TOKEN") as caught:
                ray.get(refused.start.remote(), timeout=START_DEADLINE_S)
            assert isinstance(caught.value.cause, ValueError), "no retry can mend it"
            assert not list(there.rglob("model.safetensors")), "what the other node has is not its own"
