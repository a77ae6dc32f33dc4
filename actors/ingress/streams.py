"""The dispatcher over Ray: one placement call a request, one multiplexed token stream an engine."""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from ray.exceptions import ActorDiedError

from shoal.actors.ingress.attempts import Attempts, Siblings
from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.home import Home
from shoal.actors.ingress.links import Links
from shoal.actors.ingress.placer import Placer
from shoal.actors.ingress.stores import Stores
from shoal.actors.messages import EngineId, EngineLoad, EngineRequest, IngressId, TokenChunk
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId
from shoal.kvstore.outstanding import Outstanding

logger = logging.getLogger(__name__)

_Reset = Coroutine[Any, Any, None]

LOAD_DEADLINE_S = 1.0
"""Whoever scrapes metrics has some seconds; an engine that hangs is left out."""


class EngineStreams:
    """Implements `Dispatcher`, for the engines of one deployment. Lives on one event loop."""

    def __init__(
        self,
        ingress_id: IngressId,
        block_size: int,
        name: str | None = None,
        siblings: Callable[[], Iterable["EngineStreams"]] = tuple,
    ) -> None:
        """name: for what is outstanding here, where an ingress has several of these. siblings: the model's
        other deployments, now."""
        self._name = name or ingress_id
        self._block_size = block_size
        self._siblings = siblings
        self._links = Links(ingress_id)
        self._placer = Placer(self._links, block_size)
        self._stores = Stores()
        self._home = Home(links=self._links, placer=self._placer, stores=self._stores)

    async def introduce(
        self,
        router: Any,
        actors: Mapping[EngineId, Any],
        stores: Mapping[StoreId, Any],
        fingerprint: bytes = b"",
        draining: Collection[EngineId] = (),
    ) -> None:
        """This router places, and exactly these engines and stores exist. The fingerprint is the engines'.
        Those that drain are given nothing new.

        Requests on an engine that no longer exists go on elsewhere; a stream that broke is opened anew.
        """
        self._placer.introduce(router, fingerprint, draining)
        self._stores.actors = stores
        await self._links.introduce(actors)

    async def close(self) -> None:
        """The deployment is served no more. Its requests go on with one that computes the same bits, if the
        model has one, or end."""
        self._home.is_gone = True
        self._placer.introduce(None, b"")
        await self._links.introduce({})

    def _homes(self) -> list[Home]:
        """Our own, and those of siblings that compute what ours does."""
        others = (sibling._home for sibling in self._siblings())
        return [self._home, *(home for home in others if home.computes_like(self._home))]

    def ready(self) -> bool:
        """An engine is enough: while the router is away we place ourselves."""
        return any(True for _ in self._links)

    async def reset_prefix_cache(self) -> bool:
        """Asks every engine, then every store: what engines have forgotten they cannot save anew.

        One that was lost has nothing to reset.
        """
        engines = {link.engine_id: link.reset_prefix_cache() for link in self._links}
        all_forgot = await _all_succeed(engines)
        stores = self._stores.each(lambda store: store.reset.remote())
        return await _all_succeed(stores) and all_forgot

    async def loads(self) -> dict[EngineId, EngineLoad]:
        links = list(self._links)
        answers = await asyncio.gather(
            *(link.load(LOAD_DEADLINE_S) for link in links), return_exceptions=True
        )
        return {
            link.engine_id: answer
            for link, answer in zip(links, answers, strict=True)
            if isinstance(answer, EngineLoad)
        }

    async def outstanding(self) -> dict[str, Outstanding | None]:
        links = list(self._links)
        counts = {
            "inboxes": sum(link.num_requests for link in links),
            "submits": sum(link.num_submits for link in links),
            "lost_links": len(self._links.lost),
        }
        asked: dict[str, Coroutine[Any, Any, Outstanding]] = {
            **{link.engine_id: link.outstanding() for link in links},
            **self._stores.each(lambda store: store.outstanding.remote()),
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        said: dict[str, Outstanding | None] = {self._name: Outstanding(counts=counts)}
        for name, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not say what is outstanding: %s", name, type(answer).__name__)
                said[name] = None
            else:
                said[name] = answer
        return said

    def open(
        self,
        requests: Sequence[EngineRequest],
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> list[AbstractAsyncContextManager[AsyncIterator[TokenChunk]]]:
        siblings = Siblings() if len(requests) > 1 else None
        return [
            _listening(
                Attempts(
                    request,
                    block_keys,
                    homes=self._homes,
                    placed=placed,
                    has_begun=has_begun,
                    block_size=self._block_size,
                    siblings=siblings,
                )
            )
            for request in requests
        ]


@asynccontextmanager
async def _listening(attempts: Attempts) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
    try:
        yield attempts.chunks()
    finally:
        attempts.leave()


async def _all_succeed(resets: Mapping[EngineId, _Reset] | Mapping[str, _Reset]) -> bool:
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
