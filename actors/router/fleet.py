"""All engines among which a request is placed, as columns of numbers."""

from collections.abc import Iterator, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from shoal.actors.messages import EngineId
from shoal.actors.router.engine_view import (
    CONVINCING_TOKENS,
    NUM_NUMBERS,
    RECENT_S,
    RECENT_WEIGHT,
    UNMEASURED_TOKENS_PER_S,
    EngineView,
)

Numbers = NDArray[np.float64]


class Fleet:
    """What stands on each, weighed for all at once: a thousand take little longer than one."""

    def __init__(self, engines: Sequence[EngineView], table: Numbers) -> None:
        """table: a column for each engine, as `EngineView.write_to` has it."""
        self.engines = engines
        self.index: dict[str, int] = {engine.engine_id: i for i, engine in enumerate(engines)}
        self.nodes = tuple(dict.fromkeys(engine.node for engine in engines))
        numbers = {node: number for number, node in enumerate(self.nodes)}
        self.on_node = np.array([numbers[engine.node] for engine in engines], dtype=np.intp)
        """Which of the nodes each is on."""
        self._table = table
        # rows of the table, and so as current as it is
        self._waiting_tokens, self._tokens_per_s, self.own_fetch_weight, self.other_fetch_weight = table[:4]
        self.last_placed, self._recent_tokens, self._recent_computed, self._recent_at = table[4:]
        self.has_no_segments = not any(engine.rule.num_segments for engine in engines)

    @classmethod
    def of(cls, engines: Sequence[EngineView]) -> "Fleet":
        """Each writes its numbers whenever they change, from now on and into no other fleet: so a placement
        collects nothing."""
        table = np.zeros((NUM_NUMBERS, len(engines)))
        for engine, numbers in zip(engines, table.T, strict=True):
            engine.write_to(numbers)
        return cls(engines, table)

    def without(self, excluded: Set[EngineId]) -> "Fleet":
        """The others, as they are now."""
        if not excluded:
            return self
        rest = [i for i, engine in enumerate(self.engines) if engine.engine_id not in excluded]
        return Fleet([self.engines[i] for i in rest], self._table[:, rest])

    def recent(self, now: float) -> tuple[Numbers, Numbers]:
        """`EngineView.recent` of each."""
        kept = np.exp((self._recent_at - now) / RECENT_S)
        return self._recent_tokens * kept, self._recent_computed * kept

    def speeds(self) -> tuple[Numbers, float]:
        """Tokens a second by each engine's own measure, and of the fastest, which stands for those that have
        none."""
        fastest = float(np.maximum.reduce(self._tokens_per_s)) or UNMEASURED_TOKENS_PER_S
        return np.where(self._tokens_per_s, self._tokens_per_s, fastest), fastest

    def standing(self, recent_tokens: Numbers, own: Numbers, fastest: float) -> tuple[Numbers, Numbers]:
        """Tokens that a newcomer meets on each, and at what speed, in tokens a second, they pass.

        That is the engine's own measure as far as it convinces, for the rest as fast as any, so that it is
        tried.
        """
        tokens = self._waiting_tokens + RECENT_WEIGHT * recent_tokens
        conviction = recent_tokens / (recent_tokens + CONVINCING_TOKENS)
        return tokens, fastest + (own - fastest) * conviction

    def cheapest_first(self, costs: Numbers) -> Iterator[tuple[int, tuple[float, float]]]:
        """Each with its cost, and when it was placed on last: of equals the one longest ago comes first."""
        costs = costs.copy()
        for _ in self.engines:
            i = costs.argmin()
            (tied,) = (costs == costs[i]).nonzero()
            if len(tied) > 1:
                i = tied[self.last_placed[tied].argmin()]
            yield int(i), (float(costs[i]), float(self.last_placed[i]))
            costs[i] = np.inf
