"""Runs what a plan says on one device: packs the batch, computes, draws."""

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.models.decoder import Decoder
from shoal.actors.engine.step import SequenceStep, StepPlan, StepResult
from shoal.actors.messages import SamplingParams
from shoal.kernels.backend import Backend, LayerKV, Rows, Sampling
from shoal.kvstore.layout import BlockLayout


class PagedPool:
    """The device's K/V memory, one tensor of the layout's shape, not initialised: nobody reads a row that no
    step has written."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[layout.dtype]
        self.storage = torch.empty(layout.pool_shape(num_blocks), dtype=dtype, device=device)
        self.layers = tuple(
            LayerKV(k_PBHD=self.storage[:, layer, 0], v_PBHD=self.storage[:, layer, 1])
            for layer in range(layout.num_layers)
        )


class ModelRunner:
    def __init__(self, model: Decoder, pool: PagedPool, backend: Backend, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._device = device

    def run(self, plan: StepPlan) -> StepResult:
        return self.draw(plan, self.hidden_states(plan))

    @torch.inference_mode()
    def hidden_states(self, plan: StepPlan) -> Tensor:
        """float32 [T, hidden_size], the plan's sequences one after the other; valid until the next call."""
        token_ids = np.concatenate([np.array(s.token_ids, dtype=np.int64) for s in plan.sequences])
        return self._model.hidden_states(self._on_device(token_ids), self._rows(plan), self._pool.layers)

    @torch.inference_mode()
    def draw(self, plan: StepPlan, hidden_TN: Tensor) -> StepResult:
        """The next token of every sequence that the plan lets draw, from its last row."""
        drawing, last_rows = [], []
        row = 0
        for sequence in plan.sequences:
            row += len(sequence.token_ids)
            if sequence.draw is not None:
                drawing.append(sequence)
                last_rows.append(row - 1)
        if not drawing:
            return StepResult(step_id=plan.step_id, tokens={})
        last_R = self._on_device(np.array(last_rows, dtype=np.int64))
        hidden_RN = hidden_TN.new_empty(len(drawing), hidden_TN.shape[1])
        logits = self._model.logits(self._backend.gather(hidden_TN, last_R, hidden_RN))
        tokens = self._backend.sample(logits, self._sampling(drawing)).tolist()
        ids = [sequence.sequence_id for sequence in drawing]
        return StepResult(step_id=plan.step_id, tokens=dict(zip(ids, tokens, strict=True)))

    def _rows(self, plan: StepPlan) -> Rows:
        lengths = [len(s.token_ids) for s in plan.sequences]
        table = np.full(
            (len(lengths), max(len(s.block_table) for s in plan.sequences)), NO_BLOCK, dtype=np.int32
        )
        for i, sequence in enumerate(plan.sequences):
            table[i, : len(sequence.block_table)] = sequence.block_table
        positions = np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in plan.sequences])
        return Rows(
            sequence_T=self._on_device(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)),
            position_T=self._on_device(positions),
            table_SN=self._on_device(table),
        )

    def _sampling(self, drawing: list[SequenceStep]) -> Sampling:
        params: list[SamplingParams] = [s.draw for s in drawing if s.draw is not None]
        return Sampling(
            temperature_T=self._on_device(np.array([p.temperature for p in params], dtype=np.float32)),
            top_k_T=self._on_device(np.array([p.top_k for p in params], dtype=np.int32)),
            top_p_T=self._on_device(np.array([p.top_p for p in params], dtype=np.float32)),
            seed_T=self._on_device(np.array([p.seed for p in params], dtype=np.int64)),
            position_T=self._on_device(np.array([s.end for s in drawing], dtype=np.int64)),
        )

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
