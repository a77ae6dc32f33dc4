"""An answer outlives whatever dies under it: every stream says what it says undisturbed."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import httpx
import pytest
import ray

from tests.cluster.chaos import ROLES, Blow, Streams, disturb, is_whole, metric
from tests.cluster.continued import (
    Continuation,
    continuations,
    hold_saves,
    let_engines_fetch_all,
    watch,
)
from tests.cluster.served import Served, wait_for
from tests.cluster.streamed import KINDS, Body, bodies, events, heard, spoken

LONG: Body = {"prompt": list(range(3, 60)), "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def three(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    """Engines, with a store, that draft: an answer is the same wherever it goes on."""
    with Served.start(checkpoint, ray_address, "--speculative", "ngram", engines=3) as cluster:
        cluster.wait_until_ready()
        watch(cluster)
        yield cluster


def test_case_54_a_stream_goes_on_where_its_engine_died(three: Served) -> None:
    expected = spoken(three.url, LONG)
    assert expected.completion_tokens == LONG["max_tokens"]
    before = metric(three, "shoal_continuations_total")
    stream = events(three.url, LONG)
    first = [next(stream), next(stream)]
    (victim,) = [name for name in three.engine_names() if three.holds_a_request(name)]
    os.kill(three.pid(victim), signal.SIGKILL)
    assert heard(chain(first, stream)) == expected
    assert metric(three, "shoal_continuations_total") == before + 1
    wait_for(three.is_clean, "nothing is left of it")


def test_case_54_four_choices_of_a_prompt_go_on_where_their_engine_died(three: Served) -> None:
    """They are sampled, so each is at another place by then, and says it with its own seed."""
    wait_for(lambda: is_whole(three), "everybody is there")
    body = {**LONG, "n": 4, "max_tokens": 400, "temperature": 1.0, "seed": 5, "logprobs": 1}
    expected = spoken(three.url, body)
    assert len(set(expected.texts.values())) == 4
    assert (expected.prompt_tokens, expected.completion_tokens) == (len(LONG["prompt"]), 4 * 400)
    before = metric(three, "shoal_continuations_total")
    stream = events(three.url, body)
    first = [next(stream) for _ in range(60)]
    spoken_of = {event["choices"][0]["index"] for event in first if not isinstance(event, httpx.Headers)}
    assert spoken_of == {0, 1, 2, 3}
    (victim,) = [name for name in three.engine_names() if three.holds_a_request(name)]
    os.kill(three.pid(victim), signal.SIGKILL)
    assert heard(chain(first, stream)) == expected
    assert metric(three, "shoal_continuations_total") == before + 4
    wait_for(three.is_clean, "nothing is left of them")


def go_on_elsewhere(served: Served, first: int, before: Callable[[str], None]) -> Continuation:
    """What it costs that a stream's engine is killed in its middle, some steps after `before` was done.

    first: of its prompt, which no engine has seen yet.
    """
    wait_for(lambda: is_whole(served), "everybody is there")
    let_engines_fetch_all(served)
    num_known = len(continuations(served))
    stream = events(served.url, {**LONG, "prompt": list(range(first, first + 57))})
    for _ in range(100):
        next(stream)
    (victim,) = [name for name in served.engine_names() if served.holds_a_request(name)]
    before(victim)
    for _ in range(400):  # what is read now may have been drawn before
        next(stream)
    os.kill(served.pid(victim), signal.SIGKILL)
    assert heard(stream).reasons == {0: ("length",)}
    (cost,) = continuations(served)[num_known:]
    return cost


def test_case_54_what_is_computed_again_is_a_block_at_most_where_all_was_saved(three: Served) -> None:
    cost = go_on_elsewhere(three, 60, lambda victim: None)
    assert cost.num_recomputed == cost.num_tokens - cost.num_saved
    assert cost.num_recomputed <= cost.block_size + cost.num_unsaved
    assert cost.num_saved > 0


def test_case_54_what_was_staged_when_the_engine_died_was_not_saved(three: Served) -> None:
    cost = go_on_elsewhere(three, 120, lambda victim: hold_saves(three, victim))
    assert cost.num_unsaved >= 4 * cost.block_size, "of 100 tokens"
    assert cost.num_recomputed == cost.num_tokens - cost.num_saved
    assert cost.num_saved >= 4 * cost.block_size, "of 100 tokens, and of the prompt"


def test_case_54_while_the_router_is_away_no_more_is_computed_again(three: Served) -> None:
    """Nobody but the store knows by then what there is."""
    router = three.pid("router")
    try:
        cost = go_on_elsewhere(three, 180, lambda victim: os.kill(router, signal.SIGSTOP))
    finally:
        os.kill(router, signal.SIGCONT)
    assert cost.num_recomputed == cost.num_tokens - cost.num_saved
    assert cost.num_saved > 0 and cost.num_too_many == 0


def test_17_requests_right_after_an_engine_was_killed_are_all_served(three: Served) -> None:
    """Nobody has noticed yet: they are placed on it, and placed again."""
    victim = three.engine_names()[0]
    ray.kill(three.actor(victim))
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda i: asked(three, i)[0], range(20)))
    assert statuses == [200] * 20
    wait_for(lambda: len(three.ready_engines() - {victim}) == 3, "a new engine")


def asked(served: Served, first: int) -> tuple[int, str]:
    """Status and placement of a request."""
    body = {"prompt": [first + 3, *range(3, 60)], "max_tokens": 4}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    return response.status_code, response.headers["x-shoal-placement"]


def test_case_14_while_the_router_is_away_requests_are_served_and_say_so(three: Served) -> None:
    wait_for(lambda: asked(three, 100) == (200, "prefix"), "its second time")
    router = three.pid("router")
    os.kill(router, signal.SIGSTOP)
    try:
        blind = [asked(three, 100) for _ in range(3)]
    finally:
        os.kill(router, signal.SIGCONT)
    assert blind == [(200, "blind; reason=router_away")] * 3
    assert metric(three, "shoal_placements_total", by="router_away") >= 3
    assert three.get("/ready") == 200
    wait_for(lambda: asked(three, 100) == (200, "prefix"), "it answers a ping again")


def test_streams_of_every_kind_while_each_actor_is_killed_in_turn(three: Served) -> None:
    wait_for(lambda: is_whole(three), "everybody is there")
    streams = Streams(three.url, bodies(three.url, len(KINDS), 400))
    streams.run_undisturbed()
    num_known = len(continuations(three))
    blows = [Blow(role=role, signal=signal.SIGKILL) for role in ROLES]
    streams.run_beside(lambda: disturb(three, blows, print))
    assert streams.failures == []
    assert streams.num_complete > len(KINDS)
    costs = continuations(three)[num_known:]
    assert costs and not any(cost.num_too_many for cost in costs)
    wait_for(three.is_clean, "nothing is left of them")
