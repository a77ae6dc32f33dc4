"""The engines as one ingress sees them: an actor each, and the one stream on which it speaks to us."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from shoal.actors.messages import (
    EngineId,
    EngineLoad,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    RequestError,
    RequestId,
    StoreId,
    TokenBatch,
    TokenChunk,
)
from shoal.kvstore.calls import within
from shoal.kvstore.outstanding import Outstanding

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""For a call that only enters a queue. A hung engine's tokens are the supervisor's business: it kills it."""

HUNG_AFTER_S = 2.5
"""An engine answers a submit in milliseconds, whatever it computes. After so long another is the better
choice, if there is one: README.md says what a mistake costs."""

INTRODUCTION_DEADLINE_S = 2.0
"""How long we may hear later of an engine than the router does."""

Key = tuple[RequestId, int]
"""(request, attempt): what an attempt that was given up still says finds no inbox."""
Inbox = asyncio.Queue[TokenChunk]


class Link:
    """To one engine: the stream we pump, and who waits for its tokens."""

    def __init__(self, engine_id: EngineId, actor: Any, ingress_id: IngressId) -> None:
        self.engine_id = engine_id
        self.lost = False
        self.died = False
        """It was lost with its process. The stream of one that lives may break as well."""
        self.is_silent = False
        """It was too late to answer a submit, and nothing has been heard of it since."""
        self.store_id: StoreId | None = None
        """Where it saves what it computes, as it last said."""
        self._actor = actor
        self._ingress_id = ingress_id
        self._inboxes: dict[Key, Inbox] = {}
        self._submits: dict[Key, Any] = {}
        self._is_open = asyncio.Event()
        """The engine speaks on this stream, and no more on one that we had before; or it is lost."""
        self._pump_task = asyncio.create_task(self._pump())

    @property
    def num_requests(self) -> int:
        """Of this ingress."""
        return len(self._inboxes)

    @property
    def num_submits(self) -> int:
        """Requests that the engine was told of, and has not said the last of."""
        return len(self._submits)

    async def submit(
        self, requests: Sequence[EngineRequest], within_s: float = CALL_DEADLINE_S
    ) -> list[Inbox]:
        """In one call. Where their chunks arrive, also those that say that they could not be submitted."""
        inboxes = {_key(request): Inbox() for request in requests}
        self._inboxes |= inboxes
        submit: Any = None
        try:
            async with asyncio.timeout(within_s):
                await self._is_open.wait()
                # Nobody waits for some of them any more, or the engine is lost, and all have heard of it.
                wanted = tuple(request for request in requests if _key(request) in self._inboxes)
                if wanted:
                    submit = self._actor.submit.remote(self._ingress_id, wanted)
                    self._submits |= dict.fromkeys(map(_key, wanted), submit)
                    await within(within_s, submit)
        except (RayError, TimeoutError) as error:
            self.died |= isinstance(error, ActorDiedError)
            if isinstance(error, TimeoutError):
                self._is_late(submit)
            message = f"{self.engine_id}: {type(error).__name__}"
            for key, inbox in inboxes.items():
                self.end(key, abort=True)  # it may have arrived all the same
                inbox.put_nowait(error_chunk(key, ErrorKind.ENGINE_LOST, message))
        return list(inboxes.values())

    def end(self, key: Key, *, abort: bool) -> None:
        """Nobody waits for the request's tokens any more."""
        self._inboxes.pop(key, None)
        submit = self._submits.pop(key, None)
        if abort and submit is not None:
            self._actor.abort.remote(*key, submit)

    async def reset_prefix_cache(self) -> None:
        """Raises RayError or TimeoutError."""
        await within(CALL_DEADLINE_S, self._actor.reset_prefix_cache.remote())

    async def outstanding(self) -> Outstanding:
        """The engine's. Raises RayError or TimeoutError."""
        outstanding: Outstanding = await within(CALL_DEADLINE_S, self._actor.outstanding.remote())
        return outstanding

    async def load(self, deadline_s: float) -> EngineLoad:
        """Of this ingress's requests. Raises RayError or TimeoutError."""
        load: EngineLoad = await within(deadline_s, self._actor.load.remote(self._ingress_id))
        return load

    def remove(self, *, is_gone: bool) -> None:
        """Its requests are told at once: a pump that has not begun yet would end without a word."""
        self.died |= is_gone
        self._pump_task.cancel()
        self._lose()

    def _is_late(self, submit: Any) -> None:
        """Silent until it says something, or answers this submit, if it came to one."""
        self.is_silent = True
        if submit is not None:
            answer = asyncio.wrap_future(submit.future())
            answer.add_done_callback(self._has_answered)

    def _has_answered(self, answer: asyncio.Future[None]) -> None:
        self.is_silent &= answer.cancelled() or answer.exception() is not None

    async def _pump(self) -> None:
        try:
            async for item in self._actor.stream.remote(self._ingress_id):
                batch: TokenBatch = await item
                self.store_id, self.is_silent = batch.store_id, False
                self._is_open.set()
                for chunk in batch.chunks:
                    inbox = self._inboxes.get((chunk.request_id, chunk.attempt))
                    if inbox is not None:  # else aborted, or an attempt that was given up
                        inbox.put_nowait(chunk)
        except RayError as error:
            logger.warning("%s is lost: %s", self.engine_id, type(error).__name__)
            self.died = isinstance(error, ActorDiedError)
        finally:
            self._lose()

    def _lose(self) -> None:
        self.lost = True
        self._is_open.set()
        message = f"the stream of {self.engine_id} has ended"
        for key, inbox in list(self._inboxes.items()):
            inbox.put_nowait(error_chunk(key, ErrorKind.ENGINE_LOST, message))
            self.end(key, abort=True)  # the engine itself may live on


