"""What a fetch takes, and what computing takes, both measured here: which one is sooner?"""

import math
from collections.abc import Callable

from shoal.actors.engine.transfers import Place

MEMORY_BYTES = 256 << 20
"""A measurement's weight falls by a factor of e while so many bytes are fetched."""

FIXED_S: dict[Place, float] = {"own_store": 0.003, "other_store": 0.010}
"""The calls of a fetch, however small it is."""

SLOW_S = 15.0
"""In so much time, what a link took beyond what is believed at first is forgotten by a factor of e. Fetches
over one that was slow once would else never be worth it again, and so it would never be measured again."""

FIRST_BYTES_PER_S: dict[Place, float] = {"own_store": 10e9, "other_store": 3e9}
"""Believed until something has been measured: a machine's memory, and a network of 25 Gbit/s. Rather too
much: an engine that computes faster than it believes to fetch would never fetch, and never find out."""


class Rate:
    """Bytes a second beyond a fixed time, weighted by bytes."""

    def __init__(self, *, fixed_s: float, first_bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._fixed_s = fixed_s
        self._first_s = 1.0 / first_bytes_per_s
        self._clock = clock
        self._weight = 1.0  # so that the first measurement of some MiB outweighs what was believed
        self._weighted_s = self._first_s
        self._measured_at = clock()

    @property
    def bytes_per_s(self) -> float:
        measured_s = self._weighted_s / self._weight  # a byte
        age_s = self._clock() - self._measured_at
        excess_s = max(0.0, measured_s - self._first_s)
        return 1.0 / (measured_s - excess_s * (1.0 - math.exp(-age_s / SLOW_S)))

    def measure(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0:
            return
        moving_s = max(seconds - self._fixed_s, seconds / 2)
        kept = math.exp(-num_bytes / MEMORY_BYTES)
        self._weight = kept * self._weight + num_bytes
        self._weighted_s = kept * self._weighted_s + moving_s
        self._measured_at = self._clock()

    def seconds(self, num_bytes: int) -> float:
        """Of a fetch of so many bytes; nothing takes no time."""
        return self._fixed_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


class Rates:
    """Of the own node's store and of all others'. One thread has it."""

    def __init__(self, tokens_per_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """tokens_per_s: how fast prompts are computed lately; 0 if nobody knows."""
        self._tokens_per_s = tokens_per_s
        self._rates = {
            place: Rate(fixed_s=FIXED_S[place], first_bytes_per_s=first, clock=clock)
            for place, first in FIRST_BYTES_PER_S.items()
        }

    def measure(self, place: Place, num_bytes: int, seconds: float) -> None:
        self._rates[place].measure(num_bytes, seconds)

    def bytes_per_s(self, place: Place) -> float:
        return self._rates[place].bytes_per_s

    def worth(self, tokens: int, own_bytes: int, other_bytes: int) -> bool:
        """Are bytes that spare computing so many tokens fetched sooner than these are computed?"""
        speed = self._tokens_per_s()
        fetching_s = self._rates["own_store"].seconds(own_bytes)
        fetching_s += self._rates["other_store"].seconds(other_bytes)
        return speed <= 0 or fetching_s < tokens / speed
