"""The stores as one ingress sees them: who exists, and what they have of an answer whose engine is gone."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ray.exceptions import RayError

from shoal.actors.ingress.links import CALL_DEADLINE_S
from shoal.actors.messages import PrefixSource
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within
from shoal.kvstore.messages import Found, StoreId

logger = logging.getLogger(__name__)

FIND_DEADLINE_S = 0.5
"""A store answers in a millisecond or two. What one that does not has saved, and the router has not heard of,
is computed again: the client waits."""


class Stores:
    def __init__(self) -> None:
        self.actors: Mapping[StoreId, Any] = {}
        """Exactly these exist, as far as we were told."""

    def each(self, ask: Callable[[Any], Any]) -> dict[str, Coroutine[Any, Any, Any]]:
        """What each is asked. An answer may be a RayError or a TimeoutError."""
        return {store_id: within(CALL_DEADLINE_S, ask(actor)) for store_id, actor in self.actors.items()}

    async def find(
        self, store_ids: Iterable[StoreId], block_keys: Sequence[BlockKey]
    ) -> tuple[PrefixSource, ...]:
        """What these have of a prompt's blocks, by their own account: the router hears of it up to a report
        later. One that is gone, or silent, has nothing."""
        asked = {
            store_id: within(FIND_DEADLINE_S, self.actors[store_id].find.remote(block_keys))
            for store_id in store_ids
            if block_keys and store_id in self.actors
        }
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        sources: list[PrefixSource] = []
        for store_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, RayError | TimeoutError):
                logger.warning("%s did not say what it has: %s", store_id, type(answer).__name__)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                sources += _sources(store_id, answer)
        return tuple(sources)


def _sources(store_id: StoreId, found: Found) -> Iterator[PrefixSource]:
    """One for each run of neighbours, and one for all segments."""
    for _, numbered in groupby(enumerate(found.blocks), key=lambda pair: pair[1] - pair[0]):
        run = [block for _, block in numbered]
        yield PrefixSource(store_id=store_id, first=run[0], end=run[-1] + 1)
    if found.segments:
        yield PrefixSource(store_id=store_id, first=0, end=0, segments=found.segments)
