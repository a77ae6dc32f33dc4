"""The engine without its process: a scheduler, a runner, and one step planned while another computes."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.engine.scheduler import Reply, Scheduler
from shoal.actors.engine.step import StepPlan, StepResult
from shoal.actors.messages import EngineRequest, IngressId, RequestId
from shoal.kvstore.block_hash import BlockKey

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes what a plan says. It owns the device's memory and decides nothing."""

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Do all that can be done for a step while the one before it computes; what is returned computes it.

        Plans come in order. `prepare` runs on the engine's thread, what it returns on a thread of the steps,
        one at a time, in the same order.
        """
        ...


class Stores(Protocol):
    """What moves between the device and the stores, beside the steps. All return at once."""

    def begin_fetches(self) -> None: ...

    def begin_saves(self) -> None: ...

    def forget_saves(self) -> None:
        """The prefix cache has been reset: what no store has by now is not to get there."""
        ...


MAX_FAILED_STEPS = 3
"""In a row. An engine that fails every step empties fast, looks idle, and would attract all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    plan: StepPlan
    run: Callable[[], StepResult] | None
    """Held here until its result is taken. Were the steps' thread the last to let go of its tensors, it would
    let go of the GIL with each, and wait for it again before it can start the next step."""
    result: Future[StepResult]


class Engine:
    """Between two calls of `step` at most one step is in flight, and the engine's own thread is free."""

    def __init__(self, scheduler: Scheduler, runner: Runner, executor: Executor | None = None) -> None:
        """executor: where steps run, one after the other; a thread if none is given."""
        self._scheduler = scheduler
        self._runner = runner
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="engine-step")
        self._in_flight: deque[_InFlight] = deque()
        self._failed_steps = 0  # in a row
        self.num_failed_steps = 0
        self._stores: Stores | None = None

    def connect(self, stores: Stores) -> None:
        """Saves and fetches go along with the steps from now on."""
        self._stores = stores

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_sequences

    @property
    def uncomputed_tokens(self) -> int:
        """Of what came with all requests: work that stands before a new one's first token."""
        return self._scheduler.num_uncomputed_tokens

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called. True for a while after the last request has been aborted."""
        return bool(self._in_flight or self.num_requests)

    @property
    def can_step(self) -> bool:
        """Whether a step would do something now, before anything that is being fetched has come."""
        return bool(self._in_flight) or self._scheduler.may_run

    def submit(self, requests: Sequence[EngineRequest], reply_to: IngressId) -> list[Reply]:
        return self._scheduler.add(requests, reply_to)

    def abort(self, request_id: RequestId, attempt: int) -> list[Reply]:
        self._scheduler.abort(request_id, attempt)
        return []  # nobody listens any more

    def abort_all(self, reply_to: IngressId) -> list[Reply]:
        self._scheduler.abort_all(reply_to)
        return []

    def reset_prefix_cache(self) -> list[Reply]:
        self._scheduler.reset_prefix_cache()
        if self._stores is not None:
            self._stores.forget_saves()
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
        if self._stores is not None:
            self._stores.begin_fetches()
        replies = self._step()
        if self._stores is not None:
            self._stores.begin_saves()
        return replies

    def _step(self) -> list[Reply]:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._start(plan))
        num_ahead = 0 if plan is None else 1
        if len(self._in_flight) == num_ahead:
            return []  # nothing was in flight before
        return self._finish(self._in_flight.popleft())

    def _start(self, plan: StepPlan) -> _InFlight:
        try:
            run = self._runner.prepare(plan)
        except Exception as error:  # it fails like one that cannot be computed, in its turn
            failed = Future[StepResult]()
            failed.set_exception(error)
            return _InFlight(plan=plan, run=None, result=failed)
        return _InFlight(plan=plan, run=run, result=self._executor.submit(run))

    def _finish(self, step: _InFlight) -> list[Reply]:
        plan = step.plan
        try:
            result = step.result.result()
        except Exception:
            logger.exception("step %d failed (%d tokens)", plan.step_id, plan.num_tokens)
            self._failed_steps += 1
            self.num_failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise
            return self._scheduler.fail(plan, "the engine failed while computing this request")
        self._failed_steps = 0
        return self._scheduler.commit(plan, result)

    def wait(self) -> None:
        """Until nothing computes. What a step in flight has to say is said by the next `step`."""
        wait([step.result for step in self._in_flight])

    def outstanding(self) -> dict[str, int]:
        """What is under way, and what is owned for it: all 0 when idle."""
        return {**self._scheduler.outstanding(), "steps": len(self._in_flight)}

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or pools is broken."""
        self._scheduler.check()
