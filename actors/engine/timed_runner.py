"""How fast prompts are computed, measured where it happens."""

import math
import time
from collections.abc import Callable
from functools import partial

from shoal.actors.engine.engine import Runner
from shoal.actors.engine.step import StepPlan, StepResult
from shoal.kvstore.histogram import Histogram

MEMORY_TOKENS = 4096
"""A step's weight falls by a factor of e while so many tokens are computed."""

STEP_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TimedRunner:
    """A runner that also counts its steps, and says how many tokens a second it lately computed in those with
    prompts in them.

    Each token has the speed of its step, and the mean is over tokens: a step of few is mostly overhead, and
    says little of how long a prompt takes.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._weight = self._weighted_speed = 0.0
        self.tokens_per_s = 0.0
        """0 before the first."""
        self.step_seconds = Histogram(STEP_S)
        self.num_computed_tokens = 0
        self.num_drawn_tokens = 0

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._run, plan, self._runner.prepare(plan))

    def _run(self, plan: StepPlan, run: Callable[[], StepResult]) -> StepResult:
        started = self._clock()
        result = run()
        seconds, num_tokens = self._clock() - started, plan.num_tokens
        if num_tokens > len(plan.sequences) + plan.num_drafts:  # else everybody only draws what comes next
            self._measure(num_tokens, seconds)
        self.step_seconds.observe(seconds)
        self.num_computed_tokens += num_tokens
        self.num_drawn_tokens += sum(map(len, result.drawn.values()))
        return result

    def _measure(self, num_tokens: int, seconds: float) -> None:
        kept = math.exp(-num_tokens / MEMORY_TOKENS)
        self._weight = kept * self._weight + num_tokens
        self._weighted_speed = kept * self._weighted_speed + num_tokens * num_tokens / seconds
        self.tokens_per_s = self._weighted_speed / self._weight
