"""How fast prompts are computed, measured where it happens."""

import time
from collections.abc import Callable

from shoal.actors.engine.engine import Runner
from shoal.actors.engine.step import StepPlan, StepResult

KEPT_SHARE = 0.9
"""What a step leaves of the weight of those before it: about the last ten count."""


class TimedRunner:
    """A runner that also says how many tokens a second it lately computed in steps with prompts in them."""

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self._tokens = self._seconds = 0.0
        self.tokens_per_s = 0.0
        """0 before the first."""

    def run(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        result = self._runner.run(plan)
        if plan.num_tokens > len(plan.sequences):  # else every sequence only draws its next token
            self._tokens = KEPT_SHARE * self._tokens + plan.num_tokens
            self._seconds = KEPT_SHARE * self._seconds + self._clock() - started
            self.tokens_per_s = self._tokens / self._seconds
        return result