class Links:
    """To every engine that exists, as far as we were told."""

    def __init__(self, ingress_id: IngressId) -> None:
        self._ingress_id = ingress_id
        self._links: dict[EngineId, Link] = {}
        self._changed = asyncio.Condition()

    def __iter__(self) -> Iterator[Link]:
        """Those whose engines speak to us."""
        return (link for link in self._links.values() if not link.lost)

    @property
    def lost(self) -> frozenset[EngineId]:
        """We may know it some seconds before the router does."""
        return frozenset(engine_id for engine_id, link in self._links.items() if link.lost)

    def avoided(self, closed: Set[EngineId]) -> frozenset[EngineId]:
        """Those that are lost, and those that are silent while any other is not, but for the closed ones:
        these take nothing new."""
        silent = {engine_id for engine_id, link in self._links.items() if link.is_silent}
        avoided = self.lost | silent
        return avoided if self._links.keys() - avoided - closed else self.lost

    async def introduce(self, actors: Mapping[EngineId, Any]) -> None:
        """Exactly these engines exist. Requests on one that does no longer are lost to it; a broken stream is
        opened anew."""
        for engine_id, link in list(self._links.items()):
            if link.lost or engine_id not in actors:
                self._links.pop(engine_id).remove(is_gone=engine_id not in actors)
        for engine_id in actors.keys() - self._links.keys():
            self._links[engine_id] = Link(engine_id, actors[engine_id], self._ingress_id)
        async with self._changed:
            self._changed.notify_all()

    async def find(self, engine_id: EngineId) -> Link | None:
        """The router may hear of a new engine a moment before we do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(INTRODUCTION_DEADLINE_S), self._changed:
                await self._changed.wait_for(lambda: engine_id in self._links)
        link = self._links.get(engine_id)
        return None if link is None or link.lost else link

    async def introduced(self, within_s: float) -> None:
        """Returns when we are next told who exists, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait()


def _key(request: EngineRequest) -> Key:
    return request.request_id, request.attempt


def error_chunk(key: Key, kind: ErrorKind, message: str) -> TokenChunk:
    request_id, attempt = key
    return TokenChunk(
        request_id=request_id,
        attempt=attempt,
        finish_reason=FinishReason.ERROR,
        error=RequestError(kind=kind, message=message),
    )
