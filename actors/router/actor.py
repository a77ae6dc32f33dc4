"""The router's process: a door to placement. One call a request; no token passes through."""

import time
from collections.abc import Sequence

from shoal.actors.messages import EngineId, EngineLoad, Placement, RequestId
from shoal.actors.router.placement import LeastLoaded


class RouterActor:
    """Holds nothing that cannot be told again: after a restart, membership and loads arrive anew."""

    def __init__(self) -> None:
        self._placement = LeastLoaded(clock=time.monotonic)

    def __repr__(self) -> str:
        return "Router"

    async def start(self) -> None:
        """Ready as soon as it answers."""

    async def ping(self) -> None:
        """Answers while the process lives."""

    async def place(
        self, request_id: RequestId, attempt: int, exclude: frozenset[EngineId]
    ) -> Placement | None:
        """None when no engine is ready but those that the ingress cannot reach."""
        engine_id = self._placement.place(request_id, attempt, exclude)
        return None if engine_id is None else Placement(engine_id=engine_id)

    async def report(self, load: EngineLoad) -> None:
        self._placement.report(load)

    async def set_engines(self, engine_ids: Sequence[EngineId]) -> None:
        self._placement.set_engines(engine_ids)

    async def loads(self) -> dict[EngineId, int]:
        return self._placement.loads()
