"""The dispatcher over Ray: one placement call a request, one multiplexed token stream an engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError, RayError

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
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within
from shoal.kvstore.messages import StoreId
from shoal.kvstore.outstanding import Outstanding

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""For a call that only enters a queue. A hung engine's tokens are the supervisor's business: it kills it."""

INTRODUCTION_DEADLINE_S = 2.0
"""How long we may hear later of an engine than the router does."""

PASSED_ON = (ErrorKind.OVERLOADED, ErrorKind.ENGINE_LOST)
"""Failures of an engine of which the next one knows nothing."""

Key = tuple[RequestId, int]
"""(request, attempt): what an attempt that was given up still says finds no inbox."""
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
        await within(CALL_DEADLINE_S, submit)

    def end(self, key: Key, *, abort: bool) -> None:
        """Nobody waits for the request's tokens any more."""
        self.inboxes.pop(key, None)
        submit = self._submits.pop(key, None)
        if abort and submit is not None:
            self._actor.abort.remote(*key, submit)

    async def reset_prefix_cache(self) -> None:
        """Raises RayError or TimeoutError."""
        await within(CALL_DEADLINE_S, self._actor.reset_prefix_cache.remote())

    @property
    def num_submits(self) -> int:
        """Requests of which the engine was told, and has not said the last."""
        return len(self._submits)

    async def outstanding(self) -> Outstanding:
        """The engine's. Raises RayError or TimeoutError."""
        outstanding: Outstanding = await within(CALL_DEADLINE_S, self._actor.outstanding.remote())
        return outstanding

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


_Reset = Coroutine[Any, Any, None]
_Place = tuple[_Link, tuple[PrefixSource, ...]]
"""Where a request goes, and where its prefix can be had."""


class EngineStreams:
    """Implements `Dispatcher`. Lives on one event loop."""

    def __init__(self, ingress_id: IngressId) -> None:
        self._ingress_id = ingress_id
        self._router: Any = None
        self._failed_router: Any = None
        """The one whose last call failed."""
        self._links: dict[EngineId, _Link] = {}
        self._stores: Mapping[StoreId, Any] = {}
        self._linked = asyncio.Condition()

    async def introduce(
        self, router: Any, actors: Mapping[EngineId, Any], stores: Mapping[StoreId, Any]
    ) -> None:
        """This router places, and exactly these engines and stores exist.

        Requests on an engine that no longer exists end with an error; a stream that broke is opened anew.
        """
        self._router = router
        self._stores = stores
        for engine_id, link in list(self._links.items()):
            if link.lost or engine_id not in actors:
                self._links.pop(engine_id).remove()
        async with self._linked:
            for engine_id in actors.keys() - self._links.keys():
                self._links[engine_id] = _Link(engine_id, actors[engine_id], self._ingress_id)
            self._linked.notify_all()
        if router == self._failed_router:
            await self._ask_after(router)

    async def _ask_after(self, router: Any) -> None:
        """Who is not ready is sent no request that could show that the router answers again."""
        try:
            await within(CALL_DEADLINE_S, router.ping.remote())
        except (RayError, TimeoutError):
            return
        self._failed_router = None

    def ready(self) -> bool:
        has_router = self._router is not None and self._router != self._failed_router
        return has_router and any(not link.lost for link in self._links.values())

    async def reset_prefix_cache(self) -> bool:
        """Asks every engine, then every store: what engines have forgotten they cannot save anew.

        One that was lost has nothing to reset.
        """
        engines = {e: link.reset_prefix_cache() for e, link in self._links.items() if not link.lost}
        all_forgot = await _all_succeed(engines)
        stores = {s: within(CALL_DEADLINE_S, store.reset.remote()) for s, store in self._stores.items()}
        return await _all_succeed(stores) and all_forgot

    async def outstanding(self) -> dict[str, Outstanding | None]:
        links = self._links.values()
        counts = {
            "inboxes": sum(len(link.inboxes) for link in links),
            "submits": sum(link.num_submits for link in links),
            "lost_links": sum(link.lost for link in links),
        }
        asked: dict[str, Coroutine[Any, Any, Outstanding]] = {
            **{link.engine_id: link.outstanding() for link in links},
            **{s: within(CALL_DEADLINE_S, actor.outstanding.remote()) for s, actor in self._stores.items()},
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        heard = {
            name: None if isinstance(answer, BaseException) else answer
            for name, answer in zip(asked, answers, strict=True)
        }
        return {self._ingress_id: Outstanding(counts=counts), **heard}

    @asynccontextmanager
    async def open(
        self, request: EngineRequest, block_keys: tuple[BlockKey, ...]
    ) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
        answer = _Answer(request, partial(self._place, block_keys=block_keys))
        try:
            yield answer.chunks()
        finally:
            answer.leave()

    async def _place(
        self, request: EngineRequest, tried: frozenset[EngineId], *, block_keys: tuple[BlockKey, ...]
    ) -> _Place | None:
        """Where the router says, unless we know better: an engine that we lost is not offered again."""
        exclude = tried | {engine_id for engine_id, link in self._links.items() if link.lost}
        while (router := self._router) is not None:
            wanted = PlacementRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                num_prompt_tokens=len(request.prompt_token_ids),
                block_keys=block_keys,
                exclude=exclude,
            )
            try:
                reply: PlacementReply | None = await within(CALL_DEADLINE_S, router.place.remote(wanted))
            except (RayError, TimeoutError) as error:
                if router != self._failed_router:  # one line an outage
                    logger.warning("no request can be placed: %s", type(error).__name__)
                self._failed_router = router
                return None
            self._failed_router = None
            if reply is None:
                return None
            link = await self._link_to(reply.engine_id)
            if link is not None:
                return link, reply.sources
            exclude |= {reply.engine_id}
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


