"""What a start took, in one line for whoever found it slow."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.actors.messages import EngineInfo

NEGLIGIBLE_S = 0.05


class StartTime:
    """Parts follow one another without a gap, so they add up to the whole.

    Engines and front door start together: the front door's part is what it took longer.
    """

    def __init__(self, clock: Callable[[], float], *, before_s: float) -> None:
        """before_s: what was spent before now, and is of the first part."""
        self._clock = clock
        self._since = clock() - before_s
        self._parts: list[tuple[str, float, str]] = []

    def until_here(self, name: str, of_it: str = "") -> None:
        """Ends a part. of_it: what was in it."""
        now = self._clock()
        self._parts.append((name, now - self._since, of_it))
        self._since = now

    def until_engines(self, engines: Sequence[EngineInfo | None]) -> None:
        """Ends theirs, when first told that all are ready. In it is what the slowest one says of itself."""
        if any(name == "engine" for name, _, _ in self._parts):
            return
        phases = max((engine.took_s for engine in engines if engine), key=_total_s)
        self.until_here("engine", f" ({_listed(phases)})" if _total_s(phases) else "")

    def describe(self) -> str:
        total_s = sum(seconds for _, seconds, _ in self._parts)
        parts = (
            f"{name} {seconds:.1f}{of_it}" for name, seconds, of_it in self._parts if seconds >= NEGLIGIBLE_S
        )
        return f"ready in {total_s:.1f} s: {', '.join(parts)}"


def process_age_s() -> float:
    """Since this process was started (Linux, see proc(5)), interpreter and imports included."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _total_s(phases: Sequence[tuple[str, float]]) -> float:
    return sum(seconds for _, seconds in phases)


def _listed(phases: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases if seconds >= NEGLIGIBLE_S)
