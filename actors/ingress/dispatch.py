"""The seam between HTTP and the cluster: all that the front door asks of the actors behind it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

from shoal.actors.messages import EngineId, EngineLoad, EngineRequest, TokenChunk
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.outstanding import Outstanding


class PlacedBy(StrEnum):
    """What the choice of an engine went by. The last three are blind: a prefix may have been overlooked."""

    PREFIX = "prefix"
    """And load, of course."""
    LOAD = "load"
    """Nobody has any of the prompt."""
    NO_KEYS = "no_keys"
    """The prompt has a block or more, but what its blocks are called is not known, or not of every engine."""
    STALE_INDEX = "stale_index"
    """Nobody is known to have any of it, but the router does not follow everybody's reports."""
    ROUTER_AWAY = "router_away"
    """The ingress has placed it itself."""

    @property
    def is_blind(self) -> bool:
        return self not in (PlacedBy.PREFIX, PlacedBy.LOAD)


class Dispatcher(Protocol):
    """Places requests on engines and brings their tokens back."""

    def open(
        self,
        requests: Sequence[EngineRequest],
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> Sequence[AbstractAsyncContextManager[AsyncIterator[TokenChunk]]]:
        """The choices of one prompt, each entered by itself: those that are entered in one turn of the event
        loop begin on one engine, which computes the prompt once.

        What each gives are its chunks, ending with the one that has a finish_reason. The attempt is only the
        first: where an engine is lost another goes on, and the chunks as if there had been one. Each
        attempt's first chunk with a token says how much of prompt and answer was cached for it.

        The keys name the prompt's complete blocks, for its placement; there are none where none could be hit.
        `placed` is called for each attempt, before its first chunk, and once for those that begin together.
        `has_begun`: whether the answer that they are part of has; then one waits for an engine where it would
        be told to come again.
        Nothing is raised for what happens behind: every failure arrives as a last chunk with an error.
        Leaving a context before the last chunk aborts its request on its engine.
        """
        ...

    def ready(self) -> bool:
        """Whether a request could be placed now."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Every engine forgets the prefixes that no request holds, and every store all that it has.

        False if one of them did not answer.
        """
        ...

    async def loads(self) -> Mapping[EngineId, EngineLoad]:
        """What this ingress's requests do on each engine that says so within a second."""
        ...

    async def outstanding(self) -> Mapping[str, Outstanding | None]:
        """By process, this one and all that it reaches: what was given out and has not come back. None where
        there was no answer."""
        ...
