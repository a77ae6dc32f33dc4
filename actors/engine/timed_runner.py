"""How fast prompts are computed, measured where it happens."""

import math
import time
from collections.abc import Callable
from functools import partial

from shoal.actors.engine.engine import Runner
from shoal.actors.engine.step import StepPlan, StepResult

MEMORY_TOKENS = 4096
"""A step's weight falls by a factor of e while so many tokens are computed."""


class TimedRunner:
    """A runner that also says how many tokens a second it lately computed in steps with prompts in them.

    Each token has the speed of its step, and the mean is over tokens: a step of few is mostly overhead, and
    says little of how long a prompt takes.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._weight = self._weighted_speed = 0.0
        self.tokens_per_s = 0.0
        """0 before the first."""

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._run, plan, self._runner.prepare(plan))

    def _run(self, plan: StepPlan, run: Callable[[], StepResult]) -> StepResult:
        started = self._clock()
        result = run()
        if plan.num_tokens > len(plan.sequences):  # else every sequence only draws its next token
            self._measure(plan.num_tokens, self._clock() - started)
        return result

    def _measure(self, num_tokens: int, seconds: float) -> None:
        kept = math.exp(-num_tokens / MEMORY_TOKENS)
        self._weight = kept * self._weight + num_tokens
        self._weighted_speed = kept * self._weighted_speed + num_tokens * num_tokens / seconds
        self.tokens_per_s = self._weighted_speed / self._weight
