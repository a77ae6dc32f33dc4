"""How fast requests end, and so when one that is refused is to come again."""

import math
from collections.abc import Callable

WINDOW_S = 30.0
"""Requests that ended longer ago than this say little of how fast they end now."""
LONGEST_S = 30.0
"""Whatever was measured: engines may have joined by then."""


class Pace:
    """Who is refused stands, as it were, in a line behind those refused before, and the line moves as fast as
    requests end: so they do not all come back in the same second, nor before there is room for them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Nobody is inside: how fast it went before says nothing of now."""
        self._since = self._last = self._turn = self._clock()
        self._num_ended = 0.0  # faded

    def ended(self) -> None:
        """One that was inside."""
        self._fade()
        self._num_ended += 1

    def retry_after_s(self) -> int:
        """For one that is refused now, in whole seconds, as the header has it; at least 1."""
        now = self._clock()
        wait_s = min(max(0.0, self._turn - now) + 1 / self._per_s(), LONGEST_S)
        self._turn = now + wait_s
        return max(1, math.ceil(wait_s))

    def _per_s(self) -> float:
        """As if one more ended now: before the first has, nothing is known but how long it takes."""
        self._fade()
        measured_s = WINDOW_S * -math.expm1((self._since - self._last) / WINDOW_S)
        return (self._num_ended + 1) / max(measured_s, 1e-3)

    def _fade(self) -> None:
        now = self._clock()
        self._num_ended *= math.exp((self._last - now) / WINDOW_S)
        self._last = now
