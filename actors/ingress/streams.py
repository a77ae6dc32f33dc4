"""The dispatcher over Ray: one placement call a request, one multiplexed token stream an engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayError

from shoal.actors.messages import (
    EngineId,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    Placement,
    RequestError,
    RequestId,
    TokenBatch,
    TokenChunk,
)

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""For a call that only enters a queue. A hung engine's tokens are the supervisor's business: it kills it."""

Key = tuple[RequestId, int]
Inbox = asyncio.Queue[TokenChunk]


class _Link:
    """One engine as this ingress sees it: its actor, the stream we pump, and who waits for its tokens."""

    def __init__(self, engine_id: EngineId, actor: Any, ingress_id: IngressId) -> None:
        self.engine_id = engine_id
        self.actor = actor
        self.inboxes: dict[Key, Inbox] = {}
        self.lost = False
        self._ingress_id = ingress_id
        self.pump = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        try:
            async for item in self.actor.stream.remote(self._ingress_id):
                batch: TokenBatch = await item
                for chunk in batch.chunks:
                    inbox = self.inboxes.get((chunk.request_id, chunk.attempt))
                    if inbox is not None:  # else aborted, or an attempt that was given up
                        inbox.put_nowait(chunk)
        except RayError as error:
            logger.warning("%s is lost: %s", self.engine_id, type(error).__name__)
        except asyncio.CancelledError:
            logger.info("%s was removed", self.engine_id)
        finally:
            self.lost = True
            self._fail_all()

    def _fail_all(self) -> None:
        for (request_id, attempt), inbox in self.inboxes.items():
            inbox.put_nowait(_error(request_id, attempt, ErrorKind.ENGINE_LOST, f"{self.engine_id} is lost"))


class EngineStreams:
    """Implements `Dispatcher`. Lives on one event loop."""

    def __init__(self, ingress_id: IngressId) -> None:
        self._ingress_id = ingress_id
        self._router: Any = None
        self._links: dict[EngineId, _Link] = {}
        self._linked = asyncio.Condition()

    async def introduce(self, router: Any, actors: Mapping[EngineId, Any]) -> None:
        """This router places, and exactly these engines exist.

        Requests on an engine that no longer exists end with an error.
        """
        self._router = router
        for engine_id in self._links.keys() - actors.keys():
            self._links.pop(engine_id).pump.cancel()
        async with self._linked:
            for engine_id in actors.keys() - self._links.keys():
                self._links[engine_id] = _Link(engine_id, actors[engine_id], self._ingress_id)
            self._linked.notify_all()

    def ready(self) -> bool:
        return any(not link.lost for link in self._links.values())

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
        key = (request.request_id, request.attempt)
        inbox: Inbox = asyncio.Queue()
        link = await self._start(request, inbox)
        ended = asyncio.Event()
        try:
            yield _until_finished(inbox, ended)
        finally:
            if not ended.is_set():
                self._give_up(link, key)
            elif link is not None:
                link.inboxes.pop(key, None)

    async def _start(self, request: EngineRequest, inbox: Inbox) -> _Link | None:
        """Place and submit; on failure the inbox holds the error and there is no link."""
        key = (request.request_id, request.attempt)
        kind, message = ErrorKind.NO_ENGINE, "no engine is ready"
        link: _Link | None = None
        try:
            placement: Placement | None = None
            if self._router is not None:
                placement = await _within(self._router.place.remote(*key))
            if placement is not None:
                link = await self._link_to(placement.engine_id)
            if link is not None:
                kind, message = ErrorKind.ENGINE_LOST, f"{link.engine_id} is lost"
                link.inboxes[key] = inbox
                await _within(link.actor.submit.remote(self._ingress_id, request))
                return link
        except (RayError, TimeoutError) as error:
            logger.warning("request %s could not be placed: %s", request.request_id, type(error).__name__)
            self._give_up(link, key)
        except asyncio.CancelledError:
            self._give_up(link, key)
            raise
        inbox.put_nowait(_error(*key, kind, message))
        return None

    def _give_up(self, link: _Link | None, key: Key) -> None:
        if link is not None:
            link.inboxes.pop(key, None)
            link.actor.abort.remote(*key)  # the submit may have gone out already

    async def _link_to(self, engine_id: EngineId) -> _Link | None:
        """The router may hear of a new engine a moment before we do."""
        async with self._linked:
            await asyncio.wait_for(
                self._linked.wait_for(lambda: engine_id in self._links), timeout=CALL_DEADLINE_S
            )
        link = self._links.get(engine_id)
        return None if link is None or link.lost else link


async def _within(ref: Any) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout=CALL_DEADLINE_S)


async def _until_finished(inbox: Inbox, ended: asyncio.Event) -> AsyncIterator[TokenChunk]:
    while not ended.is_set():
        chunk = await inbox.get()
        if chunk.finish_reason is not None:
            ended.set()
        yield chunk


def _error(request_id: RequestId, attempt: int, kind: ErrorKind, message: str) -> TokenChunk:
    return TokenChunk(
        request_id=request_id,
        attempt=attempt,
        finish_reason=FinishReason.ERROR,
        error=RequestError(kind=kind, message=message),
    )
