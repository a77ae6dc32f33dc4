"""The dispatcher over fake actors: what it asks of them, and what it makes of their failures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import (
    EngineId,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    PlacementReply,
    PlacementRequest,
    PrefixSource,
    RequestError,
    RequestId,
    TokenBatch,
    TokenChunk,
    TokenLogprob,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId
from shoal.kvstore.outstanding import Outstanding

A, B = EngineId("engine-a"), EngineId("engine-b")
KEYS = (BlockKey(b"first block"),)
NOTHING = Outstanding(counts={"of any kind": 0})
REQUEST = EngineRequest(
    request_id=RequestId("r"),
    attempt=1,
    prompt_token_ids=(1, 2),
    max_tokens=9,
    stop_token_ids=frozenset(),
)


class Ref:
    """A Ray object reference: awaitable, and a future."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self._outcome, Exception):
            future.set_exception(self._outcome)
        else:
            future.set_result(self._outcome)
        return future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future()).__await__()


@dataclass
class Method:
    call: Callable[..., object]

    def remote(self, *args: object) -> Any:
        return self.call(*args)


@dataclass
class FakeEngine:
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[tuple[object, ...]] = field(default_factory=list)
    num_streams: int = 0
    submit_error: Exception | None = None
    reset_error: Exception | None = None
    num_resets: int = 0
    outstanding_error: Exception | None = None
    answer: list[TokenBatch | Exception] = field(default_factory=list)
    """What its stream brings once a request is submitted."""
    outbox: asyncio.Queue[TokenBatch | Exception] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.stream = Method(self._stream)
        self.submit = Method(self._submit)
        self.abort = Method(lambda *args: self.aborted.append(args))
        self.reset_prefix_cache = Method(self._reset)
        self.outstanding = Method(lambda: Ref(self.outstanding_error or NOTHING))

    async def _stream(self, ingress_id: IngressId) -> AsyncIterator[Ref]:
        self.num_streams += 1
        while True:
            item = await self.outbox.get()
            if isinstance(item, Exception):
                raise item
            yield Ref(item)

    def _submit(self, ingress_id: IngressId, request: EngineRequest) -> Ref:
        self.submitted.append(request)
        for item in self.answer:
            self.outbox.put_nowait(item)
        return Ref(self.submit_error)

    def _reset(self) -> Ref:
        self.num_resets += 1
        return Ref(self.reset_error)

    def say(self, *tokens: int, end: FinishReason | None = None, attempt: int = 1) -> None:
        chunk = TokenChunk(request_id=RequestId("r"), attempt=attempt, token_ids=tokens, finish_reason=end)
        self.answer.append(TokenBatch(chunks=(chunk,)))

    def fail(self, kind: ErrorKind, attempt: int = 1) -> None:
        chunk = TokenChunk(
            request_id=RequestId("r"),
            attempt=attempt,
            finish_reason=FinishReason.ERROR,
            error=RequestError(kind=kind, message="of no use"),
        )
        self.answer.append(TokenBatch(chunks=(chunk,)))


class FakeRouter:
    """Places on the first engine that is not excluded."""

    def __init__(self, *engines: EngineId) -> None:
        self.place = Method(self._place)
        self.ping = Method(lambda: Ref(self.error))
        self.error: Exception | None = None
        self.asked: list[PlacementRequest] = []
        self.sources: tuple[PrefixSource, ...] = ()
        self._engines = engines

    def _place(self, request: PlacementRequest) -> Ref:
        self.asked.append(request)
        if self.error is not None:
            return Ref(self.error)
        left = [engine for engine in self._engines if engine not in request.exclude]
        return Ref(PlacementReply(engine_id=left[0], sources=self.sources) if left else None)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=10))


async def all_chunks(streams: EngineStreams) -> list[TokenChunk]:
    async with streams.open(REQUEST, KEYS) as chunks:
        return [chunk async for chunk in chunks]


def only_error(chunks: list[TokenChunk]) -> ErrorKind:
    (chunk,) = chunks
    assert chunk.finish_reason is FinishReason.ERROR and chunk.error is not None
    return chunk.error.kind


