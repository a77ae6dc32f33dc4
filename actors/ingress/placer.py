"""Where a request goes: the router says, and while it is away we choose ourselves."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.links import Link, Links
from shoal.actors.messages import (
    EngineId,
    EngineRequest,
    PlacementReply,
    PlacementRequest,
    PrefixSource,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within

logger = logging.getLogger(__name__)

PLACE_DEADLINE_S = 2.0
"""A router takes about a millisecond. One that takes so long is away: a worse place now is better."""

OUTAGE_ENDS_S = 60.0
"""After so long without a blind placement the next one is news again."""

_WARNINGS = {
    PlacedBy.NO_KEYS: "requests are placed blindly: what prefixes are called is not known of every engine",
    PlacedBy.STALE_INDEX: "requests are placed blindly: the router does not know all engines' prefixes",
    PlacedBy.ROUTER_AWAY: "requests are placed blindly: the router does not answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    link: Link
    by: PlacedBy
    sources: tuple[PrefixSource, ...] = ()
    """Where the prefix can be had."""


class Placer:
    """A router whose call has failed is asked for no placement until it has answered a ping: an outage costs
    its deadline once, and not each request."""

    def __init__(self, links: Links, block_size: int) -> None:
        self.fingerprint = b""
        """Of the engines: names the root of block keys."""
        self._links = links
        self._block_size = block_size
        self._router: Any = None
        self._silent_router: Any = None
        """The one whose last call failed."""
        self._ping: asyncio.Task[None] | None = None
        self._warner = _Warner(_now)
        self._draining: frozenset[EngineId] = frozenset()

    def introduce(self, router: Any, fingerprint: bytes, draining: Collection[EngineId] = ()) -> None:
        """This router places; if it was silent, it is asked whether it still is. What drains gets nothing."""
        self._router = router
        self._draining = frozenset(draining)
        self.fingerprint = fingerprint or self.fingerprint
        if router is not None and router == self._silent_router and (self._ping is None or self._ping.done()):
            self._ping = asyncio.create_task(self._ask_after(router))

    async def _ask_after(self, router: Any) -> None:
        try:
            await within(PLACE_DEADLINE_S, router.ping.remote())
        except (RayError, TimeoutError):
            return
        if router == self._silent_router:
            self._silent_router = None

    async def place(
        self, request: EngineRequest, block_keys: tuple[BlockKey, ...], tried: frozenset[EngineId]
    ) -> Place | None:
        """None when there is no engine but those that were tried. One that we lost is not offered again,
        nor one that is silent, whatever the router knows of it."""
        wanted_by = _now() + PLACE_DEADLINE_S
        unlinked: frozenset[EngineId] = frozenset()
        while self._router_answers:
            wanted = PlacementRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                num_prompt_tokens=request.num_tokens,
                block_keys=block_keys,
                exclude=tried | unlinked | self._links.avoided(self._draining) | self._draining,
            )
            try:
                reply = await self._ask(wanted)
            except (RayError, TimeoutError):
                continue  # another may have taken its place meanwhile
            if reply is None:
                # One that was just restarted knows nobody yet: it is told when we are.
                left_s = wanted_by - _now()
                if left_s <= 0 or not self.others(wanted.exclude):
                    return None
                await self._links.introduced(left_s)
            elif link := await self._links.find(reply.engine_id):
                return self._place(link, self._went_by(request, wanted, reply), reply.sources)
            else:
                unlinked |= {reply.engine_id}
        others = self.others(tried | self._links.avoided(self._draining))
        if not others:
            return None
        return self._place(min(others, key=lambda link: link.num_requests), PlacedBy.ROUTER_AWAY)

    def others(self, excluded: frozenset[EngineId]) -> list[Link]:
        """Where a new request could go."""
        return [link for link in self._links if link.engine_id not in excluded | self._draining]

    def place_on_draining(self, tried: frozenset[EngineId]) -> Place | None:
        """Where the fewest of ours are, of what drains; the router no longer names it."""
        draining = [link for link in self._links if link.engine_id in self._draining - tried]
        draining = [link for link in draining if not link.is_silent]
        if not draining:
            return None
        return self._place(min(draining, key=lambda link: link.num_requests), PlacedBy.LOAD)

    @property
    def _router_answers(self) -> bool:
        return self._router is not None and self._router != self._silent_router

    async def _ask(self, wanted: PlacementRequest) -> PlacementReply | None:
        """Raises RayError or TimeoutError."""
        router = self._router
        try:
            reply: PlacementReply | None = await within(PLACE_DEADLINE_S, router.place.remote(wanted))
        except (RayError, TimeoutError) as error:
            self._silent_router = router
            self._warner.note(PlacedBy.ROUTER_AWAY, type(error).__name__)
            raise
        return reply

    def _place(self, link: Link, by: PlacedBy, sources: tuple[PrefixSource, ...] = ()) -> Place:
        self._warner.note(by)
        return Place(link=link, by=by, sources=sources)

    def _went_by(self, request: EngineRequest, wanted: PlacementRequest, reply: PlacementReply) -> PlacedBy:
        if reply.hit_tokens:
            return PlacedBy.PREFIX
        can_hit = wanted.num_prompt_tokens > self._block_size  # the last token is always computed
        if not can_hit or (request.prompt_logprobs is not None and not wanted.block_keys):
            return PlacedBy.LOAD
        if not wanted.block_keys or reply.fingerprints != {self.fingerprint}:
            return PlacedBy.NO_KEYS
        return PlacedBy.LOAD if reply.is_up_to_date else PlacedBy.STALE_INDEX


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Warner:
    """One line an outage, whatever number of requests it meets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[PlacedBy, float] = {}

    def note(self, by: PlacedBy, detail: str = "") -> None:
        if not by.is_blind:
            return
        now = self._clock()
        if by not in self._last or now - self._last[by] > OUTAGE_ENDS_S:
            logger.warning(_WARNINGS[by] + (f" ({detail})" if detail else ""))
        self._last[by] = now
