"""Engines that say what a test tells them to, behind the dispatcher's interface."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shoal.actors.ingress.dispatch import Dispatcher, PlacedBy
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import KeyEntry, KeyRing, hash_of
from shoal.actors.ingress.models import Models, ServedModel
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import (
    CachedTokens,
    DeploymentId,
    EngineId,
    EngineLoad,
    EngineRequest,
    FinishReason,
    ModelCard,
    RequestError,
    TokenChunk,
    TokenLogprob,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.outstanding import Outstanding
from tests.one_by_one import OneByOne


def serving_one(card: ModelCard, codec: TextCodec, dispatcher: Dispatcher) -> Models:
    """A front door's only model."""
    return Models(
        ServedModel(deployment_id=DeploymentId("only"), card=card, codec=codec, dispatcher=dispatcher)
    )


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the engine says, to every request alike."""

    token_ids: tuple[int, ...] = ()
    chunk_size: int = 1
    """Also of the prompt's logprobs."""
    pause_s: float = 0.0
    """Before each chunk."""
    num_cached_tokens: int = 0
    """On the device,"""
    num_fetched_tokens: int = 0
    """and those that the own node's store had beside."""
    finish_reason: FinishReason = FinishReason.LENGTH
    error: RequestError | None = None
    """Said in place of the finish_reason."""
    hangs: bool = False
    """Says the tokens and then nothing more."""
    raises: Exception | None = None
    """A breach of the dispatcher's contract."""
    placed_by: tuple[PlacedBy, ...] = (PlacedBy.LOAD,)
    """One for each attempt. All of them are made at once, which is sooner than real ones are."""
    waits_for: int = 0
    """Says its first token when so many requests are open, and each further one when all have got as far."""

    @property
    def cached(self) -> CachedTokens:
        return CachedTokens(device=self.num_cached_tokens, own_store=self.num_fetched_tokens)

    @property
    def ends_well(self) -> bool:
        return not self.hangs and self.error is None and self.raises is None


def guarding(*keys: str, admin_key: str | None = None) -> Guard:
    """Clients need one of these keys, if there are any."""
    entries = [KeyEntry(name=f"client-{index}", hash=hash_of(key)) for index, key in enumerate(keys)]
    return Guard(
        lambda: 0.0,
        keys=KeyRing(lambda: 0.0, always=entries) if keys else None,
        admin_key_hash=None if admin_key is None else hash_of(admin_key),
    )


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """Of the drawn token by its id, of the likeliest by their rank: the tokens 70, 71, ..."""
    top = tuple((70 + rank, -(rank + 1) / 8) for rank in range(num_top))
    return TokenLogprob(logprob=-token_id / 64, top=top)


class FakeDispatcher(OneByOne):
    def __init__(self) -> None:
        self.an_abort = threading.Event()
        self.forget()

    def forget(self) -> None:
        """As new, for the next test."""
        self.script = Script()
        self.scripts: Mapping[tuple[int, ...], Script] = {}
        """For certain prompts."""
        self.next_scripts: list[Script] = []
        """For the next that are opened, in order."""
        self.is_ready = True
        self.resets = True
        self.processes: dict[str, Outstanding | None] = {}
        self.engines: dict[EngineId, EngineLoad] = {}
        self.opened: list[EngineRequest] = []
        self.block_keys: list[tuple[BlockKey, ...]] = []
        self.finished: list[EngineRequest] = []
        self.aborted: list[EngineRequest] = []
        self.said = 0
        self.an_abort.clear()

    def ready(self) -> bool:
        return self.is_ready

    async def reset_prefix_cache(self) -> bool:
        return self.resets

    async def loads(self) -> Mapping[EngineId, EngineLoad]:
        return self.engines

    async def outstanding(self) -> Mapping[str, Outstanding | None]:
        return self.processes

    @asynccontextmanager
    async def _open(
        self,
        request: EngineRequest,
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        self.opened.append(request)
        script = self.scripts.get(request.prompt_token_ids, self.script)
        if self.next_scripts:
            script = self.next_scripts.pop(0)
        for by in self.script.placed_by:
            placed(by)
        self.block_keys.append(block_keys)
        try:
            yield self._speak(request, script)
        finally:
            if request not in self.finished:
                self.aborted.append(request)
                self.an_abort.set()

    async def _speak(self, request: EngineRequest, script: Script) -> AsyncIterator[TokenChunk]:
        async for chunk in self._score_prompt(request, script):
            yield chunk
        *pieces, last = _cut(script.token_ids[: request.max_tokens], script.chunk_size)
        for index, piece in enumerate(pieces):
            await self._wait(script, index)
            yield _chunk(request, piece, cached=None if index else script.cached)
        await self._wait(script, len(pieces))
        if script.ends_well:
            self.finished.append(request)
            yield _chunk(request, last, script.finish_reason, cached=None if pieces else script.cached)
            return
        if last:
            yield _chunk(request, last)
        if script.hangs:
            await asyncio.Event().wait()
        if script.raises is not None:
            raise script.raises
        self.finished.append(request)
        yield _chunk(request, (), FinishReason.ERROR, script.error)

    async def _wait(self, script: Script, num_chunks: int) -> None:
        await asyncio.sleep(script.pause_s)
        if script.waits_for:
            self.said += 1
            while self.said < script.waits_for * (num_chunks + 1):
                await asyncio.sleep(0.001)

    async def _score_prompt(self, request: EngineRequest, script: Script) -> AsyncIterator[TokenChunk]:
        if request.prompt_logprobs is None:
            return
        for piece in _cut(request.prompt_token_ids[1:], script.chunk_size):
            await asyncio.sleep(script.pause_s)
            logprobs = tuple(logprob_of(token_id, request.prompt_logprobs) for token_id in piece)
            yield TokenChunk(request_id=request.request_id, attempt=request.attempt, prompt_logprobs=logprobs)


def _cut(token_ids: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [token_ids[start : start + size] for start in range(0, len(token_ids), size)] or [()]


def _chunk(
    request: EngineRequest,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None = None,
    error: RequestError | None = None,
    cached: CachedTokens | None = None,
) -> TokenChunk:
    num_top = request.logprobs
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=token_ids,
        logprobs=() if num_top is None else tuple(logprob_of(token_id, num_top) for token_id in token_ids),
        cached_tokens=cached,
        finish_reason=finish_reason,
        error=error,
    )
