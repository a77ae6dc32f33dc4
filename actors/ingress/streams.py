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
    PlacementRequest,
    RequestError,
    RequestId,
    TokenBatch,
    TokenChunk,
)
from shoal.kvstore.block_hash import BlockKey

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""For a call that only enters a queue. A hung engine's tokens are the supervisor's business: it kills it."""

INTRODUCTION_DEADLINE_S = 2.0
"""How long we may hear later of an engine than the router does."""

Key = tuple[RequestId, int]
Inbox = asyncio.Queue[TokenChunk]


class _Link:
    """One engine as this ingress sees it: its actor, the stream we pump, and who waits for its tokens."""

    def __init__(self, engine_id: EngineId, actor: Any, ingress_id: IngressId) -> None:
        self.engine_id = engine_id
        self.inboxes: dict[Key, Inbox] = {}
        self.lost = False
        self._actor = actor
        self._ingress_id = ingress_id
        self._submits: dict[Key, Any] = {}
        self._pump_task = asyncio.create_task(self._pump())

    async def submit(self, request: EngineRequest, inbox: Inbox) -> None:
        """Raises RayError or TimeoutError. The request may have arrived all the same: `end` it with abort."""
        key = (request.request_id, request.attempt)
        self.inboxes[key] = inbox
        self._submits[key] = submit = self._actor.submit.remote(self._ingress_id, request)
        await _within(submit)

    def end(self, key: Key, *, abort: bool) -> None:
        """Nobody waits for the request's tokens any more."""
        self.inboxes.pop(key, None)
        submit = self._submits.pop(key, None)
        if abort and submit is not None:
            self._actor.abort.remote(*key, submit)

    async def reset_prefix_cache(self) -> None:
        """Raises RayError or TimeoutError."""
        await _within(self._actor.reset_prefix_cache.remote())

    def remove(self) -> None:
        self._pump_task.cancel()

    async def _pump(self) -> None:
        try:
            async for item in self._actor.stream.remote(self._ingress_id):
                batch: TokenBatch = await item
                for chunk in batch.chunks:
                    inbox = self.inboxes.get((chunk.request_id, chunk.attempt))
                    if inbox is not None:  # else aborted, or an attempt that was given up
                        inbox.put_nowait(chunk)
        except RayError as error:
            logger.warning("%s is lost: %s", self.engine_id, type(error).__name__)
        finally:
            self.lost = True
            message = f"the stream of {self.engine_id} has ended"
            for key, inbox in list(self.inboxes.items()):
                inbox.put_nowait(_error(*key, ErrorKind.ENGINE_LOST, message))
                self.end(key, abort=True)  # the engine itself may live on


class EngineStreams:
    """Implements `Dispatcher`. Lives on one event loop."""

    def __init__(self, ingress_id: IngressId) -> None:
        self._ingress_id = ingress_id
        self._router: Any = None
        self._links: dict[EngineId, _Link] = {}
        self._linked = asyncio.Condition()

    async def introduce(self, router: Any, actors: Mapping[EngineId, Any]) -> None:
        """This router places, and exactly these engines exist.

        Requests on an engine that no longer exists end with an error; a stream that broke is opened anew.
        """
        self._router = router
        for engine_id, link in list(self._links.items()):
            if link.lost or engine_id not in actors:
                self._links.pop(engine_id).remove()
        async with self._linked:
            for engine_id in actors.keys() - self._links.keys():
                self._links[engine_id] = _Link(engine_id, actors[engine_id], self._ingress_id)
            self._linked.notify_all()

    def ready(self) -> bool:
        return any(not link.lost for link in self._links.values())

    async def reset_prefix_cache(self) -> bool:
        """Asks every engine. One that was lost has nothing to reset."""
        links = [link for link in self._links.values() if not link.lost]
        answers = await asyncio.gather(*(link.reset_prefix_cache() for link in links), return_exceptions=True)
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not reset its cache: %s", link.engine_id, type(answer).__name__)
        return not any(isinstance(answer, BaseException) for answer in answers)

    @asynccontextmanager
    async def open(
        self, request: EngineRequest, block_keys: tuple[BlockKey, ...]
    ) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
        key = (request.request_id, request.attempt)
        inbox: Inbox = asyncio.Queue()
        ended = asyncio.Event()
        link = await self._place(request, block_keys)
        try:
            await self._submit(request, link, inbox)
            yield _until_finished(inbox, ended)
        finally:
            if link is not None:
                link.end(key, abort=not ended.is_set())

    async def _submit(self, request: EngineRequest, link: _Link | None, inbox: Inbox) -> None:
        """On failure the inbox holds the error."""
        kind, message = ErrorKind.NO_ENGINE, "no engine is ready"
        if link is not None:
            try:
                return await link.submit(request, inbox)
            except (RayError, TimeoutError) as error:
                link.end((request.request_id, request.attempt), abort=True)
                kind, message = ErrorKind.ENGINE_LOST, f"{link.engine_id}: {type(error).__name__}"
        inbox.put_nowait(_error(request.request_id, request.attempt, kind, message))

    async def _place(self, request: EngineRequest, block_keys: tuple[BlockKey, ...]) -> _Link | None:
        """Where the router says, unless we know better: an engine that we lost is not offered again."""
        lost = {engine_id for engine_id, link in self._links.items() if link.lost}
        try:
            while self._router is not None:
                wanted = PlacementRequest(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    block_keys=block_keys,
                    exclude=frozenset(lost),
                )
                placed: Placement | None = await _within(self._router.place.remote(wanted))
                if placed is None:
                    break
                link = await self._link_to(placed.engine_id)
                if link is not None:
                    return link
                lost.add(placed.engine_id)
        except (RayError, TimeoutError) as error:
            logger.warning("%s could not be placed: %s", request.request_id, type(error).__name__)
        return None

    async def _link_to(self, engine_id: EngineId) -> _Link | None:
        """The router may hear of a new engine a moment before we do."""
        try:
            async with asyncio.timeout(INTRODUCTION_DEADLINE_S), self._linked:
                await self._linked.wait_for(lambda: engine_id in self._links)
        except TimeoutError:
            return None
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
