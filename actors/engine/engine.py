"""The engine without its process: a scheduler, a runner, one step at a time."""

import logging
from typing import Protocol

from shoal.actors.engine.scheduler import Reply, Scheduler
from shoal.actors.engine.step import StepPlan, StepResult
from shoal.actors.messages import EngineRequest, IngressId, RequestId

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes what a plan says. It owns the device's memory and decides nothing."""

    def run(self, plan: StepPlan) -> StepResult: ...


MAX_FAILED_STEPS = 3
"""In a row. An engine that fails every step empties fast, looks idle, and would attract all requests."""


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._failed_steps = 0

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_sequences

    def submit(self, request: EngineRequest, reply_to: IngressId) -> list[Reply]:
        return self._scheduler.add(request, reply_to)

    def abort(self, request_id: RequestId, attempt: int) -> list[Reply]:
        self._scheduler.abort(request_id, attempt)
        return []  # nobody listens any more

    def abort_all(self, reply_to: IngressId) -> list[Reply]:
        self._scheduler.abort_all(reply_to)
        return []

    def step(self) -> list[Reply]:
        """Compute one step; what it has to say. Empty when nothing can run.

        A step that fails ends its own requests only. When MAX_FAILED_STEPS in a row do, the error is raised.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        try:
            result = self._runner.run(plan)
        except Exception:
            logger.exception("step %d failed (%d tokens)", plan.step_id, plan.num_tokens)
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise
            return self._scheduler.fail(plan, "the engine failed while computing this request")
        self._failed_steps = 0
        return self._scheduler.commit(plan, result)

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or pools is broken."""
        self._scheduler.check()
