"""Models on their way to being served: one that cannot be read is tried again, and costs no other a thing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from textwrap import shorten

from shoal.actors.messages import DeploymentCard, DeploymentId

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0
"""Between two attempts, twice as long each time: a tokenizer may have to come from afar, or be mended."""

REASON_CHARS = 240


@dataclass(slots=True)
class _Load:
    task: asyncio.Task[None] | None = None
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    """Of the latest attempt."""


class Loads:
    """Lives on one event loop."""

    def __init__(self, load: Callable[[DeploymentCard], Awaitable[None]]) -> None:
        """load: makes a model one that is served; raises what keeps it from that."""
        self._load = load
        self._loads: dict[DeploymentId, _Load] = {}

    @property
    def failures(self) -> Mapping[DeploymentId, Exception]:
        """Of those that cannot be read as yet."""
        return {known: load.error for known, load in self._loads.items() if load.error}

    @property
    def reasons(self) -> Mapping[DeploymentId, str]:
        """The same, a line each."""
        return {known: _said(error) for known, error in self.failures.items()}

    def begin(self, card: DeploymentCard) -> None:
        """Unless it is begun already."""
        if card.deployment_id not in self._loads:
            self._loads[card.deployment_id] = load = _Load()
            load.task = asyncio.create_task(self._read(card, load))

    def forget_others(self, known: Set[DeploymentId]) -> None:
        """These are to be served. A load of another is given up."""
        for other in self._loads.keys() - known:
            if task := self._loads.pop(other).task:
                task.cancel()

    async def all_tried(self) -> None:
        """Returns when each that was begun is served, or has failed once."""
        await asyncio.gather(*(load.was_tried.wait() for load in self._loads.values()))

    async def _read(self, card: DeploymentCard, load: _Load) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._load(card)
            except Exception as error:
                if load.error is None or _said(load.error) != _said(error):
                    logger.error("%s is not served here: %s; trying again", card.model.name, _said(error))
                load.error = error
            else:
                load.error = None
                return
            finally:
                load.was_tried.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _said(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", REASON_CHARS, placeholder=" …")
