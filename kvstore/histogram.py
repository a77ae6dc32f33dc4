"""Values counted by their size, where they come about. Plain: who tells them is another's business."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """One thread observes; another may look, and sees what was true a moment ago."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending. A value belongs to the first that is not below it."""
        if not bounds or sorted(set(bounds)) != list(bounds):
            raise ValueError(f"bounds must ascend, got {bounds}")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values up to it), as Prometheus wants them."""
        total = 0
        cumulated: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            cumulated.append((bound, float(total)))
        return cumulated
