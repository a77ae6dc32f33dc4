"""What an engine has staged, offered to the store of its node."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from shoal.kvstore.calls import within
from shoal.kvstore.messages import Extent

logger = logging.getLogger(__name__)

OFFER_DEADLINE_S = 20.0
"""Of one call, until the store has taken over all its extents. They stay staged so long at most."""


class Offers:
    """One call a batch of extents. On the actor's event loop."""

    def __init__(self, engine: Any, answered: Callable[[Sequence[Extent], bool], None]) -> None:
        """engine: the handle whose `export` the store calls. answered: takes whether a store took a batch."""
        self._engine = engine
        self._answered = answered
        self._under_way: set[asyncio.Task[None]] = set()
        self.store: Any = None
        """Whom to offer to; None while there is none."""

    def begin(self, extents: Sequence[Extent]) -> None:
        task = asyncio.create_task(self._offer(self.store, extents))
        self._under_way.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._under_way.discard)

    async def _offer(self, store: Any, extents: Sequence[Extent]) -> None:
        taken = False
        try:
            if store is not None:
                await within(OFFER_DEADLINE_S, store.offer.remote(self._engine, list(extents)))
                taken = True
        except (RayError, TimeoutError) as error:
            logger.warning("the store took nothing: %s", type(error).__name__)
        finally:
            self._answered(extents, taken)
