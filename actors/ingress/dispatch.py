"""The seam between HTTP and the cluster: all that the front door asks of the actors behind it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from shoal.actors.messages import EngineRequest, TokenChunk
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.outstanding import Outstanding


class Dispatcher(Protocol):
    """Places a request on an engine and brings its tokens back."""

    def open(
        self, request: EngineRequest, block_keys: tuple[BlockKey, ...]
    ) -> AbstractAsyncContextManager[AsyncIterator[TokenChunk]]:
        """The request's chunks, ending with the one that has a finish_reason. The attempt is only the first:
        where an engine fails before it has said anything, another is asked.

        The keys name the prompt's complete blocks, for its placement; there are none where none could be hit.
        Nothing is raised for what happens behind: every failure arrives as a last chunk with an error.
        Leaving the context before the last chunk aborts the request on its engine.
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

    async def outstanding(self) -> Mapping[str, Outstanding | None]:
        """By process, this one and all that it reaches: what was given out and has not come back. None where
        there was no answer."""
        ...
