"""A runner without a model: K/V rows hold token IDs, so a wrong block shows up as a wrong token.

So does wrong state: below the paged layer lie sliding ones, whose rings and segments hold rows too.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.step import Draw, Drawn, Fork, SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.engine.transfers import Piece
from shoal.actors.messages import TokenLogprob
from shoal.kvstore.layout import StateLayout

VOCABULARY = 1009
UNWRITTEN = -1
WRONG = -2
"""A row that was computed from wrong ones."""


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """What follows a history: a function of every token in it, in order."""
    value = 7 + seed
    for token in tokens:
        value = (value * 31 + token) % VOCABULARY
    return value


def generate(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What a request must get, whatever ran beside it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def logprob(token: int) -> TokenLogprob:
    """What the fake says of a token, drawn or of a prompt."""
    return TokenLogprob(logprob=-float(token))


def _drawn(token: int, draw: Draw) -> Drawn:
    return Drawn(token_id=token, logprob=None if draw.logprobs is None else logprob(token))


def sliding_layers(
    window: int, block_size: int, *, num_dropped: int = 0, num_draft_tokens: int = 0
) -> StateLayout:
    """One layer that is stored, below those that are not."""
    return StateLayout(
        num_layers=1 + num_dropped,
        num_dropped=num_dropped,
        window=window,
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
        rows_per_step=1 + num_draft_tokens,
    )


class Rings:
    """The sliding layers of a model, each of which reads what the one below it gives.

    A row is its position and its token if all that its layer sees from there was right in the layer below;
    else it is WRONG. What the last layer gives, the paged layer stores.
    """

    def __init__(self, layout: StateLayout, *, num_slots: int, num_segments: int) -> None:
        self._layout = layout
        self._rings = [
            [[UNWRITTEN] * layout.ring_rows for _ in range(layout.num_layers)] for _ in range(num_slots)
        ]
        self.segments = [[UNWRITTEN] * layout.segment_rows for _ in range(num_segments)]

    def poison(self, slot: int) -> None:
        """A new sequence has it: whatever it does not restore or write is no longer there."""
        for ring in self._rings[slot]:
            ring[:] = [UNWRITTEN] * len(ring)

    def copy(self, source: int, to: int) -> None:
        self._rings[to] = [list(ring) for ring in self._rings[source]]

    def restore(self, step: SequenceStep) -> None:
        """The state at step.start, into the stored layer's ring."""
        block_size, rows = self._layout.block_size, self._layout.segment_rows
        first = -(-step.start // block_size) - len(step.restore)
        for i, segment in enumerate(step.restore, first):
            end = (i + 1) * block_size
            for position, row in zip(range(end - rows, end), self.segments[segment], strict=True):
                if 0 < step.start - position <= self._layout.needed_rows:
                    self._rings[step.slot][0][position % self._layout.ring_rows] = row

    def compute(self, step: SequenceStep, tokens: Sequence[int]) -> list[int]:
        """What the paged layer is to store of the step's rows; tokens: all up to them."""
        assert step.slot != NO_BLOCK
        right = [position * VOCABULARY + token for position, token in enumerate(tokens)]
        rows = right[step.start :]
        for layer, ring in enumerate(self._rings[step.slot]):
            stored = layer < self._layout.num_stored
            first_visible = 0 if stored else step.valid_from
            before = {p: ring[p % len(ring)] for p in range(max(0, step.start - len(ring)), step.start)}
            seen = before | dict(enumerate(rows, step.start))
            if stored:
                self._capture(step, seen)
            for position in range(max(step.start, step.end - len(ring)), step.end):
                ring[position % len(ring)] = seen[position]
            rows = [
                right[p] if self._sees_right(seen, right, p, first_visible) else WRONG
                for p in range(step.start, step.end)
            ]
        return [row if row == WRONG else row % VOCABULARY for row in rows]

    def _sees_right(
        self, seen: dict[int, int], right: Sequence[int], position: int, first_visible: int
    ) -> bool:
        first = max(0, position - self._layout.needed_rows)
        return first >= first_visible and all(seen[p] == right[p] for p in range(first, position + 1))

    def _capture(self, step: SequenceStep, seen: dict[int, int]) -> None:
        rows = self._layout.segment_rows
        for boundary, segment in step.captures:
            assert step.start < boundary <= step.end and boundary % self._layout.block_size == 0
            self.segments[segment] = [seen.get(p, UNWRITTEN) for p in range(boundary - rows, boundary)]


class FakeRunner:
    """Implements the engine's `Runner`. Also checks each plan: no row is written twice or outside a table."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        state: StateLayout | None = None,
        num_slots: int = 0,
        num_segments: int = 0,
    ) -> None:
        self._block_size = block_size
        self._rings = None if state is None else Rings(state, num_slots=num_slots, num_segments=num_segments)
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
            if step.drafts:
                behind = step.end - len(step.drafts)
                self._tokens.setdefault(step.row, [])[behind : step.end] = step.drafts
            known = self._tokens.get(step.row, [])
            known = known + [0] * (step.end - len(known))  # if the step that would have drawn them failed
            tokens = self._compute(step, known[: step.end])
            for position in range(max(step.start, step.store_from), step.end):
                row = self._locate(step, position)
                assert row not in written, f"two sequences write {row}"
                written.add(row)
                self._rows[row[0]][row[1]] = tokens[position - step.start]
        drawn = dict[SequenceId, tuple[Drawn, ...]]()
        for step in plan.sequences:
            if step.draw is not None:
                drawn[step.sequence_id] = step.accepted(self._draw(step, step.draw))
            drawn |= {fork.sequence_id: (self._fork(step, fork),) for fork in step.forks}
        return StepResult(
            step_id=plan.step_id,
            drawn=drawn,
            prompt_logprobs={
                step.sequence_id: tuple(
                    logprob(token) for token in self._tokens.get(step.row, [])[step.start + 1 : step.end + 1]
                )
                for step in plan.sequences
                if step.prompt_logprobs is not None
            },
        )

    def _compute(self, step: SequenceStep, tokens: Sequence[int]) -> Sequence[int]:
        if self._rings is None:
            assert not step.restore and not step.captures and step.start >= step.store_from
            return tokens[step.start :]
        if step.known_tokens:
            self._rings.poison(step.slot)
            self._rings.restore(step)
        return self._rings.compute(step, tokens)

    def copy_out(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        """out: uint8, one piece behind the other."""
        rows = [row for piece in pieces for row in self._storage(piece)]
        out[:] = np.array(rows, dtype=np.int32).view(np.uint8)

    def num_bytes(self, piece: Piece) -> int:
        return 4 * len(self._storage(piece))

    def copy_in(self, pieces: Sequence[Piece], data: np.ndarray) -> None:
        rows = data.view(np.int32).tolist()
        for piece in pieces:
            storage = self._storage(piece)
            storage[:], rows = rows[: len(storage)], rows[len(storage) :]
        assert not rows

    def _storage(self, piece: Piece) -> list[int]:
        assert (piece.block == NO_BLOCK) != (piece.segment == NO_BLOCK)
        if piece.block != NO_BLOCK:
            return self._rows[piece.block]
        assert self._rings is not None
        return self._rings.segments[piece.segment]

    def _draw(self, step: SequenceStep, draw: Draw) -> list[Drawn]:
        first = step.end - len(step.drafts)
        tokens = [self._next_token(step, draw, position) for position in range(first, step.end + 1)]
        self._tokens.setdefault(step.row, [])[first:] = tokens
        return [_drawn(token, draw) for token in tokens]

    def _fork(self, step: SequenceStep, fork: Fork) -> Drawn:
        """Its first token is drawn from the rows of the step, and later ones from its copies."""
        token = self._next_token(step, fork.draw, step.end)
        self._tokens[fork.row] = [*self._tokens[step.row][: step.end], token]
        for source, to in fork.blocks:
            self._rows[to] = list(self._rows[source])
        assert fork.slot is not None or self._rings is None
        if fork.slot is not None and self._rings is not None:
            self._rings.copy(*fork.slot)
        return _drawn(token, fork.draw)

    def _next_token(self, step: SequenceStep, draw: Draw, position: int) -> int:
        rows = [self._row(step, before) for before in range(position)]
        return next_token(rows, draw.sampling.seed)

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
        for now in self._uses(plan):
            for before in self._uses(earlier):
                assert not now.captured & before.segments, f"step {plan.step_id} overwrites segments in use"
                if now.sequence_id == before.sequence_id:
                    continue
                overlap = now.written & before.blocks
                assert not overlap, f"step {plan.step_id} writes {overlap}, which {earlier.step_id} uses"
                assert now.row != before.row, f"step {plan.step_id} takes a row that is in use"
                assert not now.slot or now.slot != before.slot

    def _uses(self, plan: StepPlan) -> Iterator["_Use"]:
        for step in plan.sequences:
            first = max(step.start, step.store_from) // self._block_size
            captured = {segment for _, segment in step.captures}
            yield _Use(
                sequence_id=step.sequence_id,
                blocks=set(step.block_table),
                written=set(step.block_table[first : -(-step.end // self._block_size)]),
                row=step.row,
                slot=step.slot,
                segments={*step.restore, *captured},
                captured=captured,
            )
            for fork in step.forks:  # what it copies from is the step's own
                copies = {copy for _, copy in fork.blocks}
                yield _Use(
                    sequence_id=fork.sequence_id,
                    blocks=copies,
                    written=copies,
                    row=fork.row,
                    slot=fork.slot[1] if fork.slot else NO_BLOCK,
                )


@dataclass(frozen=True, kw_only=True)
class _Use:
    """What a step does for one sequence."""

    sequence_id: SequenceId
    blocks: set[BlockId]
    written: set[BlockId]
    row: int
    slot: BlockId
    segments: set[BlockId] = field(default_factory=set)
    captured: set[BlockId] = field(default_factory=set)


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