async def _a_request_to_its_end() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i")), FakeRouter(A)
    await streams.introduce(router, {A: engine}, {})
    engine.say(5)
    engine.say(66, attempt=2)
    engine.say(6, end=FinishReason.LENGTH)
    chunks = await all_chunks(streams)
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6,)], "another attempt's tokens are not heard"
    assert engine.submitted == [REQUEST]
    assert engine.aborted == []
    (asked,) = router.asked
    assert (asked.num_prompt_tokens, asked.block_keys) == (2, KEYS)


def test_a_request_to_its_end() -> None:
    run(_a_request_to_its_end())


async def _leaving_early_aborts() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.say(5)
    async with streams.open(REQUEST, KEYS) as chunks:
        await anext(chunks)
    ((request_id, attempt, submit),) = engine.aborted
    assert (request_id, attempt) == ("r", 1)
    assert isinstance(submit, Ref), "the submit's reference keeps Ray from running the abort before it"


def test_leaving_early_aborts_and_the_abort_cannot_overtake_the_submit() -> None:
    run(_leaving_early_aborts())


async def _an_engine_that_dies() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    engine.say(5)
    engine.answer.append(ActorDiedError())
    chunks = await all_chunks(streams)
    assert chunks[0].token_ids == (5,)
    assert only_error(chunks[1:]) is ErrorKind.ENGINE_LOST
    assert not streams.ready()


def test_an_engine_that_dies_ends_its_requests_with_an_error() -> None:
    run(_an_engine_that_dies())


async def _a_lost_engine_is_not_offered_again() -> None:
    dead, alive = FakeEngine(), FakeEngine()
    streams, router = EngineStreams(IngressId("i")), FakeRouter(A, B)
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
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"))
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


async def _nobody_to_ask() -> None:
    streams = EngineStreams(IngressId("i"))
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE
    await streams.introduce(FakeRouter(), {}, {})
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE
    assert not streams.ready()


def test_without_a_router_or_engines_there_is_an_answer_at_once() -> None:
    run(_nobody_to_ask())


async def _a_submit_that_fails() -> None:
    engine = FakeEngine(submit_error=ActorDiedError())
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    assert only_error(await all_chunks(streams)) is ErrorKind.ENGINE_LOST
    assert len(engine.aborted) == 1, "it may have arrived all the same"


def test_a_submit_that_fails_is_an_error_of_its_request() -> None:
    run(_a_submit_that_fails())


async def _before_a_word(make_fail: Callable[[FakeEngine], None]) -> None:
    failing, idle = FakeEngine(), FakeEngine()
    streams, router = EngineStreams(IngressId("i")), FakeRouter(A, B)
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
    streams, router = EngineStreams(IngressId("i")), FakeRouter(A, B)
    await streams.introduce(router, engines, {})
    engines[A].fail(ErrorKind.ENGINE_LOST, attempt=1)
    engines[B].fail(ErrorKind.OVERLOADED, attempt=2)
    assert only_error(await all_chunks(streams)) is ErrorKind.OVERLOADED
    assert [len(engine.submitted) for engine in engines.values()] == [1, 1]


def test_each_engine_is_asked_once_and_the_last_refusal_stands() -> None:
    run(_every_engine_is_full())


async def _a_failure_of_the_request() -> None:
    engine, other = FakeEngine(), FakeEngine()
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A, B), {A: engine, B: other}, {})
    engine.fail(ErrorKind.INTERNAL)
    assert only_error(await all_chunks(streams)) is ErrorKind.INTERNAL
    assert other.submitted == []


def test_a_request_that_no_engine_can_compute_is_not_tried_on_another() -> None:
    run(_a_failure_of_the_request())


async def _a_prompt_that_was_scored() -> None:
    engine, other = FakeEngine(), FakeEngine()
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A, B), {A: engine, B: other}, {})
    scored = TokenChunk(request_id=RequestId("r"), attempt=1, prompt_logprobs=(TokenLogprob(logprob=-1.0),))
    engine.answer.append(TokenBatch(chunks=(scored,)))
    engine.answer.append(ActorDiedError())
    chunks = await all_chunks(streams)
    assert chunks[0] == scored and only_error(chunks[1:]) is ErrorKind.ENGINE_LOST
    assert other.submitted == []


