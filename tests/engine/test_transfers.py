"""What an engine saves and fetches, and what it does when that goes wrong: it computes."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.actors.engine.transfers import Fallback, WritePolicy
from shoal.actors.messages import CachedTokens, PrefixSource, RequestId
from shoal.kvstore.block_hash import BlockKey, segment_key
from tests.engine.bench import Bench, a_request
from tests.fake_runner import generate
from tests.fake_store import OTHER, OWN, Stores, view

PROMPT = list(range(100, 126))
"""Six blocks of four tokens and a half."""


def an_engine(stores: Stores, policy: WritePolicy = "write_through", **more: Any) -> Bench:
    defaults: dict[str, Any] = {"window": 6, "num_blocks": 40, "num_segments": 40, "view": view(policy)}
    return Bench(**{**defaults, "stores": stores, **more})


def filled(*, window: int | None = 6, **more: Any) -> Stores:
    """The stores after PROMPT was computed by an engine that has gone since."""
    stores = Stores()
    an_engine(stores, window=window).serve("elsewhere", PROMPT, **more)
    return stores


def submit(bench: Bench, name: str, prompt: list[int], max_tokens: int = 3) -> None:
    """And let the carrier know what is to be fetched for it."""
    sources = bench.stores.sources(bench.keys(prompt))
    bench.submit(a_request(name, prompt, max_tokens, sources=sources))
    bench.carrier.take()


def fallbacks(bench: Bench) -> dict[Fallback, int]:
    return dict(bench.scheduler.transfers.fallbacks)


def finish(bench: Bench, name: str, prompt: list[int]) -> int:
    bench.finish()
    assert bench.tokens[name] == generate(prompt, len(bench.tokens[name]))
    return bench.cached[name]


# Saving


def names(bench: Bench, *blocks: int, segments: tuple[int, ...] = ()) -> set[BlockKey]:
    keys = bench.keys(PROMPT)
    return {keys[i] for i in blocks} | {segment_key(keys[i]) for i in segments}


def test_write_through_saves_whatever_becomes_cached() -> None:
    bench = an_engine(Stores())
    bench.serve("it", PROMPT)
    everything = names(bench, *range(6), segments=tuple(range(6)))
    assert bench.stores.has[OWN].keys() == everything
    bench.stores.has.clear()
    bench.serve("again", PROMPT)
    assert not bench.stores.has[OWN], "each once"


def test_write_through_selective_saves_what_is_seen_again_and_what_goes_on_from_a_turn() -> None:
    bench = an_engine(Stores(), "write_through_selective", max_num_batched_tokens=64)
    bench.submit(a_request("it", PROMPT, max_tokens=4))
    bench.step()
    bench.step()
    bench.carrier.run()
    assert not bench.stores.has[OWN]
    bench.submit(a_request("its head", PROMPT[:10], max_tokens=9))
    bench.step()
    bench.carrier.run()
    assert bench.stores.has[OWN].keys() == names(bench, 0, 1, segments=(0, 1)), "two blocks were a hit"
    while "it" not in bench.finished:
        bench.step()
    bench.carrier.run()
    assert bench.stores.has[OWN].keys() == names(bench, *range(6), segments=(0, 1, 5)) | {
        *bench.keys([*PROMPT, *bench.tokens["it"]])[6:7],
        segment_key(bench.keys([*PROMPT, *bench.tokens["it"]])[6]),
    }
    bench.finish()


def test_write_back_saves_what_would_be_evicted_next_and_counts_what_was() -> None:
    bench = an_engine(Stores(), "write_back", window=None, num_blocks=17)
    bench.serve("a", list(range(32)))
    assert not bench.stores.has[OWN], "eight of sixteen blocks are free, and two are enough"
    bench.serve("b", list(range(50, 78)))
    assert set(bench.stores.has[OWN]) == {bench.keys(list(range(32)))[7]}, "the last of a"
    bench.serve("c", list(range(80, 96)))
    assert bench.scheduler.transfers.num_unsaved == 2, "4, 5 and 6 had to go as well, one of them saved"


def test_what_is_copied_is_not_overwritten_and_goes_when_its_turn_comes() -> None:
    bench = an_engine(Stores(), window=None, num_blocks=7)
    bench.submit(a_request("saved slowly", list(range(16)), max_tokens=1))
    bench.finish()
    bench.carrier.take()
    assert [piece.block for piece in bench.carrier.saving[0]] == [1, 2, 3, 4]
    assert bench.pools.num_available == 2, "what the copy reads cannot be freed at once"
    bench.submit(a_request("wants three", [9] * 9, max_tokens=1))
    assert bench.step() == []
    bench.carrier.save()
    assert bench.pools.num_available == 6
    finish(bench, "wants three", [9] * 9)
    assert set(bench.stores.has[OWN]) == set(bench.keys(list(range(16))))
    assert bench.drained()


def test_a_copy_does_not_make_a_block_younger() -> None:
    bench = an_engine(Stores(), window=None, num_blocks=9)
    for name, first in {"older": 0, "younger": 50}.items():
        bench.submit(a_request(name, list(range(first, first + 16)), max_tokens=1))
        bench.finish()
        bench.carrier.take()
    bench.carrier.save(1)
    bench.carrier.save(0)
    bench.serve("needs four", list(range(80, 96)))
    assert bench.serve("younger again", list(range(50, 66))) == 12


def test_nothing_more_is_taken_than_there_is_room_for_and_the_rest_waits_until_it_is_evicted() -> None:
    bench = an_engine(Stores(), window=None, num_blocks=7)
    bench.submit(a_request("it", list(range(24)), max_tokens=1))
    bench.finish()
    assert [len(bench.scheduler.take_saves(max_bytes)) for max_bytes in (0, 2, 1)] == [0, 2, 1]
    bench.submit(a_request("next", [1] * 12, max_tokens=1))
    bench.finish()
    assert bench.scheduler.transfers.num_unsaved == 3


def test_a_store_that_replaces_another_is_given_what_is_seen_again() -> None:
    bench = an_engine(Stores(), window=None)
    bench.serve("it", PROMPT)
    bench.scheduler.use_store(None)
    assert bench.scheduler.take_saves(1000) == []
    bench.scheduler.use_store(OTHER)
    bench.serve("again", PROMPT)
    assert set(bench.stores.has[OWN]) == set(bench.keys(PROMPT))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_what_the_store_did_not_get_is_offered_anew_when_it_is_seen_again(policy: WritePolicy) -> None:
    bench = an_engine(Stores(), policy, window=None)
    bench.submit(a_request("it", PROMPT, max_tokens=1))
    bench.finish()
    bench.carrier.take()
    bench.carrier.save(lose=True)
    bench.carrier.run()
    assert not bench.stores.has[OWN], "nobody has asked for it since"
    bench.serve("again", PROMPT)
    assert set(bench.stores.has[OWN]) == set(bench.keys(PROMPT))
    bench.stores.has.clear()
    bench.serve("once more", PROMPT)
    assert not bench.stores.has[OWN], "it got them"


def test_write_back_saves_what_the_store_did_not_get_before_it_goes() -> None:
    bench = an_engine(Stores(), "write_back", window=None, num_blocks=17)
    bench.submit(a_request("it", list(range(60)), max_tokens=1))
    bench.finish()
    bench.carrier.take()
    bench.carrier.save(lose=True)
    bench.carrier.run()
    assert set(bench.stores.has[OWN]) == {bench.keys(list(range(60)))[14]}


# Fetching


@pytest.mark.parametrize("window", [None, 1, 6, 9])
def test_what_another_engine_has_computed_is_fetched_and_the_answer_is_the_same(window: int | None) -> None:
    stores = filled(window=window)
    bench = an_engine(stores, window=window)
    assert bench.serve("it", PROMPT, max_tokens=5) == 24
    assert bench.cached_by_place["it"] == CachedTokens(own_store=24)
    assert bench.serve("again", PROMPT, max_tokens=5) == 24
    assert bench.cached_by_place["again"] == CachedTokens(device=24)
    assert bench.scheduler.transfers.fetched_tokens == {"own_store": 24} and not fallbacks(bench)
    assert bench.drained()


def test_only_what_a_boundary_needs_is_fetched() -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    (read,) = bench.carrier.fetching[0].reads
    assert set(read.keys) == names(bench, *range(6), segments=(4, 5)) and read.num_bytes == 8
    assert bench.keys(PROMPT) == list(read.keys[:6]), "parents first"


def test_what_the_device_has_is_not_fetched() -> None:
    stores = filled()
    bench = an_engine(stores)
    bench.submit(a_request("head", PROMPT[:13], max_tokens=1))
    bench.finish()
    submit(bench, "it", PROMPT)
    assert set(bench.carrier.fetching[0].reads[0].keys) == names(bench, 3, 4, 5, segments=(4, 5))
    bench.carrier.run()
    assert finish(bench, "it", PROMPT) == 24
    assert bench.cached_by_place["it"] == CachedTokens(device=12, own_store=12)


def test_blocks_that_are_here_are_of_use_when_only_their_state_is_fetched() -> None:
    bench = an_engine(filled())
    bench.submit(a_request("before", PROMPT, max_tokens=1))
    bench.finish()
    for key in bench.keys(PROMPT):
        bench.pools.prefix_cache.segments.detach(key)
    submit(bench, "it", PROMPT)
    assert set(bench.carrier.fetching[0].reads[0].keys) == names(bench, segments=(4, 5))
    bench.carrier.run()
    assert finish(bench, "it", PROMPT) == 24
    assert bench.cached_by_place["it"] == CachedTokens(device=24)


def test_what_came_from_another_node_is_offered_to_the_own_one() -> None:
    stores = filled()
    stores.has[OTHER] = stores.has.pop(OWN)
    bench = an_engine(stores)
    bench.serve("it", PROMPT)
    assert bench.cached_by_place["it"] == CachedTokens(other_store=24)
    assert stores.has[OWN].keys() == names(bench, *range(6), segments=(4, 5))
    assert stores.has[OWN] == {key: stores.has[OTHER][key] for key in stores.has[OWN]}


def test_the_own_store_is_asked_before_others_whatever_is_named_first() -> None:
    stores = filled()
    stores.has[OTHER] = dict(stores.has[OWN])
    bench = an_engine(stores)
    keys = bench.keys(PROMPT)
    for key in keys[:2]:
        del stores.has[OWN][key]
    sources = [source for source in stores.sources(keys) if source.store_id == OTHER]
    sources += [source for source in stores.sources(keys) if source.store_id == OWN]
    bench.submit(a_request("it", PROMPT, sources=tuple(sources)))
    reads = {read.store_id: set(read.keys) for read in bench.scheduler.take_fetches()[0].reads}
    assert reads == {OTHER: names(bench, 0, 1), OWN: names(bench, 2, 3, 4, 5, segments=(4, 5))}


@pytest.mark.parametrize(
    ("worth", "blocks"),
    [
        (lambda tokens, own, other: tokens == 24 and (own, other) == (3, 3), 6),
        (lambda tokens, own, other: tokens == 12 and (own, other) == (3, 0), 3),
        (lambda tokens, own, other: False, 0),
    ],
)
def test_what_is_sooner_computed_is_not_fetched(worth: Callable[[int, int, int], bool], blocks: int) -> None:
    """The own store has the first half. All is asked for, or that, or nothing."""
    stores = filled(window=None)
    bench = an_engine(stores, window=None, view=view(worth=worth))
    stores.has[OTHER] = {key: stores.has[OWN].pop(key) for key in bench.keys(PROMPT)[3:]}
    assert bench.serve("it", PROMPT) == 4 * blocks
    assert bench.cached_by_place["it"].own_store == min(12, 4 * blocks)


def test_one_that_fetches_holds_back_nobody_and_is_no_work_to_be_computed() -> None:
    bench = an_engine(filled(), max_num_seqs=1)
    submit(bench, "fetches", PROMPT)
    assert bench.engine.uncomputed_tokens == 2 and not bench.scheduler.may_run
    assert bench.step() == []
    submit(bench, "behind", [1, 2, 3])
    assert finish_one(bench, "behind") == generate([1, 2, 3], 3)
    bench.carrier.run()
    assert bench.engine.uncomputed_tokens == 2 and bench.scheduler.may_run
    assert finish(bench, "fetches", PROMPT) == 24
    assert bench.drained()


def finish_one(bench: Bench, name: str) -> list[int]:
    for _ in range(50):
        if name in bench.finished:
            break
        bench.step()
    return bench.tokens[name]


@pytest.mark.parametrize("reason", [Fallback.DEADLINE, Fallback.STORE_LOST, Fallback.CHECKSUM])
def test_23_a_fetch_that_fails_before_anything_came_is_computed(reason: Fallback) -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    bench.carrier.fail(reason=reason)
    assert bench.engine.uncomputed_tokens == 26
    assert finish(bench, "it", PROMPT) == 0
    assert fallbacks(bench) == {reason: 1}
    assert bench.drained()


def test_23_a_copy_that_fails_leaves_nothing_of_what_it_has_written() -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    bench.carrier.land()
    assert bench.pools.blocks.num_free == 39 - 6 and bench.pools.segments.num_free == 39 - 2
    bench.engine.check()
    bench.carrier.copy(fails=True)
    assert bench.pools.blocks.num_free == 39
    assert finish(bench, "it", PROMPT) == 0
    assert fallbacks(bench) == {Fallback.COPY_FAILED: 1}
    assert bench.drained()


def test_25_blocks_without_their_state_are_no_hit() -> None:
    bench = an_engine(filled())
    for key in bench.keys(PROMPT):
        del bench.stores.has[OWN][segment_key(key)]
    submit(bench, "it", PROMPT)
    assert not bench.carrier.fetching, "the router knows"
    assert finish(bench, "it", PROMPT) == 0


@pytest.mark.parametrize(
    ("lost_blocks", "lost_segments", "cached"),
    [
        ((), (5,), 0),  # it was asked for those of 4 and 5 only
        ((5,), (), 0),
        ((0,), (), 0),
        ((), (), 24),
    ],
)
def test_27_what_does_not_come_makes_the_boundary_nearer(
    lost_blocks: tuple[int, ...], lost_segments: tuple[int, ...], cached: int
) -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    bench.carrier.land(without=names(bench, *lost_blocks, segments=lost_segments))
    bench.engine.check()
    bench.carrier.copy()
    assert finish(bench, "it", PROMPT) == cached
    assert fallbacks(bench) == ({} if cached else {Fallback.MISSING: 1})
    assert bench.drained()


def test_27_without_state_all_that_came_before_a_gap_is_used() -> None:
    bench = an_engine(filled(window=None), window=None)
    submit(bench, "it", PROMPT)
    bench.carrier.land(without=names(bench, 3))
    bench.carrier.copy()
    assert finish(bench, "it", PROMPT) == 12
    assert fallbacks(bench) == {Fallback.MISSING: 1}
    assert bench.drained()


def test_as_much_lands_as_there_is_room_for_beside_those_that_run() -> None:
    bench = an_engine(filled(window=None), window=None, num_blocks=9)
    bench.submit(a_request("runs", [1] * 9, max_tokens=20))
    bench.step()
    submit(bench, "it", PROMPT)
    bench.carrier.land()
    assert len(bench.carrier.landing[0].pieces) == 8 - 3 - 1
    bench.carrier.copy()
    assert fallbacks(bench) == {Fallback.NO_ROOM: 1}
    bench.finish()
    assert bench.tokens["runs"] == generate([1] * 9, 20)
    assert bench.tokens["it"] == generate(PROMPT, 3)
    assert bench.drained()


def test_what_came_gives_way_to_whoever_runs_and_to_whoever_is_before_it() -> None:
    bench = an_engine(filled(window=None), window=None, num_blocks=9)
    bench.submit(a_request("runs", [1, 2], max_tokens=30))
    bench.step()
    submit(bench, "it", PROMPT)
    bench.carrier.run()
    assert bench.pools.num_available < 7
    bench.submit(a_request("urgent", [3] * 14, max_tokens=2, priority=-1))
    assert finish_one(bench, "urgent") == generate([3] * 14, 2)
    bench.finish()
    assert bench.tokens["runs"] == generate([1, 2], 30) and bench.scheduler.num_preemptions == 0
    assert bench.tokens["it"] == generate(PROMPT, 3)
    assert fallbacks(bench) == {Fallback.EVICTED: 1}
    assert bench.drained()


def test_what_came_gives_way_before_anybody_is_preempted() -> None:
    bench = an_engine(filled(window=None), window=None, num_blocks=9, max_num_seqs=1)
    bench.submit(a_request("runs", [1, 2], max_tokens=30))
    bench.step()
    submit(bench, "it", PROMPT)
    bench.carrier.run()
    assert bench.pools.num_available == 1
    assert finish_one(bench, "runs") == generate([1, 2], 30)
    assert bench.scheduler.num_preemptions == 0
    assert finish(bench, "it", PROMPT) < 24
    assert fallbacks(bench) == {Fallback.EVICTED: 1}
    assert bench.drained()


def test_what_came_stays_if_to_give_way_would_not_help() -> None:
    bench = an_engine(filled(window=None), window=None, num_blocks=20)
    bench.submit(a_request("runs", [1] * 40, max_tokens=2))
    for _ in range(3):
        bench.step()
    submit(bench, "it", PROMPT)
    bench.carrier.run()
    bench.submit(a_request("large", [2] * 50, max_tokens=1, priority=-1))
    bench.step()
    assert bench.pools.num_available == 19 - 11 - 6
    bench.finish()
    assert bench.cached["it"] == 24 and not fallbacks(bench)


def test_two_that_lack_the_same_wait_for_one_fetch() -> None:
    bench = an_engine(filled())
    for name in "ab":
        submit(bench, name, PROMPT)
    assert len(bench.carrier.fetching) == 1
    bench.carrier.run()
    bench.finish()
    assert bench.cached == {"a": 24, "b": 24}
    assert bench.scheduler.transfers.fetched_tokens == {"own_store": 24}
    assert bench.drained()


def test_one_that_shares_a_head_with_a_fetch_goes_on_to_fetch_the_rest() -> None:
    stores = filled(window=None)
    longer = [*PROMPT[:14], *range(20)]
    an_engine(stores, window=None).serve("elsewhere", longer)
    bench = an_engine(stores, window=None)
    submit(bench, "a", PROMPT)
    submit(bench, "b", longer)
    bench.carrier.land()
    bench.carrier.copy()
    bench.carrier.take()
    assert len(bench.carrier.fetching) == 1, "what is left of b"
    bench.carrier.run()
    bench.finish()
    assert bench.cached == {"a": 24, "b": 32}
    assert bench.drained()


@pytest.mark.parametrize(("lost", "cached"), [(0, 0), (3, 12)])
def test_what_did_not_come_is_not_asked_for_again_by_those_that_waited(lost: int, cached: int) -> None:
    bench = an_engine(filled(window=None), window=None)
    for name in "abc":
        submit(bench, name, PROMPT)
    bench.carrier.land(without=names(bench, lost))
    bench.carrier.copy()
    bench.carrier.take()
    assert not bench.carrier.fetching
    assert bench.scheduler.may_run
    bench.finish()
    assert bench.cached["a"] == cached and fallbacks(bench) == {Fallback.MISSING: 1}
    assert all(bench.tokens[name] == generate(PROMPT, 3) for name in "abc")
    assert bench.drained()


def test_what_there_was_no_room_for_is_not_asked_for_again_by_those_that_waited() -> None:
    bench = an_engine(filled(window=None), window=None, num_blocks=9, max_num_seqs=1)
    bench.submit(a_request("runs", [1] * 26, max_tokens=4))
    for _ in range(4):
        bench.step()
    for name in "abc":
        submit(bench, name, PROMPT)
    bench.carrier.land()
    assert not bench.carrier.landing[0].pieces
    bench.carrier.copy()
    bench.carrier.take()
    assert not bench.carrier.fetching and fallbacks(bench) == {Fallback.NO_ROOM: 1}
    bench.carrier.run()  # what was saved until now may go
    bench.finish()
    assert all(bench.tokens[name] == generate(PROMPT, 3) for name in "abc")
    assert bench.drained()


def test_those_that_wait_for_a_fetch_that_fails_compute() -> None:
    bench = an_engine(filled())
    for name in "ab":
        submit(bench, name, PROMPT)
    bench.carrier.fail()
    bench.carrier.take()
    assert not bench.carrier.fetching
    bench.finish()
    assert bench.tokens["a"] == bench.tokens["b"] == generate(PROMPT, 3)
    assert bench.drained()


@pytest.mark.parametrize("when", ["wanted", "taken", "landing", "landed"])
def test_an_abort_leaves_nothing_behind_when_the_copy_has_ended(when: str) -> None:
    bench = an_engine(filled())
    sources = bench.stores.sources(bench.keys(PROMPT))
    bench.submit(a_request("it", PROMPT, sources=sources))
    if when != "wanted":
        bench.carrier.take()
    if when in ("landing", "landed"):
        bench.carrier.land()
    if when == "landed":
        bench.carrier.copy()
    bench.engine.abort(RequestId("it"), 1)
    bench.engine.check()
    bench.carrier.run()
    bench.engine.check()
    assert bench.scheduler.num_fetches == 0 and bench.engine.num_requests == 0
    assert bench.pools.num_available == 39
    assert bench.drained()


def test_the_one_that_waits_beside_it_gets_what_an_aborted_one_began_to_fetch() -> None:
    bench = an_engine(filled())
    for name in "ab":
        submit(bench, name, PROMPT)
    bench.engine.abort(RequestId("a"), 1)
    bench.carrier.run()
    assert finish(bench, "b", PROMPT) == 24
    assert bench.drained()


@pytest.mark.parametrize("landing", [False, True])
def test_a_reset_makes_those_that_fetch_compute_and_takes_nothing_of_what_comes(landing: bool) -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    if landing:
        bench.carrier.land()
    bench.engine.reset_prefix_cache()
    bench.engine.check()
    assert bench.engine.uncomputed_tokens == 26
    num_fetches = bench.scheduler.num_fetches
    submit(bench, "new", PROMPT)
    assert bench.scheduler.num_fetches == num_fetches + 1, "it does not wait for what nobody may have"
    bench.engine.abort(RequestId("new"), 1)
    assert finish(bench, "it", PROMPT) == 0
    bench.engine.reset_prefix_cache()
    bench.carrier.run()
    assert bench.engine.prefix_keys() == ()
    assert bench.drained()


@pytest.mark.parametrize("landing", [False, True])
def test_who_comes_after_a_reset_does_not_wait_for_what_was_begun_before_it(landing: bool) -> None:
    bench = an_engine(filled())
    submit(bench, "before", PROMPT)
    if landing:
        bench.carrier.land()
    bench.engine.reset_prefix_cache()
    submit(bench, "after", PROMPT)
    bench.carrier.run()
    bench.engine.check()
    assert finish(bench, "after", PROMPT) == 24
    assert bench.cached_by_place["after"] == CachedTokens(own_store=24)
    assert bench.drained()


def test_what_was_known_of_the_stores_is_forgotten_with_a_reset() -> None:
    bench = an_engine(filled(), max_num_seqs=1)
    bench.submit(a_request("runs", [1, 2, 3], max_tokens=2))
    bench.step()
    submit(bench, "waits", PROMPT, max_tokens=8)
    bench.engine.reset_prefix_cache()
    bench.carrier.run()
    while not bench.tokens["waits"]:
        bench.step()
    (waited,) = bench.scheduler._running
    bench.scheduler._preempt(waited)
    bench.step()
    bench.pools.prefix_cache.evict(bench.pools.prefix_cache.num_evictable)
    assert finish(bench, "waits", PROMPT) == 0
    assert bench.scheduler.num_fetches == 0


def test_what_has_been_computed_here_meanwhile_is_not_held_twice() -> None:
    bench = an_engine(filled())
    submit(bench, "it", PROMPT)
    bench.carrier.land()
    bench.submit(a_request("computes", PROMPT, max_tokens=1))
    finish_one(bench, "computes")
    bench.carrier.copy()
    bench.engine.check()
    assert bench.pools.blocks.num_free == 39 - 6 and bench.pools.segments.num_free == 39 - 6
    assert finish(bench, "it", PROMPT) == 24
    assert bench.drained()


def test_41_who_was_preempted_gets_back_from_the_store_what_it_has_saved() -> None:
    """Two requests of 34 and 35 tokens, and seven blocks of 16, for which they come to fight."""
    bench = an_engine(
        Stores(), window=10, block_size=16, num_blocks=8, max_num_batched_tokens=64, max_num_seqs=2
    )
    prompts = {"elder": list(range(34)), "younger": list(range(100, 135))}
    for name, prompt in prompts.items():
        bench.submit(a_request(name, prompt, max_tokens=60))
    while bench.engine.has_work:
        bench.carrier.run()
        bench.step()
    assert bench.scheduler.num_preemptions > 0
    starts = [s.start for plan in bench.runner.plans for s in plan.sequences if s.known_tokens]
    assert starts[-1] >= 32 and bench.scheduler.transfers.fetched_tokens["own_store"] >= 16
    for name, prompt in prompts.items():
        assert bench.tokens[name] == generate(prompt, 60)
    assert bench.drained()


def test_who_is_preempted_often_learns_of_each_block_in_the_store_once() -> None:
    bench = an_engine(Stores())
    bench.submit(a_request("it", PROMPT, max_tokens=9))
    for _ in range(3):
        while not any(sequence.num_output for sequence in bench.scheduler._running):
            bench.carrier.run()
            bench.step()
        (sequence,) = bench.scheduler._running
        bench.scheduler._preempt(sequence)
    assert len(sequence.sources) == len(set(sequence.sources)) >= 6
    bench.carrier.run()
    finish(bench, "it", PROMPT)


def test_79_another_salt_fetches_nothing() -> None:
    bench = an_engine(filled(cache_salt="a"))
    assert bench.serve("theirs", PROMPT, cache_salt="b") == 0
    assert bench.serve("nobody's", PROMPT) == 0
    assert bench.serve("ours", PROMPT, cache_salt="a") == 24


def test_prompt_logprobs_fetch_nothing() -> None:
    assert an_engine(filled()).serve("it", PROMPT, prompt_logprobs=0) == 0


def test_what_a_source_is_said_to_have_beyond_the_prompt_is_not_asked_for() -> None:
    bench = an_engine(filled(window=None), window=None)
    source = PrefixSource(store_id=OWN, first=0, end=1000)
    bench.submit(a_request("it", PROMPT, sources=(source,)))
    assert len(bench.scheduler.take_fetches()[0].reads[0].keys) == 6
