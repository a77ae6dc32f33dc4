"""The engine without its process: a scheduler, a runner, and one step planned while another computes."""

import logging
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Protocol

from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.engine.scheduler import Reply, Scheduler
from shoal.actors.engine.step import StepPlan, StepResult
from shoal.actors.messages import EngineRequest, IngressId, RequestId
from shoal.kvstore.block_hash import BlockKey

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes what a plan says. It owns the device's memory and decides nothing.

    Plans come in order, one at a time, on a thread of their own.
    """

    def run(self, plan: StepPlan) -> StepResult: ...


MAX_FAILED_STEPS = 3
"""In a row. An engine that fails every step empties fast, looks idle, and would attract all requests."""


class Engine:
    """Between two calls of `step` at most one step is in flight, and the engine's own thread is free."""

    def __init__(self, scheduler: Scheduler, runner: Runner, executor: Executor | None = None) -> None:
        """executor: where steps run, one after the other; a thread if none is given."""
        self._scheduler = scheduler
        self._runner = runner
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="engine-step")
        self._in_flight: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._failed_steps = 0

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_sequences

    @property
    def uncomputed_tokens(self) -> int:
        """Of all requests' prompts: work that stands before a new one's first token."""
        return self._scheduler.num_uncomputed_tokens

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called. True for a while after the last request has been aborted."""
        return bool(self._in_flight or self.num_requests)

    def submit(self, request: EngineRequest, reply_to: IngressId) -> list[Reply]:
        return self._scheduler.add(request, reply_to)

    def abort(self, request_id: RequestId, attempt: int) -> list[Reply]:
        self._scheduler.abort(request_id, attempt)
        return []  # nobody listens any more

    def abort_all(self, reply_to: IngressId) -> list[Reply]:
        self._scheduler.abort_all(reply_to)
        return []

    def reset_prefix_cache(self) -> list[Reply]:
        self._scheduler.reset_prefix_cache()
        return []

    def take_prefix_changes(self) -> PrefixChanges:
        """Cached prefixes that came and went since this was last called."""
        return self._scheduler.prefix_cache.changes.take()

    def prefix_keys(self) -> tuple[BlockKey, ...]:
        """Of all cached blocks, parents first."""
        return self._scheduler.prefix_cache.keys()

    def step(self) -> list[Reply]:
        """Start the next step, then wait for the one before it; what that one has to say.

        So the device goes from one to the next while tokens are handed out and the one after is planned.

        A step that fails ends its own requests only. When MAX_FAILED_STEPS in a row do, the error is raised.
        """
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, self._executor.submit(self._runner.run, plan)))
        num_ahead = 0 if plan is None else 1
        if len(self._in_flight) == num_ahead:
            return []  # nothing was in flight before
        return self._finish(*self._in_flight.popleft())

    def _finish(self, plan: StepPlan, running: Future[StepResult]) -> list[Reply]:
        try:
            result = running.result()
        except Exception:
            logger.exception("step %d failed (%d tokens)", plan.step_id, plan.num_tokens)
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise
            return self._scheduler.fail(plan, "the engine failed while computing this request")
        self._failed_steps = 0
        return self._scheduler.commit(plan, result)

    def wait(self) -> None:
        """Until nothing computes. What a step in flight has to say is said by the next `step`."""
        wait([running for _, running in self._in_flight])

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or pools is broken."""
        self._scheduler.check()