def test_after_its_first_words_a_request_is_not_begun_again() -> None:
    run(_a_prompt_that_was_scored())


async def _leaving_the_second_attempt() -> None:
    full, busy = FakeEngine(), FakeEngine()
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A, B), {A: full, B: busy}, {})
    full.fail(ErrorKind.OVERLOADED)
    busy.say(5, attempt=2)
    async with streams.open(REQUEST, KEYS) as chunks:
        await anext(chunks)
    assert full.aborted == []
    assert [aborted[:2] for aborted in busy.aborted] == [("r", 2)]


def test_leaving_aborts_the_attempt_that_lives() -> None:
    run(_leaving_the_second_attempt())


async def _a_router_that_fails() -> None:
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i")), FakeRouter(A)
    await streams.introduce(router, {A: engine}, {})
    assert streams.ready()
    router.error = ActorDiedError()
    assert only_error(await all_chunks(streams)) is ErrorKind.NO_ENGINE
    assert not streams.ready()
    await streams.introduce(router, {A: engine}, {})
    assert not streams.ready(), "it still does not answer"
    router.error = None
    await streams.introduce(router, {A: engine}, {})
    assert streams.ready()
    router.error = ActorDiedError()
    await all_chunks(streams)
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    assert streams.ready(), "another has taken its place"


def test_while_the_router_does_not_answer_the_ingress_is_not_ready() -> None:
    run(_a_router_that_fails())


async def _resetting_the_prefix_caches() -> None:
    alive, mute, dead = (
        FakeEngine(),
        FakeEngine(reset_error=ActorUnavailableError("away", None)),
        FakeEngine(),
    )
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A), {A: alive, B: dead}, {})
    dead.outbox.put_nowait(ActorDiedError())
    await asyncio.sleep(0.01)  # the pump hears of it
    assert await streams.reset_prefix_cache(), "what is gone holds nothing"
    await streams.introduce(FakeRouter(A), {A: alive, B: mute}, {})
    assert not await streams.reset_prefix_cache()
    assert (alive.num_resets, mute.num_resets, dead.num_resets) == (2, 1, 0)


def test_resetting_asks_every_engine_and_says_if_one_did_not_answer() -> None:
    run(_resetting_the_prefix_caches())


@dataclass
class FakeStore:
    error: Exception | None = None
    engine: FakeEngine | None = None
    """Must have been reset by then, or it would save its prefixes anew."""
    num_resets: int = 0

    def __post_init__(self) -> None:
        self.reset = Method(self._reset)
        self.outstanding = Method(lambda: Ref(NOTHING))

    def _reset(self) -> Ref:
        assert self.engine is None or self.engine.num_resets
        self.num_resets += 1
        return Ref(self.error)


async def _resetting_the_stores() -> None:
    engine, streams = FakeEngine(), EngineStreams(IngressId("i"))
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
    engine, streams, router = FakeEngine(), EngineStreams(IngressId("i")), FakeRouter(A)
    router.sources = (PrefixSource(store_id=StoreId("s"), first=0, end=1),)
    await streams.introduce(router, {A: engine}, {})
    engine.say(5, end=FinishReason.LENGTH)
    await all_chunks(streams)
    assert engine.submitted == [replace(REQUEST, sources=router.sources)]


def test_the_engine_is_told_where_the_prefix_can_be_had() -> None:
    run(_where_the_prefix_is())


async def _what_is_outstanding() -> None:
    engines, store = {A: FakeEngine(), B: FakeEngine(outstanding_error=ActorDiedError())}, FakeStore()
    streams = EngineStreams(IngressId("i"))
    await streams.introduce(FakeRouter(A), engines, {StoreId("s"): store})
    engines[A].say(5)
    async with streams.open(REQUEST, KEYS) as chunks:
        await anext(chunks)
        during = await streams.outstanding()
        assert during["i"] == Outstanding(counts={"inboxes": 1, "submits": 1, "lost_links": 0})
        assert (during[A], during[B], during["s"]) == (NOTHING, None, NOTHING)
    after = (await streams.outstanding())["i"]
    assert after is not None and after.is_clean


def test_what_is_outstanding_is_asked_of_all_and_silence_is_told() -> None:
    run(_what_is_outstanding())
