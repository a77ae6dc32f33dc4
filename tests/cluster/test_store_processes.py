"""A KV store beside the engines of a node: started, replaced, adopted, while requests are answered."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray.exceptions import RayError

from tests.cluster.served import Served, wait_for
from tests.cluster.test_prefixes import CACHED, cached_tokens

SHARE = 200 * 3 // 10
"""MiB: 30% of the object store of the tests' Ray."""


@pytest.fixture(scope="module")
def with_store(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    with Served.start(checkpoint, ray_address) as cluster:
        cluster.wait_until_ready()
        wait_for(lambda: len(followed(cluster)) == 1, "the router follows the store")
        yield cluster


def followed(served: Served) -> list[str]:
    """Stores that the router has a snapshot of."""
    held = ray.get(served.actor("router").held.remote(), timeout=10)
    return [name for name in held if name in served.store_names()]


def stored(served: Served) -> set[bytes]:
    (name,) = served.store_names()
    return set(ray.get(served.actor(name).snapshot.remote(), timeout=10).block_keys)


def knows_its_store(served: Served) -> bool:
    (name,) = served.engine_names()
    return bool(ray.get(served.actor(name).__ray_call__.remote(lambda engine: engine._own_store), timeout=60))


def believed(served: Served, store: str) -> frozenset[bytes]:
    held: dict[str, frozenset[bytes]] = ray.get(served.actor("router").held.remote(), timeout=10)
    return held.get(store, frozenset())


def status_of_a_request(served: Served) -> int:
    body = {"prompt": list(range(3, 103)), "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code


def test_a_node_with_an_engine_has_a_store_and_a_person_is_told(with_store: Served) -> None:
    (name,) = with_store.store_names()
    wait_for(lambda: f"{name}: {SHARE}MiB of host memory for prefixes" in with_store.output, "the line")
    assert httpx.post(f"{with_store.url}/reset_prefix_cache", timeout=10).status_code == 200


def test_an_engine_that_takes_the_place_of_a_killed_one_has_what_that_one_saved(with_store: Served) -> None:
    assert cached_tokens(with_store, 400) == 0
    (engine,), (store,) = with_store.engine_names(), with_store.store_names()
    computed = ray.get(with_store.actor(engine).snapshot.remote(), timeout=10).block_keys
    wait_for(lambda: stored(with_store) >= set(computed), "all is saved")
    wait_for(lambda: believed(with_store, store) >= set(computed), "the router knows")
    os.kill(with_store.pid(engine), signal.SIGKILL)
    wait_for(lambda: with_store.engine_names() not in ([], [engine]), "a new engine")
    wait_for(lambda: knows_its_store(with_store), "it is ready and introduced")
    wait_for(lambda: with_store.get("/ready") == 200, "it is placed on")
    assert cached_tokens(with_store, 401) == CACHED


def test_35_a_store_that_is_killed_is_replaced_and_nobody_waits_for_it(with_store: Served) -> None:
    (first,) = with_store.store_names()
    ray.kill(with_store.actor(first))
    assert status_of_a_request(with_store) == 200
    wait_for(lambda: with_store.store_names() not in ([], [first]), "a new store")
    wait_for(lambda: followed(with_store) == with_store.store_names(), "the router follows it")
    assert status_of_a_request(with_store) == 200
    assert with_store.get("/ready") == 200


def test_a_restarted_supervisor_adopts_the_store(with_store: Served) -> None:
    (name,) = with_store.store_names()
    info = ray.get(with_store.actor(name).start.remote(), timeout=10)
    ray.kill(with_store.actor("supervisor"), no_restart=False)

    def has_it() -> bool:
        try:
            status = ray.get(with_store.actor("supervisor").status.remote(), timeout=30)
        except RayError:  # not there again yet
            return False
        return bool(status.stores == (info,))

    wait_for(has_it, "the new supervisor has adopted it")
    assert with_store.store_names() == [name]
