"""Prefixes over real Ray: found where they are, forgotten with their engine, learnt again by a new router."""

import os
import signal

import httpx
import ray

from tests.cluster.served import Served, wait_for
from tests.cluster.test_failures import everybody_is_back

SHARED = tuple(range(3, 303))
"""300 tokens: 18 complete blocks of 16."""
CACHED = 288

Keys = frozenset[bytes]


def cached_tokens(served: Served, *tail: int, prefix: tuple[int, ...] = SHARED) -> int:
    body = {"prompt": [*prefix, *tail], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def believed(served: Served) -> dict[str, Keys]:
    """What the router holds to be on which engine; nothing of engines that it has yet to ask."""
    answer: dict[str, Keys] = ray.get(served.actor("router").held.remote(), timeout=10)
    return {name: keys for name, keys in answer.items() if name in served.engine_names()}


def true(served: Served) -> dict[str, Keys]:
    names = served.engine_names()
    snapshots = ray.get([served.actor(name).snapshot.remote() for name in names], timeout=10)
    return {name: frozenset(s.block_keys) for name, s in zip(names, snapshots, strict=True)}


def forget_everything(served: Served) -> None:
    assert httpx.post(f"{served.url}/reset_prefix_cache", timeout=10).status_code == 200
    wait_for(lambda: not any(believed(served).values()), "the router has heard of it")


def warm_up(served: Served) -> str:
    """Compute the shared prefix once; the engine that has it."""
    forget_everything(served)
    assert cached_tokens(served, 400) == 0
    wait_for(lambda: any(believed(served).values()) and believed(served) == true(served), "a report")
    (holder,) = [name for name, keys in true(served).items() if keys]
    return holder


def test_requests_that_share_a_prefix_go_where_it_is(served: Served) -> None:
    holder = warm_up(served)
    assert [cached_tokens(served, 401 + i) for i in range(4)] == [CACHED] * 4
    assert {name for name, keys in true(served).items() if keys} == {holder}


def test_other_prompts_go_where_there_is_less_to_do(served: Served) -> None:
    forget_everything(served)
    for first in range(8):
        assert cached_tokens(served, prefix=(first, *SHARED)) == 0
    assert all(true(served).values()), "both engines have computed something"


def test_after_a_reset_nothing_is_a_hit(served: Served) -> None:
    warm_up(served)
    forget_everything(served)
    assert cached_tokens(served, 400) == 0


def test_12_an_engine_that_is_killed_takes_its_keys_along_and_its_successor_is_placed_on(
    served: Served,
) -> None:
    victim = warm_up(served)
    os.kill(served.pid(victim), signal.SIGKILL)
    wait_for(lambda: everybody_is_back(served, but=victim), "a new engine")
    wait_for(lambda: believed(served).keys() == set(served.engine_names()), "the router has asked it")
    assert not any(believed(served).values())
    assert cached_tokens(served, 400) == 0, "the one that is left never had it"
    for first in range(8):
        cached_tokens(served, prefix=(first, *SHARED))
    assert all(true(served).values()), "the new one is placed on too"


def test_a_router_that_is_killed_learns_again_what_the_engines_hold(served: Served) -> None:
    warm_up(served)
    before = true(served)
    first = served.actor("router")
    os.kill(served.pid("router"), signal.SIGKILL)
    wait_for(lambda: served.is_replaced("router", first), "a new router")
    wait_for(lambda: believed(served) == before, "snapshots")
    assert cached_tokens(served, 400) == CACHED
    wait_for(lambda: believed(served) == true(served), "reports")
