"""The measured speed: of steps that compute prompts, the latest counting most."""

from collections.abc import Callable

import pytest

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.step import Drawn, SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.engine.timed_runner import TimedRunner


class Machine:
    """A runner and its clock: a step takes what the test says."""

    now = 0.0
    takes_s = 0.0

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.now += 1000.0  # which delays nobody: another step computes meanwhile

        def run() -> StepResult:
            self.now += self.takes_s
            drawn: tuple[Drawn, ...] = (Drawn(token_id=1),)
            return StepResult(step_id=plan.step_id, drawn={plan.sequences[0].sequence_id: drawn})

        return run


def step(*lengths: int) -> StepPlan:
    sequences = tuple(
        SequenceStep(sequence_id=SequenceId(i), row=i, start=0, end=length, block_table=(BlockId(1),))
        for i, length in enumerate(lengths, start=1)
    )
    return StepPlan(step_id=1, sequences=sequences)


def test_steps_that_compute_prompts_are_measured_and_the_latest_count_most() -> None:
    machine = Machine()
    runner = TimedRunner(machine, clock=lambda: machine.now)
    assert runner.tokens_per_s == 0.0
    machine.takes_s = 0.5
    runner.prepare(step(99, 1))()
    assert runner.tokens_per_s == 200.0
    machine.takes_s = 60.0
    runner.prepare(step(1, 1))()
    assert runner.tokens_per_s == 200.0, "one token each: nobody's prompt"
    machine.takes_s = 0.1
    for _ in range(200):
        runner.prepare(step(100))()
    assert runner.tokens_per_s == pytest.approx(1000.0, rel=0.05)


def test_every_step_is_counted() -> None:
    machine = Machine()
    runner = TimedRunner(machine, clock=lambda: machine.now)
    for machine.takes_s, lengths in ((0.5, (99, 1)), (0.25, (1, 1))):
        runner.prepare(step(*lengths))()
    assert runner.num_computed_tokens == 102 and runner.num_drawn_tokens == 2
    assert runner.step_seconds.sum == 0.75 and runner.step_seconds.buckets()[-1] == ("+Inf", 2.0)


def test_short_steps_say_little() -> None:
    machine = Machine()
    runner = TimedRunner(machine, clock=lambda: machine.now)
    machine.takes_s = 0.5
    runner.prepare(step(500))()
    machine.takes_s = 0.1
    for _ in range(5):
        runner.prepare(step(10))()
    assert runner.tokens_per_s == pytest.approx(1000.0, rel=0.1), "though they alone make 100 a second"
