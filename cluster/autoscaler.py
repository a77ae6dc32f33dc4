"""How many engines a model needs. Plain state and arithmetic; the clock is injected."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.actors.messages import EngineHealth

MAX_ENGINES = 1024
"""Of a model. Each is told of every store, and every front door of each: beyond it a cluster is several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """Ray Serve's names where the meaning is the same."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 16.0
    """Requests on an engine, running and waiting, on average."""
    target_ttft_s: float = 2.0
    """So long the prompts that stand on an engine may take it: what a newcomer waits for its first token."""
    upscale_delay_s: float = 10.0
    """So long more engines must be needed before there are more,"""
    downscale_delay_s: float = 300.0
    """and so long fewer before there are fewer."""
    downscale_margin: float = 0.8
    """Fewer are enough only if each would have at most this share of its targets, or load that wavers about
    a boundary would start and end engines for ever."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"autoscaling_config: min_replicas {self.min_replicas} must be from 1 to "
                f"max_replicas {self.max_replicas}"
            )
        if self.max_replicas > MAX_ENGINES:
            raise ValueError(
                f"autoscaling_config: max_replicas must be at most {MAX_ENGINES}, got {self.max_replicas}"
            )
        for name in ("target_ongoing_requests", "target_ttft_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"autoscaling_config: {name} must be above 0, got {getattr(self, name)}")
        for name in ("upscale_delay_s", "downscale_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"autoscaling_config: {name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.downscale_margin <= 1:
            raise ValueError(
                f"autoscaling_config: downscale_margin must be above 0 and at most 1, "
                f"got {self.downscale_margin}"
            )


class Autoscaler:
    """Call `wanted` often. More engines are wanted once more were needed for all of `upscale_delay_s`, and
    then as many as were needed at least; fewer once fewer sufficed for all of `downscale_delay_s`, and then
    as many as were needed at most. So neither a burst nor a lull moves anything by itself.
    """

    def __init__(self, config: AutoscalingConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._up = _Window(config.upscale_delay_s, min)
        self._down = _Window(config.downscale_delay_s, max)

    def wanted(self, loads: Sequence[EngineHealth], current: int) -> int:
        """How many engines there should be.

        Args:
            loads: of the engines that are ready.
            current: how many there are, those that are still starting included: they were wanted already.
        """
        config, now = self._config, self._clock()
        self._up.add(now, self._needed(loads, share=1.0))
        self._down.add(now, self._needed(loads, share=config.downscale_margin))
        within = min(max(current, config.min_replicas), config.max_replicas)
        if not loads:
            return within  # nothing is known of what they would have to do
        more, fewer = self._up.extreme(now), self._down.extreme(now)
        if more is not None and more > within:
            return min(more, config.max_replicas)
        if fewer is not None and fewer < within:
            return max(fewer, config.min_replicas)
        return within

    def _needed(self, loads: Sequence[EngineHealth], *, share: float) -> int:
        requests = sum(load.num_requests for load in loads)
        needed = requests / (self._config.target_ongoing_requests * share)
        measured = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
        if measured:
            tokens = sum(load.uncomputed_tokens for load in loads)
            an_engine = self._config.target_ttft_s * sum(measured) / len(measured)
            needed = max(needed, tokens / (an_engine * share))
        return math.ceil(needed - 1e-9)


class _Window:
    """The extreme of what was said within a time, once it was listened to for so long. O(1) a word."""

    def __init__(self, length_s: float, better: Callable[[int, int], int]) -> None:
        self._length_s = length_s
        self._better = better
        self._said: deque[tuple[float, int]] = deque()
        """Ever later, and ever further from the extreme: what a later word outdoes can be forgotten."""
        self._since: float | None = None

    def add(self, now: float, value: int) -> None:
        if self._since is None:
            self._since = now
        while self._said and self._better(self._said[-1][1], value) == value:
            self._said.pop()
        self._said.append((now, value))

    def extreme(self, now: float) -> int | None:
        if self._since is None or now - self._since < self._length_s:
            return None
        while self._said[0][0] < now - self._length_s:
            self._said.popleft()
        return self._said[0][1]
