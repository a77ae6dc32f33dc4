"""Where a request goes. Plain state and arithmetic; the clock is injected."""

from collections.abc import Callable, Container, Iterable

from shoal.actors.messages import EngineId, EngineLoad, RequestId

NOTE_LIFETIME_S = 10.0
"""A placement whose request never reaches its engine (a client that left meanwhile) is counted this long."""


class _Engine:
    """What is known of one engine: its own account, and our placements that the account does not have yet."""

    def __init__(self) -> None:
        self.sequence = 0
        self.num_requests = 0
        self.notes: dict[tuple[RequestId, int], float] = {}  # when each was placed, oldest first
        self.last_placed = 0

    def load(self, now: float) -> int:
        for key, placed_at in list(self.notes.items()):
            if now - placed_at < NOTE_LIFETIME_S:
                break
            del self.notes[key]
        return self.num_requests + len(self.notes)


class LeastLoaded:
    """Places on the engine with the fewest requests; among equals on the one placed on longest ago.

    An engine's report is some milliseconds old. Requests placed since are counted from our own notes until
    the engine says it has received them: without the notes, a whole burst would go where the last report was
    lowest.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._engines: dict[EngineId, _Engine] = {}
        self._placements = 0

    def set_engines(self, engine_ids: Iterable[EngineId]) -> None:
        """Exactly these may be placed on. What is known of those that stay is kept."""
        self._engines = {engine_id: self._engines.get(engine_id, _Engine()) for engine_id in engine_ids}

    def place(
        self, request_id: RequestId, attempt: int, exclude: Container[EngineId] = ()
    ) -> EngineId | None:
        """None when there is no engine but those that the caller excludes."""
        now = self._clock()
        candidates = [item for item in self._engines.items() if item[0] not in exclude]
        if not candidates:
            return None
        engine_id, engine = min(candidates, key=lambda item: (item[1].load(now), item[1].last_placed))
        self._placements += 1
        engine.last_placed = self._placements
        engine.notes[request_id, attempt] = now
        return engine_id

    def report(self, load: EngineLoad) -> None:
        """Take an engine's account. One that arrives late, or from an engine no longer placed on, is ignored,
        except for what it says has arrived."""
        engine = self._engines.get(load.engine_id)
        if engine is None:
            return
        for key in load.received:
            engine.notes.pop(key, None)
        if load.sequence > engine.sequence:
            engine.sequence = load.sequence
            engine.num_requests = load.num_requests

    def loads(self) -> dict[EngineId, int]:
        """Requests counted on each engine now."""
        now = self._clock()
        return {engine_id: engine.load(now) for engine_id, engine in self._engines.items()}
