"""A step is planned while the one before it computes; what that one draws changes nothing afterwards."""

import threading
from collections.abc import Callable
from functools import partial

from shoal.actors.engine.engine import Engine
from shoal.actors.engine.step import StepPlan, StepResult
from shoal.actors.messages import ErrorKind, FinishReason, RequestId
from tests.engine.bench import INGRESS, Bench, a_request
from tests.fake_runner import generate


def test_the_next_step_is_planned_before_the_token_of_this_one_is_known() -> None:
    bench = Bench(eager=False)
    bench.submit(a_request("a", [5, 6], max_tokens=3))
    bench.step()
    assert bench.runner.plans == [], "the first step has not been computed"
    bench.step()
    prompt, *_ = bench.runner.plans
    assert prompt.sequences[0].known_tokens == (5, 6)
    assert bench.tokens["a"] == generate([5, 6], 1)
    bench.step()
    assert bench.runner.plans[1].sequences[0].known_tokens == (), "its token has never left the runner"
    bench.finish()
    assert bench.tokens["a"] == generate([5, 6], 3)


def test_an_end_that_can_be_foreseen_costs_no_surplus_row() -> None:
    bench = Bench()
    bench.submit(a_request("a", [5, 6], max_tokens=3))
    bench.submit(a_request("b", [7], max_tokens=1))
    bench.finish()
    computed = [(s.sequence_id, s.start, s.end) for plan in bench.runner.plans for s in plan.sequences]
    assert computed == [(1, 0, 2), (2, 0, 1), (1, 2, 3), (1, 3, 4)]


def test_an_end_that_cannot_costs_one_and_its_blocks_wait_for_that() -> None:
    expected = generate([1, 2, 3], 9)
    bench = Bench(num_blocks=4, cache="naive")
    bench.submit(a_request("a", [1, 2, 3], max_tokens=9, stop_token_ids={expected[1]}))
    bench.submit(a_request("next", [50] * 9, max_tokens=1))
    assert [bench.step() for _ in range(3)] == [[(0, 3)], [(3, 1)], [(4, 1)]], "the third is one too many"
    assert bench.finished == {"a": FinishReason.STOP}
    assert bench.pools.blocks.num_free == 1, "step 3 still writes to both blocks of a"
    assert bench.step() == []
    assert bench.pools.blocks.num_free == 3
    assert bench.step() == [(0, 9)]
    bench.finish()
    assert bench.tokens["a"] == expected[:2]
    assert bench.drained()


def test_what_is_aborted_in_flight_is_released_when_its_last_step_has_finished() -> None:
    bench = Bench()
    bench.submit(a_request("a", list(range(6))))
    bench.step()
    bench.engine.abort(RequestId("a"), 1)
    bench.engine.check()
    assert bench.engine.num_requests == 0 and bench.engine.has_work
    assert bench.pools.blocks.num_free == 17
    assert bench.step() == [] and not bench.engine.has_work
    assert not bench.tokens and bench.drained()


def test_whoever_is_preempted_keeps_the_token_that_is_being_drawn() -> None:
    """Both need a second block at their fifth token, and there is one."""
    bench = Bench(num_blocks=4, cache="naive")
    for name in ("elder", "younger"):
        bench.submit(a_request(name, [len(name), 2, 3], max_tokens=5))
    bench.step()
    bench.step()
    bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert len(bench.tokens["younger"]) == 2, "the second came out of a step that was in flight"
    bench.finish()
    for name in ("elder", "younger"):
        assert bench.tokens[name] == generate([len(name), 2, 3], 5)
    assert bench.drained()


def test_nobody_is_preempted_for_blocks_that_are_coming_back() -> None:
    """All three fill their second block at once; one has stopped by then, and its last step is in flight."""
    bench = Bench(num_blocks=7, cache="naive")
    stop = generate([2, 0, 0], 5)[-1]
    for first in (1, 2, 3):
        stops = {stop} if first == 2 else set()
        bench.submit(a_request(str(first), [first, 0, 0], max_tokens=7, stop_token_ids=stops))
    steps = [bench.step() for _ in range(8)]
    assert [len(step) for step in steps] == [3, 3, 3, 3, 3, 3, 0, 2], "one step long nothing can run"
    bench.finish()
    assert bench.scheduler.num_preemptions == 0
    assert bench.tokens["1"] == generate([1, 0, 0], 7) and bench.tokens["3"] == generate([3, 0, 0], 7)


def test_63_a_step_that_fails_takes_only_its_own_requests_along_with_one_in_flight_behind_it() -> None:
    bench = Bench()
    bench.submit(a_request("in both", [1, 2], max_tokens=9))
    bench.runner.failures = 1
    bench.step()
    bench.submit(a_request("only behind", [3, 4], max_tokens=2))
    bench.step()
    assert bench.errors["in both"].kind is ErrorKind.INTERNAL
    bench.finish()
    assert bench.tokens["only behind"] == generate([3, 4], 2) and not bench.tokens["in both"]
    assert list(bench.errors) == ["in both"]
    assert bench.drained()


def test_a_step_that_cannot_be_prepared_fails_like_one_that_cannot_be_computed() -> None:
    bench = Bench()
    bench.submit(a_request("before", [1, 2], max_tokens=9))
    bench.step()
    bench.runner.refusals = 1
    bench.submit(a_request("only in it", [3, 4], max_tokens=2))
    bench.step()
    bench.submit(a_request("behind", [5, 6], max_tokens=2))
    bench.finish()
    assert {name: error.kind for name, error in bench.errors.items()} == dict.fromkeys(
        ("before", "only in it"), ErrorKind.INTERNAL
    )
    assert bench.tokens["before"] == generate([1, 2], 1), "of the step before, which was in flight"
    assert bench.tokens["behind"] == generate([5, 6], 2)
    assert bench.drained()


class ThreadedRunner:
    """Says on which threads it prepares and runs, and computes nothing until it is let."""

    def __init__(self, bench: Bench) -> None:
        self.prepared_on: set[threading.Thread] = set()
        self.run_on: set[threading.Thread] = set()
        self.let = threading.Semaphore(0)
        self._runner = bench.runner

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.prepared_on.add(threading.current_thread())
        return partial(self._run, self._runner.prepare(plan))

    def _run(self, run: Callable[[], StepResult]) -> StepResult:
        assert self.let.acquire(timeout=10)
        self.run_on.add(threading.current_thread())
        return run()


def test_steps_run_in_order_on_one_thread_of_their_own() -> None:
    bench = Bench()
    runner = ThreadedRunner(bench)
    engine = Engine(bench.scheduler, runner)
    engine.submit([a_request("a", [1, 2], max_tokens=4)], INGRESS)
    assert engine.step() == [], "it is back while the step computes"
    tokens: list[int] = []
    while engine.has_work:
        runner.let.release()
        tokens += [token for reply in engine.step() for token in reply.chunk.token_ids]
    assert tokens == generate([1, 2], 4)
    assert runner.prepared_on == {threading.current_thread()}
    assert len(runner.run_on) == 1 and runner.run_on.isdisjoint(runner.prepared_on)
    assert [plan.step_id for plan in bench.runner.plans] == [1, 2, 3, 4]