class _Answer:
    """What a request is told by the engine that serves it.

    Until one has said anything of it, a failure of that engine is no failure of the request: it is placed
    again as the next attempt, on each engine at most once.
    """

    def __init__(self, request: EngineRequest, place: Callable[..., Awaitable[_Place | None]]) -> None:
        self._request = request  # of the latest attempt
        self._place = place
        self._link: _Link | None = None  # where that attempt lives

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        failure = _error(*self._key, ErrorKind.NO_ENGINE, "no engine is ready")
        tried: frozenset[EngineId] = frozenset()
        while (place := await self._place(self._request, tried)) is not None:
            link, sources = place
            self._request = replace(self._request, sources=sources)
            inbox = await self._submit(link)
            has_spoken = False
            while True:
                chunk = await inbox.get()
                if chunk.finish_reason is not None:
                    self._end(abort=False)
                if not has_spoken and chunk.error is not None and chunk.error.kind in PASSED_ON:
                    break
                has_spoken = has_spoken or bool(chunk.token_ids or chunk.prompt_logprobs)
                yield chunk
                if chunk.finish_reason is not None:
                    return
            failure = chunk
            tried |= {link.engine_id}
            self._request = replace(self._request, attempt=self._request.attempt + 1)
        yield failure

    def leave(self) -> None:
        """Nobody listens any more: what still lives is aborted."""
        self._end(abort=True)

    @property
    def _key(self) -> Key:
        return self._request.request_id, self._request.attempt

    async def _submit(self, link: _Link) -> Inbox:
        """On failure the inbox holds the error."""
        self._link, inbox = link, Inbox()
        try:
            await link.submit(self._request, inbox)
        except (RayError, TimeoutError) as error:
            self._end(abort=True)  # it may have arrived all the same
            message = f"{link.engine_id}: {type(error).__name__}"
            inbox.put_nowait(_error(*self._key, ErrorKind.ENGINE_LOST, message))
        return inbox

    def _end(self, *, abort: bool) -> None:
        if self._link is not None:
            self._link.end(self._key, abort=abort)
            self._link = None


async def _all_succeed(resets: Mapping[EngineId, _Reset] | Mapping[StoreId, _Reset]) -> bool:
    """Those of actors that died meanwhile do: what is gone holds nothing."""
    answers = await asyncio.gather(*resets.values(), return_exceptions=True)
    failures = {
        name: answer
        for name, answer in zip(resets, answers, strict=True)
        if isinstance(answer, BaseException) and not isinstance(answer, ActorDiedError)
    }
    for name, failure in failures.items():
        logger.warning("%s did not reset its cache: %s", name, type(failure).__name__)
    return not failures


def _error(request_id: RequestId, attempt: int, kind: ErrorKind, message: str) -> TokenChunk:
    return TokenChunk(
        request_id=request_id,
        attempt=attempt,
        finish_reason=FinishReason.ERROR,
        error=RequestError(kind=kind, message=message),
    )
