"""A runner without a model: K/V rows hold token IDs, so a wrong block shows up as a wrong token."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.step import Drawn, SequenceStep, StepPlan, StepResult
from shoal.actors.messages import TokenLogprob

VOCABULARY = 1009
UNWRITTEN = -1


def next_token(tokens: Sequence[int]) -> int:
    """What follows a history: a function of every token in it, in order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % VOCABULARY
    return value


def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request must get, whatever ran beside it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def logprob(token: int) -> TokenLogprob:
    """What the fake says of a token, drawn or of a prompt."""
    return TokenLogprob(logprob=-float(token))


class FakeRunner:
    """Implements the engine's `Runner`. Also checks each plan: no row is written twice or outside a table."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._rows = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._tokens: dict[int, list[int]] = {}  # the token pool
        self.failures = 0
        """So many of the next steps fail,"""
        self.refusals = 0
        """and so many cannot even be prepared."""
        self.plans: list[StepPlan] = []

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("no room to pack a step")
        return partial(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a kernel failed")
        written: set[tuple[int, int]] = set()
        for step in plan.sequences:
            if step.known_tokens:
                self._tokens[step.row] = list(step.known_tokens)
            assert step.start < step.end, "a row is computed, or there would be no logits"
            known = self._tokens.get(step.row, [])
            known = known + [0] * (step.end - len(known))  # if the step that would have drawn them failed
            for position in range(step.start, step.end):
                row = self._locate(step, position)
                assert row not in written, f"two sequences write {row}"
                written.add(row)
                self._rows[row[0]][row[1]] = known[position]
        return StepResult(
            step_id=plan.step_id,
            drawn={step.sequence_id: self._draw(step) for step in plan.sequences if step.draw is not None},
            prompt_logprobs={
                step.sequence_id: tuple(
                    logprob(token) for token in self._tokens.get(step.row, [])[step.start + 1 : step.end + 1]
                )
                for step in plan.sequences
                if step.prompt_logprobs is not None
            },
        )

    def _draw(self, step: SequenceStep) -> Drawn:
        token = next_token([self._row(step, position) for position in range(step.end)])
        self._tokens.setdefault(step.row, [])[step.end :] = [token]
        assert step.draw is not None
        return Drawn(token_id=token, logprob=None if step.draw.logprobs is None else logprob(token))

    def _row(self, step: SequenceStep, position: int) -> int:
        block, offset = self._locate(step, position)
        return self._rows[block][offset]

    def _locate(self, step: SequenceStep, position: int) -> tuple[int, int]:
        block = step.block_table[position // self._block_size]
        assert block != NO_BLOCK
        return block, position % self._block_size


class FakeDevice(Executor):
    """Runs each step when its result is asked for, or at once if it is `eager`.

    A real device does either, so a plan must not depend on it: while a step has not finished, which is when
    its result has been taken, no later plan may give what it reads or writes to another sequence.
    """

    def __init__(self, block_size: int, *, eager: bool = False) -> None:
        self._block_size = block_size
        self.eager = eager
        self.wrong: Exception | None = None
        """What a step did that no plan may ask for. The engine would take it for a step that failed."""
        self._unfinished: list[tuple[StepPlan, _Step]] = []

    def submit(self, run: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        assert isinstance(run, partial) and not args, "a prepared step of a fake runner"
        (plan,) = run.args
        for earlier, _step in self._unfinished:
            self._check(plan, earlier)
        step = _Step(self, run)
        self._unfinished.append((plan, step))
        if self.eager:
            for _plan, unfinished in self._unfinished:  # in order
                unfinished.compute()
        return step

    def finished(self, step: "_Step") -> None:
        self._unfinished = [unfinished for unfinished in self._unfinished if unfinished[1] is not step]

    def _check(self, plan: StepPlan, earlier: StepPlan) -> None:
        for step in plan.sequences:
            first = step.start // self._block_size
            writes = set(step.block_table[first : -(-step.end // self._block_size)])
            for other in earlier.sequences:
                if other.sequence_id != step.sequence_id:
                    overlap = writes & set(other.block_table)
                    assert not overlap, f"step {plan.step_id} writes {overlap}, which {earlier.step_id} uses"
                    assert step.row != other.row, f"step {plan.step_id} takes a row that is in use"
                    assert not step.slot or step.slot != other.slot


class _Step(Future[StepResult]):
    def __init__(self, device: FakeDevice, run: Callable[[], StepResult]) -> None:
        super().__init__()
        self._device, self._run = device, run

    def compute(self) -> None:
        if self.done():
            return
        try:
            self.set_result(self._run())
        except Exception as error:
            if not isinstance(error, RuntimeError):
                self._device.wrong = error
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> StepResult:
        self.compute()
        self._device.finished(self)
        return super().result()
