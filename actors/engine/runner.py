"""Runs what a plan says on one device: packs the batch, computes, draws."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.models.decoder import Decoder
from shoal.actors.engine.sampler import DrawRow, Sampler
from shoal.actors.engine.step import SequenceStep, StepPlan, StepResult
from shoal.actors.messages import TokenLogprob
from shoal.kernels.backend import Backend, RingRows, Rows


class TokenRows:
    """What the device knows of each running sequence, by row: its tokens and its block table.

    A step reads the tokens that it computes here, and leaves here those that it draws. So it can be planned
    before it is known what the step before it draws. Row 0 is nobody's.
    """

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        num_blocks = -(-max_model_len // block_size)
        # Zeros, because after a step that failed the next one reads a token that was never drawn.
        self._tokens_RL = torch.zeros(num_rows, max_model_len, dtype=torch.int64, device=device)
        self._tables_RN = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        self._tables: list[tuple[BlockId, ...]] = [()] * num_rows

    @property
    def num_bytes(self) -> int:
        return self._tokens_RL.nbytes + self._tables_RN.nbytes

    def load(self, plan: StepPlan) -> None:
        """Take what the plan knows and the rows do not."""
        for step in plan.sequences:
            if step.known_tokens:
                known = torch.tensor(step.known_tokens, dtype=torch.int64)
                self._tokens_RL[step.row, : len(known)] = known
            if self._tables[step.row] is not step.block_table:  # a table that changes is a new object
                table = torch.tensor(step.block_table, dtype=torch.int32)
                self._tables_RN[step.row, : len(table)] = table
                self._tables_RN[step.row, len(table) :] = NO_BLOCK
                self._tables[step.row] = step.block_table

    def tokens(self, row_T: Tensor, position_T: Tensor) -> Tensor:
        """int64 [T]"""
        return self._tokens_RL[row_T, position_T]

    def put(self, row_T: Tensor, position_T: Tensor, token_T: Tensor) -> None:
        self._tokens_RL[row_T, position_T] = token_T

    def of(self, row: int) -> Tensor:
        """int64 [max_model_len]: one sequence's tokens, as far as there are."""
        return self._tokens_RL[row]

    def tables(self, row_S: Tensor) -> Tensor:
        """int32 [S, N], as many columns as the longest sequence may need."""
        return self._tables_RN.index_select(0, row_S)


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        memory: DeviceMemory,
        rows: TokenRows,
        backend: Backend,
        device: torch.device,
        *,
        max_logits: int,
    ) -> None:
        """`model` computes at most `max_logits` rows of logits at a time."""
        self._model = model
        self._memory = memory
        self._rows = rows
        self._backend = backend
        self._device = device
        self._sampler = Sampler(backend, device)
        self._max_logits = max_logits

    def run(self, plan: StepPlan) -> StepResult:
        return self.draw(plan, self.hidden_states(plan))

    @torch.inference_mode()
    def hidden_states(self, plan: StepPlan) -> Tensor:
        """float32 [T, hidden_size], the plan's sequences one after the other; valid until the next call.

        So a sequence's rows are neighbours, as rings need them.
        """
        self._rows.load(plan)
        lengths = [s.end - s.start for s in plan.sequences]
        row_S = np.array([s.row for s in plan.sequences], dtype=np.int64)
        position_T = np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in plan.sequences])
        sequence_T = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        rows = Rows(
            sequence_T=self._on_device(sequence_T),
            position_T=self._on_device(position_T),
            table_SN=self._rows.tables(self._on_device(row_S)),
            store_from_S=self._store_from(plan),
            rings=None if self._memory.slots is None else self._ring_rows(plan),
        )
        token_ids_T = self._rows.tokens(self._on_device(row_S[sequence_T]), rows.position_T)
        return self._model.hidden_states(token_ids_T, rows, self._memory.layers)

    def _store_from(self, plan: StepPlan) -> Tensor | None:
        """int32 [S], if there is a sequence that must not write all its rows."""
        if not any(s.start < s.store_from for s in plan.sequences):
            return None
        return self._on_device(np.array([s.store_from for s in plan.sequences], dtype=np.int32))

    def _ring_rows(self, plan: StepPlan) -> RingRows:
        block_size = self._memory.layout.blocks.block_size
        restores = [
            (i, s.start - age * block_size, segment)
            for i, s in enumerate(plan.sequences)
            for age, segment in enumerate(reversed(s.restore))
        ]
        captures = [(i, *capture) for i, s in enumerate(plan.sequences) for capture in s.captures]
        slots = np.array([(s.slot, s.start, s.valid_from) for s in plan.sequences], dtype=np.int32)
        slot_S, start_S, valid_from_S = (self._on_device(column.copy()) for column in slots.T)
        return RingRows(
            slot_S=slot_S,
            start_S=start_S,
            valid_from_S=valid_from_S,
            restores_C3=self._on_device(np.array(restores, dtype=np.int32).reshape(-1, 3)),
            captures_C3=self._on_device(np.array(captures, dtype=np.int32).reshape(-1, 3)),
        )

    @torch.inference_mode()
    def draw(self, plan: StepPlan, hidden_TN: Tensor) -> StepResult:
        """The next token of every sequence that the plan lets draw, from its last row."""
        ends = np.cumsum([s.end - s.start for s in plan.sequences])
        drawing = [(s, end - 1) for s, end in zip(plan.sequences, ends, strict=True) if s.draw is not None]
        prompt_logprobs = {
            s.sequence_id: self._prompt_logprobs(
                s, s.prompt_logprobs, hidden_TN[end - (s.end - s.start) : end]
            )
            for s, end in zip(plan.sequences, ends, strict=True)
            if s.prompt_logprobs is not None
        }
        if not drawing:
            return StepResult(step_id=plan.step_id, drawn={}, prompt_logprobs=prompt_logprobs)
        sequences = [s for s, _ in drawing]
        hidden_RN = hidden_TN.new_empty(len(drawing), hidden_TN.shape[1])
        self._backend.gather(hidden_TN, self._integers(row for _, row in drawing), hidden_RN)
        drawn = self._sampler.draw(
            self._model.logits(hidden_RN),
            [
                DrawRow(draw=s.draw, position=s.end, tokens=self._rows.of(s.row))
                for s in sequences
                if s.draw is not None
            ],
        )
        self._rows.put(
            self._integers(s.row for s in sequences),
            self._integers(s.end for s in sequences),
            self._integers(d.token_id for d in drawn),
        )
        ids = [s.sequence_id for s in sequences]
        return StepResult(
            step_id=plan.step_id,
            drawn=dict(zip(ids, drawn, strict=True)),
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, step: SequenceStep, top: int, hidden_TN: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the tokens after the step's rows, as far as they are the prompt's."""
        end = step.end if step.draw is None else min(step.end, step.draw.num_prompt_tokens - 1)
        count = max(0, end - step.start)
        following_T = self._rows.of(step.row)[step.start + 1 : step.start + 1 + count]
        return self._sampler.prompt_logprobs(
            hidden_TN[:count], following_T, top, self._model.logits, max_logits=self._max_logits
        )

    def _integers(self, values: Iterable[int]) -> Tensor:
        """int64 [T]; through numpy, which takes a third of the time in caches that a step has emptied."""
        return self._on_device(np.fromiter(values, dtype=np.int64))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
