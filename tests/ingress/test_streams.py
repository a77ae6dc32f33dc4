"""The dispatcher over fake actors: what it asks of them, and what it makes of their failures."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.links import CALL_DEADLINE_S, Inbox, Links
from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import (
    EngineId,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    PrefixSource,
    RequestId,
    TokenBatch,
    TokenChunk,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId
from shoal.kvstore.outstanding import Outstanding
from tests.ingress.fake_actors import LOAD, NOTHING, FakeEngine, FakeRouter, FakeStore, Never, Ref
from tests.ingress.virtual_time import run_in_virtual_time

A, B = EngineId("engine-a"), EngineId("engine-b")
BLOCK_SIZE = 2
KEYS = (BlockKey(b"first block"),)
REQUEST = EngineRequest(
    request_id=RequestId("r"),
    attempt=1,
    prompt_token_ids=(1, 2, 3),
    max_tokens=9,
    stop_token_ids=frozenset(),
)


def run(test: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(asyncio.wait_for(test, timeout=1000))


def nobody_cares(by: PlacedBy) -> None:
    pass


def not_yet() -> bool:
    return False


async def all_chunks(
    streams: EngineStreams,
    request: EngineRequest = REQUEST,
    keys: tuple[BlockKey, ...] = KEYS,
    placed: Callable[[PlacedBy], None] = nobody_cares,
    has_begun: Callable[[], bool] = not_yet,
) -> list[TokenChunk]:
    (opened,) = streams.open([request], keys, placed, has_begun)
    async with opened as chunks:
        return [chunk async for chunk in chunks]


def only_error(chunks: list[TokenChunk]) -> ErrorKind:
    (chunk,) = chunks
    assert chunk.finish_reason is FinishReason.ERROR and chunk.error is not None
    return chunk.error.kind


async def _a_request_to_its_end() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A)
    await streams.introduce(router, {A: engine}, {})
    engine.say(5)
    engine.say(66, attempt=2)
    engine.say(6, end=FinishReason.LENGTH)
    chunks = await all_chunks(streams)
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6,)], "another attempt's tokens are not heard"
    assert engine.submitted == [REQUEST]
    assert engine.aborted == []
    (asked,) = router.asked
    assert (asked.num_prompt_tokens, asked.block_keys) == (3, KEYS)


def test_a_request_to_its_end() -> None:
    run(_a_request_to_its_end())


async def _nothing_is_submitted_before_the_stream_is_open() -> None:
    """The engine might say its first tokens on the stream that this one takes the place of."""
    engine, streams = FakeEngine(opens=False), EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.say(5, end=FinishReason.LENGTH)
    asking = asyncio.create_task(all_chunks(streams))
    await asyncio.sleep(CALL_DEADLINE_S / 2)
    assert engine.submitted == []
    engine.outbox.put_nowait(TokenBatch(chunks=()))
    assert [chunk.token_ids for chunk in await asking] == [(5,)]


async def _a_stream_that_does_not_open_or_breaks_before_it_does() -> None:
    engine, streams = FakeEngine(opens=False), EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    began = asyncio.get_running_loop().time()
    assert only_error(await all_chunks(streams)) is ErrorKind.ENGINE_LOST
    assert asyncio.get_running_loop().time() - began == pytest.approx(CALL_DEADLINE_S, abs=0.1)
    asking = asyncio.create_task(all_chunks(streams))
    await asyncio.sleep(0.1)
    engine.outbox.put_nowait(ActorDiedError())
    assert only_error(await asking) is ErrorKind.ENGINE_LOST
    assert engine.submitted == [] and engine.aborted == []


@pytest.mark.parametrize(
    "test",
    [_nothing_is_submitted_before_the_stream_is_open, _a_stream_that_does_not_open_or_breaks_before_it_does],
)
def test_a_stream_is_open_before_anything_is_submitted(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(test())


async def _leaving_early_aborts() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.say(5)
    (opened,) = streams.open([REQUEST], KEYS, nobody_cares, not_yet)
    async with opened as chunks:
        await anext(chunks)
    ((request_id, attempt, submit),) = engine.aborted
    assert (request_id, attempt) == ("r", 1)
    assert isinstance(submit, Ref), "the submit's reference keeps Ray from running the abort before it"


def test_leaving_early_aborts_and_the_abort_cannot_overtake_the_submit() -> None:
    run(_leaving_early_aborts())


async def _a_lost_engine_is_not_offered_again() -> None:
    dead, alive = FakeEngine(), FakeEngine()
    streams, router = EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A, B)
    await streams.introduce(router, {A: dead, B: alive}, {})
    dead.outbox.put_nowait(ActorDiedError())
    await asyncio.sleep(0.01)  # the pump hears of it; neither router nor supervisor knows yet
    alive.say(7, end=FinishReason.LENGTH)
    assert [chunk.token_ids for chunk in await all_chunks(streams)] == [(7,)]
    assert [request.exclude for request in router.asked] == [frozenset({A})]
    assert dead.submitted == []


def test_an_engine_known_to_be_lost_is_not_placed_on() -> None:
    run(_a_lost_engine_is_not_offered_again())


async def _a_broken_stream_is_opened_anew() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.answer.append(ActorUnavailableError("a blip of the network", None))
    assert only_error(await all_chunks(streams)) is ErrorKind.ENGINE_LOST
    assert len(engine.aborted) == 1, "the engine lives and would go on computing for nobody"
    assert not streams.ready()
    engine.answer.clear()
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.say(7, end=FinishReason.LENGTH)
    assert [chunk.token_ids for chunk in await all_chunks(streams)] == [(7,)]
    assert engine.num_streams == 2


def test_a_stream_that_breaks_while_its_engine_lives_is_opened_anew() -> None:
    run(_a_broken_stream_is_opened_anew())


async def _named_and_no_longer_named_in_one_turn() -> None:
    links = Links(IngressId("i"))

    async def submitted() -> Inbox:
        link = await links.find(A)
        assert link is not None
        (inbox,) = await link.submit([REQUEST])
        return inbox

    told = links.introduce({A: FakeEngine()}), submitted(), links.introduce({})
    _, inbox, _ = await asyncio.gather(*told)
    assert only_error([await inbox.get()]) is ErrorKind.ENGINE_LOST


def test_a_link_that_is_removed_before_its_stream_is_opened_loses_its_requests_all_the_same() -> None:
    run(_named_and_no_longer_named_in_one_turn())


async def _nobody_to_ask() -> None:
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE
    await streams.introduce(FakeRouter(), {}, {})
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE
    assert not streams.ready()


def test_without_a_router_or_engines_there_is_an_answer_at_once() -> None:
    run(_nobody_to_ask())


async def _a_submit_that_fails() -> None:
    engine = FakeEngine(submit_error=ActorDiedError())
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    assert only_error(await all_chunks(streams)) is ErrorKind.ENGINE_LOST
    assert len(engine.aborted) == 1, "it may have arrived all the same"


def test_a_submit_that_fails_is_an_error_of_its_request() -> None:
    run(_a_submit_that_fails())


async def _before_a_word(make_fail: Callable[[FakeEngine], None]) -> None:
    failing, idle = FakeEngine(), FakeEngine()
    streams, router = EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A, B)
    await streams.introduce(router, {A: failing, B: idle}, {})
    make_fail(failing)
    idle.say(6, attempt=1)
    idle.say(7, attempt=2)
    idle.say(8, end=FinishReason.LENGTH, attempt=2)
    assert [chunk.token_ids for chunk in await all_chunks(streams)] == [(7,), (8,)]
    assert idle.submitted == [replace(REQUEST, attempt=2)]
    assert [(asked.attempt, asked.exclude) for asked in router.asked] == [
        (1, frozenset()),
        (2, frozenset({A})),
    ]
    assert all(asked.block_keys == KEYS for asked in router.asked)
    assert idle.aborted == []


def refuses(engine: FakeEngine) -> None:
    engine.fail(ErrorKind.OVERLOADED)


def dies(engine: FakeEngine) -> None:
    engine.answer.append(ActorDiedError())


def cannot_be_reached(engine: FakeEngine) -> None:
    engine.submit_error = ActorUnavailableError("away", None)


@pytest.mark.parametrize("make_fail", [refuses, dies, cannot_be_reached])
def test_what_fails_before_a_word_is_said_is_placed_again(make_fail: Callable[[FakeEngine], None]) -> None:
    run(_before_a_word(make_fail))


async def _every_engine_is_full() -> None:
    engines = {A: FakeEngine(), B: FakeEngine()}
    streams, router = EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A, B)
    await streams.introduce(router, engines, {})
    engines[A].fail(ErrorKind.ENGINE_LOST, attempt=1)
    engines[B].fail(ErrorKind.OVERLOADED, attempt=2)
    assert only_error(await all_chunks(streams)) is ErrorKind.OVERLOADED
    assert [len(engine.submitted) for engine in engines.values()] == [1, 1]


def test_each_engine_is_asked_once_and_the_last_refusal_stands() -> None:
    run(_every_engine_is_full())


async def _a_failure_of_the_request() -> None:
    engine, other = FakeEngine(), FakeEngine()
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A, B), {A: engine, B: other}, {})
    engine.fail(ErrorKind.INTERNAL)
    assert only_error(await all_chunks(streams)) is ErrorKind.INTERNAL
    assert other.submitted == []


def test_a_request_that_no_engine_can_compute_is_not_tried_on_another() -> None:
    run(_a_failure_of_the_request())


async def _leaving_the_second_attempt() -> None:
    full, busy = FakeEngine(), FakeEngine()
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A, B), {A: full, B: busy}, {})
    full.fail(ErrorKind.OVERLOADED)
    busy.say(5, attempt=2)
    (opened,) = streams.open([REQUEST], KEYS, nobody_cares, not_yet)
    async with opened as chunks:
        await anext(chunks)
    assert full.aborted == []
    assert [aborted[:2] for aborted in busy.aborted] == [("r", 2)]


def test_leaving_aborts_the_attempt_that_lives() -> None:
    run(_leaving_the_second_attempt())


async def _resetting_the_prefix_caches() -> None:
    alive, mute, dead = (
        FakeEngine(),
        FakeEngine(reset_error=ActorUnavailableError("away", None)),
        FakeEngine(),
    )
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), {A: alive, B: dead}, {})
    dead.outbox.put_nowait(ActorDiedError())
    await asyncio.sleep(0.01)  # the pump hears of it
    assert await streams.reset_prefix_cache(), "what is gone holds nothing"
    await streams.introduce(FakeRouter(A), {A: alive, B: mute}, {})
    assert not await streams.reset_prefix_cache()
    assert (alive.num_resets, mute.num_resets, dead.num_resets) == (2, 1, 0)


def test_resetting_asks_every_engine_and_says_if_one_did_not_answer() -> None:
    run(_resetting_the_prefix_caches())


async def _resetting_the_stores() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE)
    alive, dead, mute = FakeStore(engine=engine), FakeStore(ActorDiedError()), FakeStore(TimeoutError())
    stores = {StoreId("alive"): alive, StoreId("dead"): dead}
    await streams.introduce(FakeRouter(A), {A: engine}, stores)
    assert await streams.reset_prefix_cache(), "what is gone holds nothing"
    assert (alive.num_resets, dead.num_resets) == (1, 1)
    await streams.introduce(FakeRouter(A), {A: engine}, {StoreId("mute"): mute})
    assert not await streams.reset_prefix_cache()


def test_resetting_empties_the_stores_after_the_engines() -> None:
    run(_resetting_the_stores())


async def _where_the_prefix_is() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A)
    router.sources = (PrefixSource(store_id=StoreId("s"), first=0, end=1),)
    await streams.introduce(router, {A: engine}, {})
    engine.say(5, end=FinishReason.LENGTH)
    await all_chunks(streams)
    assert engine.submitted == [replace(REQUEST, sources=router.sources)]


def test_the_engine_is_told_where_the_prefix_can_be_had() -> None:
    run(_where_the_prefix_is())


async def _a_router_that_is_away(error: Exception | Never) -> None:
    busy, idle = FakeEngine(), FakeEngine()
    streams, router = EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A)
    await streams.introduce(router, {A: busy, B: idle}, {})
    idle.say(7, end=FinishReason.LENGTH)
    another = replace(REQUEST, request_id=RequestId("another"))
    (opened,) = streams.open([another], KEYS, nobody_cares, not_yet)
    async with opened as chunks:
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.01)
        assert len(busy.submitted) == 1
        router.error = error
        placed: list[PlacedBy] = []
        for _ in range(3):
            assert [chunk.token_ids for chunk in await all_chunks(streams, placed=placed.append)] == [(7,)]
        assert placed == [PlacedBy.ROUTER_AWAY] * 3
        assert len(router.asked) == 2, "one request found out"
        assert streams.ready(), "a request can be placed"
        waiting.cancel()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ActorDiedError(), "ActorDiedError"), (Never(), "TimeoutError")],
    ids=["dead", "hung"],
)
def test_while_the_router_is_away_requests_go_where_the_fewest_of_ours_are(
    error: Exception | Never, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(_a_router_that_is_away(error))
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and f"router does not answer ({expected})" in said[0]


async def _a_router_that_comes_back() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A)
    engine.say(7, end=FinishReason.LENGTH)

    async def went_by() -> PlacedBy:
        placed: list[PlacedBy] = []
        await all_chunks(streams, placed=placed.append)
        (by,) = placed
        return by

    async def introduced(router: FakeRouter) -> None:
        await streams.introduce(router, {A: engine}, {})
        await asyncio.sleep(0.01)  # a ping

    await introduced(router)
    router.error = ActorDiedError()
    assert await went_by() is PlacedBy.ROUTER_AWAY
    await introduced(router)
    assert await went_by() is PlacedBy.ROUTER_AWAY, "it still does not answer"
    router.error = None
    await introduced(router)
    assert await went_by() is PlacedBy.LOAD
    router.error = ActorDiedError()
    assert await went_by() is PlacedBy.ROUTER_AWAY
    await introduced(FakeRouter(A))
    assert await went_by() is PlacedBy.LOAD, "another has taken its place"


def test_a_router_that_answers_a_ping_or_is_another_is_asked_again() -> None:
    run(_a_router_that_comes_back())


async def _a_router_that_knows_nobody_yet() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter()
    engine.say(7, end=FinishReason.LENGTH)
    await streams.introduce(router, {A: engine}, {})
    asked = asyncio.ensure_future(all_chunks(streams))
    await asyncio.sleep(0.5)
    router.engines = (A,)
    await streams.introduce(router, {A: engine}, {})
    assert [chunk.token_ids for chunk in await asked] == [(7,)]
    router.engines = ()
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE, "but not for ever"


def test_a_router_that_was_just_restarted_is_given_a_moment_to_hear_of_the_engines() -> None:
    run(_a_router_that_knows_nobody_yet())


KNOWN = {"fingerprints": frozenset({b"f"})}
MIXED = {"fingerprints": frozenset({b"f", b"of other kernels"})}


async def _what_a_placement_goes_by(
    says: dict[str, Any], request: EngineRequest, keys: tuple[BlockKey, ...], expected: PlacedBy
) -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i"), BLOCK_SIZE), FakeRouter(A)
    engine.say(7, end=FinishReason.LENGTH)
    router.says = says
    await streams.introduce(router, {A: engine}, {}, b"f")
    placed: list[PlacedBy] = []
    await all_chunks(streams, request, keys, placed.append)
    assert placed == [expected]


@pytest.mark.parametrize(
    ("says", "request_", "keys", "expected"),
    [
        ({**KNOWN, "hit_tokens": 2}, REQUEST, KEYS, PlacedBy.PREFIX),
        ({**KNOWN, "hit_tokens": 2, "is_up_to_date": False}, REQUEST, KEYS, PlacedBy.PREFIX),
        (KNOWN, REQUEST, KEYS, PlacedBy.LOAD),
        ({**KNOWN, "is_up_to_date": False}, REQUEST, KEYS, PlacedBy.STALE_INDEX),
        (KNOWN, REQUEST, (), PlacedBy.NO_KEYS),
        ({"fingerprints": frozenset({b"of other kernels"})}, REQUEST, KEYS, PlacedBy.NO_KEYS),
        (MIXED, REQUEST, KEYS, PlacedBy.NO_KEYS),
        ({**MIXED, "hit_tokens": 2}, REQUEST, KEYS, PlacedBy.PREFIX),
        (KNOWN, replace(REQUEST, prompt_token_ids=(1, 2)), (), PlacedBy.LOAD),
        (KNOWN, replace(REQUEST, prompt_logprobs=0), (), PlacedBy.LOAD),
    ],
    ids=[
        *("hit", "hit, stale", "none", "stale", "no keys", "other fingerprint", "mixed", "mixed, hit"),
        *("one block", "scored"),
    ],
)
def test_case_14_a_placement_that_may_have_overlooked_a_prefix_is_called_blind(
    says: dict[str, Any], request_: EngineRequest, keys: tuple[BlockKey, ...], expected: PlacedBy
) -> None:
    run(_what_a_placement_goes_by(says, request_, keys, expected))


async def _what_is_outstanding() -> None:
    engines, store = {A: FakeEngine(), B: FakeEngine(outstanding_error=ActorDiedError())}, FakeStore()
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    await streams.introduce(FakeRouter(A), engines, {StoreId("s"): store})
    engines[A].say(5)
    (opened,) = streams.open([REQUEST], KEYS, nobody_cares, not_yet)
    async with opened as chunks:
        await anext(chunks)
        during = await streams.outstanding()
        assert during["i"] == Outstanding(counts={"inboxes": 1, "submits": 1, "lost_links": 0})
        assert (during[A], during[B], during["s"]) == (NOTHING, None, NOTHING)
    after = (await streams.outstanding())["i"]
    assert after is not None and after.is_clean


def test_what_is_outstanding_is_asked_of_all_and_silence_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run(_what_is_outstanding())
    assert f"{B} did not say what is outstanding: ActorDiedError" in caplog.messages


async def _loads() -> None:
    engines = {A: FakeEngine(), B: FakeEngine(load_error=ActorDiedError())}
    streams = EngineStreams(IngressId("i"), BLOCK_SIZE)
    assert await streams.loads() == {}
    await streams.introduce(FakeRouter(A), engines, {})
    assert await streams.loads() == {A: LOAD}, "whoever does not say is left out"


def test_engines_say_what_they_do_with_an_ingresss_requests() -> None:
    run(_loads())
