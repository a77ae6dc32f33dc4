"""When an open loop begins sessions: seconds since its start, without end. Plain."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Literal

ArrivalName = Literal["poisson", "fixed"]


def arrivals(name: ArrivalName, rate_per_s: float, seed: int) -> Iterator[float]:
    """`fixed` keeps equal distances; `poisson` is what many people who know nothing of each other do."""
    if name == "fixed":
        return (number / rate_per_s for number in count())
    return _poisson(rate_per_s, random.Random(f"{seed}/arrivals"))


def _poisson(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate_per_s)
        yield now
