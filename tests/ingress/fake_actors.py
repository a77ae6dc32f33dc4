"""Actors that say what a test tells them to, called as Ray calls them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import ActorDiedError

from shoal.actors.messages import (
    CachedTokens,
    EngineId,
    EngineLoad,
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
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Found, StoreId
from shoal.kvstore.outstanding import Outstanding
from tests.fake_runner import generate, logprob

NOTHING_FOUND = Found(blocks=(), segments=())
LOAD = EngineLoad(num_running=1, num_waiting=2, kv_usage=0.5)
NOTHING = Outstanding(counts={"of any kind": 0})


class Never:
    """The outcome of a call to an actor that hangs."""


class Ref:
    """A Ray object reference: awaitable, and a future."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self._outcome, Exception):
            future.set_exception(self._outcome)
        elif not isinstance(self._outcome, Never):
            future.set_result(self._outcome)
        return future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future()).__await__()


class Unanswered(Ref):
    """A call whose answer is late: it comes when a test says so."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        """Another for each who waits: one that gives up cancels its own."""
        waiting: Future[Any] = Future()

        def come(_: Future[Any]) -> None:
            if not waiting.cancelled():
                waiting.set_result(None)

        self._future.add_done_callback(come)
        return waiting

    def settle(self) -> None:
        self._future.set_result(None)


@dataclass
class Method:
    call: Callable[..., object]

    def remote(self, *args: object) -> Any:
        return self.call(*args)


@dataclass
class FakeEngine:
    submitted: list[EngineRequest] = field(default_factory=list)
    num_submits: int = 0
    aborted: list[tuple[object, ...]] = field(default_factory=list)
    num_streams: int = 0
    store_id: StoreId | None = None
    opens: bool = True
    """Whether its streams begin with an empty batch at once."""
    submit_error: Exception | None = None
    reset_error: Exception | None = None
    num_resets: int = 0
    outstanding_error: Exception | None = None
    load_error: Exception | None = None
    answer: list[TokenBatch | Exception] = field(default_factory=list)
    """What its stream brings once a request is submitted."""
    outbox: asyncio.Queue[TokenBatch | Exception] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.stream = Method(self._stream)
        self.submit = Method(self._submit)
        self.abort = Method(lambda *args: self.aborted.append(args))
        self.reset_prefix_cache = Method(self._reset)
        self.outstanding = Method(lambda: Ref(self.outstanding_error or NOTHING))
        self.load = Method(lambda ingress_id: Ref(self.load_error or LOAD))

    async def _stream(self, ingress_id: IngressId) -> AsyncIterator[Ref]:
        self.num_streams += 1
        if self.opens:
            yield Ref(TokenBatch(chunks=(), store_id=self.store_id))
        while True:
            item = await self.outbox.get()
            if isinstance(item, Exception):
                raise item
            yield Ref(replace(item, store_id=self.store_id))

    def _submit(self, ingress_id: IngressId, requests: Sequence[EngineRequest]) -> Ref:
        self.submitted += requests
        self.num_submits += 1
        for item in self.answer:
            self.outbox.put_nowait(item)
        return Ref(self.submit_error)

    def _reset(self) -> Ref:
        self.num_resets += 1
        return Ref(self.reset_error)

    def say(self, *tokens: int, end: FinishReason | None = None, attempt: int = 1) -> None:
        chunk = TokenChunk(request_id=RequestId("r"), attempt=attempt, token_ids=tokens, finish_reason=end)
        self.answer.append(TokenBatch(chunks=(chunk,)))

    def die(self) -> None:
        self.answer.append(ActorDiedError())

    def fail(self, kind: ErrorKind, attempt: int = 1) -> None:
        chunk = TokenChunk(
            request_id=RequestId("r"),
            attempt=attempt,
            finish_reason=FinishReason.ERROR,
            error=RequestError(kind=kind, message="of no use"),
        )
        self.answer.append(TokenBatch(chunks=(chunk,)))


@dataclass
class DrawingEngine(FakeEngine):
    """Draws what follows from all tokens so far, two a step; its process ends after `lives_for` tokens."""

    lives_for: int | None = None

    def _submit(self, ingress_id: IngressId, requests: Sequence[EngineRequest]) -> Ref:
        self.submitted += requests
        self.num_submits += 1
        for request in requests:
            self._draw(request)
        return Ref(None)

    def _draw(self, request: EngineRequest) -> None:
        history = [*request.prompt_token_ids, *request.output_token_ids]
        count, seed = request.max_tokens - len(request.output_token_ids), request.sampling.seed
        tokens = generate(history, count, seed)
        ends = [i + 1 for i, token in enumerate(tokens) if token in request.stop_token_ids]
        tokens = tokens[: min(ends, default=len(tokens))]
        said = len(tokens) if self.lives_for is None else min(self.lives_for, len(tokens))
        for first in range(0, said, 2):
            piece = tuple(tokens[first : min(first + 2, said)])
            self.outbox.put_nowait(TokenBatch(chunks=(self._chunk(request, tokens, first, piece),)))
        if said < len(tokens):
            self.outbox.put_nowait(ActorDiedError())

    def _chunk(
        self, request: EngineRequest, tokens: list[int], first: int, piece: tuple[int, ...]
    ) -> TokenChunk:
        end = None
        if first + len(piece) == len(tokens):
            end = FinishReason.STOP if tokens[-1] in request.stop_token_ids else FinishReason.LENGTH
        return TokenChunk(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=piece,
            logprobs=tuple(map(logprob, piece)) if request.logprobs is not None else (),
            cached_tokens=CachedTokens(device=request.attempt) if first == 0 else None,
            finish_reason=end,
        )


class FakeRouter:
    """Places on the first engine that is not excluded."""

    def __init__(self, *engines: EngineId) -> None:
        self.place = Method(self._place)
        self.ping = Method(lambda: Ref(self.error))
        self.error: Exception | Never | None = None
        self.asked: list[PlacementRequest] = []
        self.sources: tuple[PrefixSource, ...] = ()
        self.says: dict[str, Any] = {"fingerprints": frozenset({b""})}
        """What else is in its replies."""
        self.engines = engines

    def _place(self, request: PlacementRequest) -> Ref:
        self.asked.append(request)
        if self.error is not None:
            return Ref(self.error)
        left = [engine for engine in self.engines if engine not in request.exclude]
        return Ref(PlacementReply(engine_id=left[0], sources=self.sources, **self.says) if left else None)


@dataclass
class FakeStore:
    error: Exception | None = None
    engine: FakeEngine | None = None
    """Must have been reset by then, or it would save its prefixes anew."""
    num_resets: int = 0
    found: Found | Exception | Never = NOTHING_FOUND
    """Whatever it is asked for."""
    asked: list[tuple[BlockKey, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset = Method(self._reset)
        self.find = Method(self._find)
        self.outstanding = Method(lambda: Ref(NOTHING))

    def _find(self, keys: tuple[BlockKey, ...]) -> Ref:
        self.asked.append(keys)
        return Ref(self.found)

    def _reset(self) -> Ref:
        assert self.engine is None or self.engine.num_resets
        self.num_resets += 1
        return Ref(self.error)
