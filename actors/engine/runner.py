"""Runs what a plan says on one device: packs the batch, computes, draws."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.models.decoder import Decoder
from shoal.actors.engine.sampler import DrawRow, Draws, Sampler
from shoal.actors.engine.step import Draw, Drawn, SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.messages import TokenLogprob
from shoal.kernels.backend import Backend, RingRows, Rows

IntArray = NDArray[np.signedinteger]


class TokenRows:
    """What the device knows of each running sequence, by row: its tokens and its block table.

    A step reads the tokens that it computes here, and leaves here those that it draws. So it can be planned
    before it is known what the step before it draws. Row 0 is nobody's.
    """

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        num_blocks = -(-max_model_len // block_size)
        # Zeros, because after a step that failed the next one reads a token that was never drawn.
        self._tokens_RL = torch.zeros(num_rows, max_model_len, dtype=torch.int64, device=device)
        self._flat = self._tokens_RL.view(-1).numpy()
        self._device = device
        self._tables_RN = np.zeros((num_rows, num_blocks), dtype=np.int32)
        self._tables: list[tuple[BlockId, ...]] = [()] * num_rows

    @property
    def num_bytes(self) -> int:
        return self._tokens_RL.nbytes + self._tables_RN.nbytes

    def load(self, plan: StepPlan) -> None:
        """Take what the plan knows and the rows do not. A step in flight does not notice: rows change hands
        only when it has finished, and it has tables of its own."""
        for step in plan.sequences:
            if step.known_tokens:
                known = torch.from_numpy(np.array(step.known_tokens, dtype=np.int64))
                self._tokens_RL[step.row, : len(known)] = known
            for fork in step.forks:
                self._tokens_RL[fork.row, : step.end] = self._tokens_RL[step.row, : step.end]
            if step.drafts:  # nothing in flight reads behind the tokens that are known
                drafts = np.array(step.drafts, dtype=np.int64)
                self._tokens_RL[step.row, step.end - len(drafts) : step.end] = torch.from_numpy(drafts)
            if self._tables[step.row] is not step.block_table:  # a table that changes is a new object
                table = self._tables_RN[step.row]
                table[: len(step.block_table)] = step.block_table
                table[len(step.block_table) :] = NO_BLOCK
                self._tables[step.row] = step.block_table

    def places(self, row_T: IntArray, position_T: IntArray) -> IntArray:
        """int64 [T], for `tokens` and `put`."""
        return row_T * self._tokens_RL.shape[1] + position_T

    def tokens(self, place_T: IntArray) -> IntArray:
        """int64 [T]"""
        return self._flat[place_T]

    def put(self, place_T: IntArray, token_T: Tensor) -> None:
        self._flat[place_T] = token_T.numpy()

    def of(self, row: int) -> Tensor:
        """int64 [max_model_len]: one sequence's tokens, as far as there are."""
        return self._tokens_RL[row]

    def tables(self, row_S: IntArray) -> Tensor:
        """int32 [S, N], as many columns as the longest sequence may need."""
        return torch.from_numpy(self._tables_RN[row_S]).to(self._device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedStep:
    """A plan as tensors: all that can be said of its T rows before the step ahead of it has drawn.

    The plan's sequences lie one after the other: a sequence's rows are neighbours, as rings need them.
    """

    plan: StepPlan
    rows: Rows
    token_places_T: IntArray
    """int64: where their tokens lie."""
    drawing_R: Tensor
    """int64: of the T rows, those that tokens are drawn from: the last one of each sequence that draws, after
    one before each of its drafts; again for each of its forks."""
    draws: Draws
    drawn_places_R: IntArray
    """int64: where the drawn tokens go."""


class ModelRunner:
    """Packs on the engine's thread, while a step computes on another: what a packed step reads and writes is
    its own, but for the token rows and the device's memory."""

    def __init__(
        self,
        model: Decoder,
        memory: DeviceMemory,
        rows: TokenRows,
        backend: Backend,
        device: torch.device,
        *,
        max_logits: int,
        vocab_size: int,
        num_layers: int | None = None,
    ) -> None:
        """`model` computes at most `max_logits` rows of logits at a time.

        num_layers: for a rehearsal, which needs only so many of the first.
        """
        self._model = model
        self._memory = memory
        self._layers = memory.layers[:num_layers]
        self._rows = rows
        self._backend = backend
        self._device = device
        self._sampler = Sampler(backend, device)
        self._max_logits = max_logits
        self._vocab_size = vocab_size

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._run, self.pack(plan))

    @torch.inference_mode()
    def _run(self, step: PackedStep) -> StepResult:
        return self.draw(step, self.hidden_states(step))

    def pack(self, plan: StepPlan) -> PackedStep:
        self._rows.load(plan)
        sequences = plan.sequences
        row_S = np.array([s.row for s in sequences], dtype=np.int64)
        start_S = np.array([s.start for s in sequences], dtype=np.int64)
        end_S = np.array([s.end for s in sequences], dtype=np.int64)
        sequence_T = np.repeat(np.arange(len(sequences), dtype=np.int32), end_S - start_S)
        after_S = np.cumsum(end_S - start_S)  # the T rows up to each sequence's last
        position_T = (
            np.arange(len(sequence_T), dtype=np.int32) + (end_S - after_S).astype(np.int32)[sequence_T]
        )
        drawing = list(_drawing(sequences, after_S.tolist()))
        row_R, position_R, drawing_R = (
            np.array([each[column] for each in drawing], dtype=np.int64) for column in (1, 2, 3)
        )
        return PackedStep(
            plan=plan,
            rows=Rows(
                sequence_T=self._on_device(sequence_T),
                position_T=self._on_device(position_T),
                table_SN=self._rows.tables(row_S),
                store_from_S=self._store_from(sequences),
                rings=None if self._memory.slots is None else self._ring_rows(sequences),
            ),
            token_places_T=self._rows.places(row_S[sequence_T], position_T),
            drawing_R=self._on_device(drawing_R),
            draws=self._sampler.prepare(
                [
                    DrawRow(draw=draw, position=position, tokens=self._rows.of(row))
                    for draw, row, position, _ in drawing
                ],
                self._vocab_size,
            ),
            drawn_places_R=self._rows.places(row_R, position_R),
        )

    def _store_from(self, sequences: Sequence[SequenceStep]) -> Tensor | None:
        """int32 [S], if there is a sequence that must not write all its rows."""
        if not any(s.start < s.store_from for s in sequences):
            return None
        return self._on_device(np.array([s.store_from for s in sequences], dtype=np.int32))

    def _ring_rows(self, sequences: Sequence[SequenceStep]) -> RingRows:
        block_size = self._memory.layout.block_size
        restores = [
            (i, (-(-s.start // block_size) - age) * block_size, segment)
            for i, s in enumerate(sequences)
            for age, segment in enumerate(reversed(s.restore))
        ]
        captures = [(i, *capture) for i, s in enumerate(sequences) for capture in s.captures]
        slots = np.array([(s.slot, s.start, s.valid_from) for s in sequences], dtype=np.int32)
        slot_S, start_S, valid_from_S = (self._on_device(column.copy()) for column in slots.T)
        return RingRows(
            slot_S=slot_S,
            start_S=start_S,
            valid_from_S=valid_from_S,
            restores_C3=self._on_device(np.array(restores, dtype=np.int32).reshape(-1, 3)),
            captures_C3=self._on_device(np.array(captures, dtype=np.int32).reshape(-1, 3)),
        )

    def hidden_states(self, step: PackedStep) -> Tensor:
        """float32 [T, hidden_size], the plan's sequences one after the other; valid until the next call.

        All rows are written then, so what forks need of them is copied too.
        """
        token_ids_T = self._rows.tokens(step.token_places_T)
        hidden_TN = self._model.hidden_states(token_ids_T, step.rows, self._layers)
        for fork in (fork for s in step.plan.sequences for fork in s.forks):
            self._memory.copy(fork.blocks, fork.slot)
        return hidden_TN

    def draw(self, step: PackedStep, hidden_TN: Tensor) -> StepResult:
        """The next tokens of every sequence that the plan lets draw. What is drawn behind a draft that was
        wrong lies in the token rows too, where a later step draws before anyone reads."""
        prompt_logprobs = self._prompts_logprobs(step.plan, hidden_TN)
        drawn: list[Drawn] = []
        if len(step.drawing_R):
            hidden_RN = hidden_TN.new_empty(len(step.drawing_R), hidden_TN.shape[1])
            self._backend.gather(hidden_TN, step.drawing_R, hidden_RN)
            token_R, drawn = self._sampler.draw(self._model.logits(hidden_RN), step.draws)
            self._rows.put(step.drawn_places_R, token_R)
        return StepResult(
            step_id=step.plan.step_id,
            drawn=_by_sequence(step.plan.sequences, drawn),
            prompt_logprobs=prompt_logprobs,
        )

    def _prompts_logprobs(
        self, plan: StepPlan, hidden_TN: Tensor
    ) -> dict[SequenceId, tuple[TokenLogprob, ...]]:
        said: dict[SequenceId, tuple[TokenLogprob, ...]] = {}
        first = 0
        for step in plan.sequences:
            after = first + step.end - step.start
            if step.prompt_logprobs is not None:
                said[step.sequence_id] = self._prompt_logprobs(
                    step, step.prompt_logprobs, hidden_TN[first:after]
                )
            first = after
        return said

    def _prompt_logprobs(self, step: SequenceStep, top: int, hidden_TN: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the tokens after the step's rows, as far as they are the prompt's."""
        end = step.end if step.draw is None else min(step.end, step.draw.num_prompt_tokens - 1)
        count = max(0, end - step.start)
        following_T = self._rows.of(step.row)[step.start + 1 : step.start + 1 + count]
        return self._sampler.prompt_logprobs(
            hidden_TN[:count], following_T, top, self._model.logits, max_logits=self._max_logits
        )

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _drawing(
    sequences: Sequence[SequenceStep], after_S: Sequence[int]
) -> Iterator[tuple[Draw, int, int, int]]:
    """Each token that is drawn: how, for which row of the token pool, at which position, and from which of
    the T rows. after_S: the T rows up to each sequence's last."""
    for step, after in zip(sequences, after_S, strict=True):
        if step.draw is not None:
            for behind in range(len(step.drafts), -1, -1):
                yield step.draw, step.row, step.end - behind, after - 1 - behind
        for fork in step.forks:
            yield fork.draw, fork.row, step.end, after - 1


def _by_sequence(
    sequences: Sequence[SequenceStep], drawn: Sequence[Drawn]
) -> dict[SequenceId, tuple[Drawn, ...]]:
    """drawn: in the order of `_drawing`."""
    each, said = iter(drawn), dict[SequenceId, tuple[Drawn, ...]]()
    for step in sequences:
        if step.drafts:
            said[step.sequence_id] = step.accepted(tuple(islice(each, len(step.drafts) + 1)))
        elif step.draw is not None:  # as most do, and the next step waits for this
            said[step.sequence_id] = (next(each),)
        for fork in step.forks:
            said[fork.sequence_id] = (next(each),)
    return said
