"""The router's process: a door to placement. One call a request; no token passes through."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from shoal.actors.messages import EngineId, EngineReport, PlacementRequest
from shoal.actors.router.placement import CheapestEngine
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within

logger = logging.getLogger(__name__)

SNAPSHOT_DEADLINE_S = 10.0
"""An engine answers between two steps. One that does not is asked again when it is next heard of."""


class RouterActor:
    """Holds nothing that cannot be told again: after a restart, engines, loads and prefixes arrive anew."""

    def __init__(self, block_size: int) -> None:
        self._placement = CheapestEngine(block_size=block_size, clock=time.monotonic)
        self._engines: dict[EngineId, Any] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return "Router"

    async def start(self) -> None:
        """Ready as soon as it answers."""

    async def ping(self) -> None:
        """Answers while the process lives."""

    async def place(self, request: PlacementRequest) -> EngineId | None:
        """None when no engine is ready but those that the request excludes."""
        placed = self._placement.place(request)
        return None if placed is None else placed.engine_id

    async def report(self, report: EngineReport) -> None:
        self._placement.report(report)
        self._ask_for_snapshots()

    async def set_engines(self, engines: Mapping[EngineId, Any]) -> None:
        """Exactly these, by their actors, may be placed on."""
        self._engines = dict(engines)
        self._placement.set_engines(engines)
        self._ask_for_snapshots()

    async def loads(self) -> dict[EngineId, int]:
        return self._placement.loads()

    async def held(self) -> dict[EngineId, frozenset[BlockKey]]:
        """What is known of the prefixes of each engine that is followed without a gap."""
        return self._placement.held()

    def _ask_for_snapshots(self) -> None:
        for engine_id in self._placement.take_snapshot_requests():
            task = asyncio.create_task(self._ask(engine_id, self._engines[engine_id]))
            self._asking.add(task)  # the event loop itself holds tasks only weakly
            task.add_done_callback(self._asking.discard)

    async def _ask(self, engine_id: EngineId, actor: Any) -> None:
        try:
            snapshot = await within(SNAPSHOT_DEADLINE_S, actor.snapshot.remote())
        except (RayError, TimeoutError) as error:
            logger.warning("no snapshot from %s: %s", engine_id, type(error).__name__)
            self._placement.give_up(engine_id)
        else:
            self._placement.restore(snapshot)
            self._ask_for_snapshots()
