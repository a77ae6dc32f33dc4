"""Engines that say what a test tells them to, behind the dispatcher's interface."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shoal.actors.messages import EngineRequest, FinishReason, RequestError, TokenChunk


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the engine says, to every request alike."""

    token_ids: tuple[int, ...] = ()
    chunk_size: int = 1
    pause_s: float = 0.0
    """Before each chunk."""
    finish_reason: FinishReason = FinishReason.LENGTH
    error: RequestError | None = None
    """Said in place of the finish_reason."""
    hangs: bool = False
    """Says the tokens and then nothing more."""
    raises: Exception | None = None
    """A breach of the dispatcher's contract."""

    @property
    def ends_well(self) -> bool:
        return not self.hangs and self.error is None and self.raises is None


class FakeDispatcher:
    def __init__(self) -> None:
        self.an_abort = threading.Event()
        self.forget()

    def forget(self) -> None:
        """As new, for the next test."""
        self.script = Script()
        self.is_ready = True
        self.opened: list[EngineRequest] = []
        self.finished: list[EngineRequest] = []
        self.aborted: list[EngineRequest] = []
        self.an_abort.clear()

    def ready(self) -> bool:
        return self.is_ready

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        self.opened.append(request)
        try:
            yield self._speak(request, self.script)
        finally:
            if request not in self.finished:
                self.aborted.append(request)
                self.an_abort.set()

    async def _speak(self, request: EngineRequest, script: Script) -> AsyncIterator[TokenChunk]:
        *pieces, last = _cut(script.token_ids[: request.max_tokens], script.chunk_size)
        for piece in pieces:
            await asyncio.sleep(script.pause_s)
            yield _chunk(request, piece)
        await asyncio.sleep(script.pause_s)
        if script.ends_well:
            self.finished.append(request)
            yield _chunk(request, last, script.finish_reason)
            return
        if last:
            yield _chunk(request, last)
        if script.hangs:
            await asyncio.Event().wait()
        if script.raises is not None:
            raise script.raises
        self.finished.append(request)
        yield _chunk(request, (), FinishReason.ERROR, script.error)


def _cut(token_ids: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [token_ids[start : start + size] for start in range(0, len(token_ids), size)] or [()]


def _chunk(
    request: EngineRequest,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None = None,
    error: RequestError | None = None,
) -> TokenChunk:
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=token_ids,
        finish_reason=finish_reason,
        error=error,
    )
