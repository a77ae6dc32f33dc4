"""Stores over real Ray, on two nodes: what was saved outlives who saved it, and no death holds anybody up."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from shoal.actors.engine.fetcher import DEADLINE_S
from shoal.actors.messages import EngineId
from shoal.cluster.bench.bytes_engine import BytesEngine
from shoal.cluster.bench.two_nodes import actor_on, another_node
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId

BLOCK_BYTES = 1_415_040
"""Far above what Ray would carry beside its object store."""

BUDGET = 60 << 20


def keys(path: str, num_blocks: int) -> list[BlockKey]:
    return [BlockKey(f"{path}{i}".encode()) for i in range(num_blocks)]


@dataclass
class Nodes:
    here: str
    there: str
    actors: list[Any] = field(default_factory=list)

    def start(self, node: str, actor_class: type, *args: Any, **more: Any) -> Any:
        actor = actor_on(node, actor_class, *args, **more)
        self.actors.append(actor)
        return actor

    def store(self, name: str, budget: int = BUDGET, *, node: str | None = None) -> Any:
        node = node or self.here
        store = self.start(node, StoreActor, StoreId(name), budget)
        assert ray.get(store.start.remote(), timeout=60).node == node
        return store

    def engine(self, node: str, name: str, stores: dict[str, Any], own: str | None = None) -> Any:
        engine = self.start(node, BytesEngine, EngineId(name), num_blocks=24, block_bytes=BLOCK_BYTES)
        assert ray.get(engine.start.remote(), timeout=60) == node
        ray.get(engine.use_stores.remote(stores, own), timeout=10)
        return engine


@pytest.fixture(scope="module")
def two_nodes(ray_address: str) -> Iterator[tuple[str, str]]:
    with another_node(object_store_bytes=200 << 20) as there:
        yield ray.get_runtime_context().get_node_id(), there


@pytest.fixture
def nodes(two_nodes: tuple[str, str]) -> Iterator[Nodes]:
    nodes = Nodes(*two_nodes)
    yield nodes
    for actor in nodes.actors:
        ray.kill(actor)


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10), signal.SIGKILL)


def test_what_an_engine_saved_is_read_on_another_node_after_its_death(nodes: Nodes) -> None:
    stores = {"store": nodes.store("store")}
    writer = nodes.engine(nodes.here, "writer", stores, own="store")
    reader = nodes.engine(nodes.there, "reader", stores)
    path = keys("a", 8)
    ray.get(writer.save.remote(path), timeout=30)
    saved = ray.get(writer.checksums.remote(8), timeout=10)
    assert ray.get(writer.counts.remote(), timeout=10) == (8 * BLOCK_BYTES, {})
    kill(writer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.counts.remote(), timeout=10)
    _, failure = ray.get(reader.fetch.remote("store", path), timeout=2 * DEADLINE_S)
    assert failure is None
    assert ray.get(reader.checksums.remote(8), timeout=10) == saved
    ray.get(stores["store"].check.remote(), timeout=10)


def test_83_two_engines_of_a_node_share_one_budget_and_what_either_saved(nodes: Nodes) -> None:
    store = nodes.store("store", budget=10 * BLOCK_BYTES)
    engines = [nodes.engine(nodes.here, f"engine {i}", {"store": store}, own="store") for i in range(2)]
    for engine, path in zip(engines, ("a", "b"), strict=True):
        ray.get(engine.save.remote(keys(path, 4)), timeout=30)
    used = ray.get(store.used_bytes.remote(), timeout=10)
    assert 8 * BLOCK_BYTES < used <= 10 * BLOCK_BYTES
    ray.get(engines[0].save.remote(keys("c", 4)), timeout=30)
    assert ray.get(store.used_bytes.remote(), timeout=10) == used, "four went for four"
    _, failure = ray.get(engines[0].fetch.remote("store", keys("b", 4)), timeout=30)
    assert failure is None
    sums = [ray.get(engine.checksums.remote(4), timeout=10) for engine in engines]
    assert sums[0] == sums[1]


def test_35_a_store_that_is_killed_while_it_takes_and_while_it_gives_holds_nobody_up(nodes: Nodes) -> None:
    store = nodes.store("store")
    stores = {"store": store}
    writer = nodes.engine(nodes.here, "writer", stores, own="store")
    reader = nodes.engine(nodes.there, "reader", stores)
    ray.get(writer.save.remote(keys("a", 12)), timeout=30)
    saving = writer.save.remote(keys("b", 24))
    fetching = reader.fetch.remote("store", keys("a", 12))
    kill(store)
    _, failure = ray.get(fetching, timeout=3 * DEADLINE_S)
    assert failure in (None, "store_lost", "deadline", "missing"), "whole, or computed instead"
    ray.get(saving, timeout=60)
    assert ray.get(writer.staged_bytes.remote(), timeout=10) == 0
    saved, lost = ray.get(writer.counts.remote(), timeout=10)
    assert saved + lost["store_lost"] == 36 * BLOCK_BYTES
    _, failure = ray.get(reader.fetch.remote("store", keys("a", 12)), timeout=30)
    assert failure == "store_lost"


def test_a_store_that_takes_the_place_of_another_is_saved_to(nodes: Nodes) -> None:
    first = nodes.store("first")
    writer = nodes.engine(nodes.here, "writer", {"first": first}, own="first")
    kill(first)
    second = nodes.store("second")
    ray.get(writer.use_stores.remote({"second": second}, "second"), timeout=10)
    ray.get(writer.save.remote(keys("a", 2)), timeout=30)
    snapshot = ray.get(second.snapshot.remote(), timeout=10)
    assert snapshot.block_keys == tuple(keys("a", 2))


def test_what_a_store_gives_away_before_its_node_goes_is_read_from_where_it_went(nodes: Nodes) -> None:
    leaving, stays = nodes.store("leaving"), nodes.store("stays", 20 * BLOCK_BYTES, node=nodes.there)
    stores = {"leaving": leaving, "stays": stays}
    writer = nodes.engine(nodes.here, "writer", stores, own="leaving")
    reader = nodes.engine(nodes.there, "reader", stores)
    for path in ("cold", "hot"):
        ray.get(writer.save.remote(keys(path, 8)), timeout=30)
    ray.get(writer.fetch.remote("leaving", keys("hot", 8)), timeout=30)
    ray.get(leaving.evacuate.remote([stays]), timeout=60)
    kill(leaving)
    held = ray.get(stays.snapshot.remote(), timeout=10).block_keys
    assert set(keys("hot", 5)) <= set(held), "half of the room that is there, heads first"
    assert ray.get(stays.used_bytes.remote(), timeout=10) <= 10 * BLOCK_BYTES
    ray.get(stays.check.remote(), timeout=10)
    saved = ray.get(writer.checksums.remote(5), timeout=10)
    kill(writer)
    _, failure = ray.get(reader.fetch.remote("stays", keys("hot", 5)), timeout=30)
    assert failure is None
    assert ray.get(reader.checksums.remote(5), timeout=10) == saved


def test_a_budget_beyond_the_nodes_object_store_is_refused_with_the_numbers(nodes: Nodes) -> None:
    store = nodes.start(nodes.here, StoreActor, StoreId("store"), 190 << 20)
    with pytest.raises(RayTaskError) as refused:
        ray.get(store.start.remote(), timeout=60)
    assert str(refused.value.cause) == (
        "--kv-store-memory 190MiB is more than 60% of this node's Ray object store (200MiB): lower it, or "
        "give Ray's --object-store-memory at least 316.7MiB"
    )
