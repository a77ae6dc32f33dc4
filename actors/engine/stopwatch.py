"""What a start spends its time on, for whoever waits for it."""

from collections.abc import Callable


class Stopwatch:
    """Laps follow one another without a gap: each begins where the one before ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._laps: list[tuple[str, float]] = []

    @property
    def laps(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds), in their order."""
        return tuple(self._laps)

    def lap(self, name: str) -> float:
        """Ends one; its seconds."""
        now = self._clock()
        took_s, self._since = now - self._since, now
        self._laps.append((name, took_s))
        return took_s
