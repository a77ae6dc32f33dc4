"""What a replay has come to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from shoal.actors.messages import CachedTokens, EngineId
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.bench.trace.job import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    engine_id: EngineId
    alive_s: float
    num_requests: int
    computed_tokens: int
    """Of prompts, those of requests that it did not live to answer too."""
    fetched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    policy: RoutingPolicyName
    num_prompt_tokens: int
    """Of all requests of the trace."""
    ceiling_tokens: int
    """That one cache for all would have hit."""
    served: tuple[Served, ...]
    """In order of their ends."""
    num_unserved: int
    """For which no engine was left."""
    engines: tuple[EngineWork, ...]
    num_replaced: int
    """Attempts that died with their engine and were placed anew."""
    evicted_store_bytes: int
    simulated_s: float
    wall_s: float

    @property
    def hits(self) -> CachedTokens:
        return sum((request.hits for request in self.served), CachedTokens())

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens."""
        return self.hits.total / self.num_prompt_tokens

    @property
    def of_ceiling(self) -> float:
        return self.hits.total / self.ceiling_tokens if self.ceiling_tokens else 1.0

    @property
    def work_tokens_per_s(self) -> list[float]:
        """Prompt tokens that each engine computed in a second of its life."""
        return [engine.computed_tokens / engine.alive_s for engine in self.engines if engine.alive_s > 0]

    @property
    def work_imbalance(self) -> float:
        """The most of an engine by the mean of all."""
        return _max_by_mean(self.work_tokens_per_s)

    @property
    def request_imbalance(self) -> float:
        return _max_by_mean([e.num_requests / e.alive_s for e in self.engines if e.alive_s > 0])

    @property
    def mean_first_token_s(self) -> float:
        return mean(request.first_token_s for request in self.served) if self.served else 0.0

    def first_token_s(self, percent: float) -> float:
        return percentile([request.first_token_s for request in self.served], percent)

    def end_s(self, percent: float) -> float:
        return percentile([request.end_s for request in self.served], percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of them that so many percent do not exceed; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _max_by_mean(values: Sequence[float]) -> float:
    return max(values) / mean(values) if values and any(values) else 1.0
