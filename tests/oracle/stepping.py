"""A model without an engine: steps of any rows, over memory that holds NaN where nobody wrote."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.build import DEVICE, LoadedModel
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.models.decoder import Decoder
from shoal.kernels.backend import Backend, LayerKV, LayerParts, LayerRing, RingRows, Rows
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import KVDtype

Piece = tuple[int, int, int]
"""Positions start to end - 1 of a sequence: (sequence, start, end)."""
Copy = tuple[int, int, int]
"""(sequence, boundary, segment)"""


POISON = 0xFF
"""Bytes of it are NaN in every type of floats."""


def poison(memory: DeviceMemory) -> None:
    """A row that no step wrote is seen in every logit after it."""
    for tensor in (memory.blocks, memory.slots, memory.segments):
        if tensor is not None:
            tensor.fill_(POISON)
    for layer in memory.layers:
        if isinstance(layer, LayerRing):
            layer.own.k_PBHD.fill_(float("nan"))
            layer.own.v_PBHD.fill_(float("nan"))


@dataclass
class Pages:
    """Sequences of given tokens, in blocks that lie in no order; windows of them, in slots.

    Every boundary that a step comes by is captured.
    """

    loaded: LoadedModel
    backend: Backend
    sequences: Sequence[Sequence[int]]
    block_size: int = 16
    kv_cache_dtype: KVDtype = "float32"
    max_model_len: int = 512
    """Of the model."""
    num_dropped_layers: int = 0
    num_draft_tokens: int = 0
    _decoder: Decoder = field(init=False)
    _memory: DeviceMemory = field(init=False)
    _table_SN: Tensor = field(init=False)
    _store_from_S: Tensor = field(init=False)
    _valid_from_S: Tensor = field(init=False)
    _restores: list[Copy] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        num_rows, num_sequences = sum(map(len, self.sequences)), len(self.sequences)
        blocks = -(-max(map(len, self.sequences)) // self.block_size)
        num_blocks = blocks * num_sequences + 1
        self._decoder = self.loaded.decoder(self.backend, max_rows=num_rows, max_logits=num_rows)
        layout = self.loaded.config.layout(
            block_size=self.block_size,
            dtype=self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            num_dropped_layers=self.num_dropped_layers,
            num_draft_tokens=self.num_draft_tokens,
        )
        self._memory = DeviceMemory(
            layout,
            num_blocks=num_blocks,
            num_slots=num_sequences + 1,
            num_segments=num_blocks,
            max_rows=num_rows,
            device=DEVICE,
        )
        poison(self._memory)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._table_SN = order.int().view(num_sequences, blocks)
        self._store_from_S = torch.zeros(num_sequences, dtype=torch.int32)
        self._valid_from_S = torch.zeros(num_sequences, dtype=torch.int32)

    @property
    def rule(self) -> BoundaryRule:
        return self._memory.layout.rule

    @property
    def num_rings(self) -> int:
        rings = self._memory.layout.rings
        return 0 if rings is None else rings.num_layers

    def take_up(self, sequence: int, *, start: int, boundary: int, without: int | None = None) -> None:
        """Forget what the sequence has in its slot, and its rows from position `boundary` on.

        Its next step begins at position `start`, where a block ends, or so many tokens before it as the rule
        says, from the segments that were captured; `without` leaves out one of them.
        """
        for block, first in zip(
            self._table_SN[sequence].tolist(), range(0, 1 << 30, self.block_size), strict=False
        ):
            for layer in self._memory.layers:
                if isinstance(layer, LayerKV):
                    layer.k_PBHD[block, max(0, boundary - first) :] = float("nan")
                    layer.v_PBHD[block, max(0, boundary - first) :] = float("nan")
                if isinstance(layer, LayerParts) and first >= boundary:
                    for part in layer.blocks.values():
                        part[block] = float("nan")
        if self._memory.slots is not None:
            self._memory.slots[sequence + 1] = POISON
        self._store_from_S[sequence], self._valid_from_S[sequence] = (
            boundary,
            max(0, start - self.rule.num_rewound),
        )
        self._restores += [
            (sequence, (i + 1) * self.block_size, self._segment(sequence, i))
            for n, i in enumerate(self.rule.segments_at(start // self.block_size))
            if n != without
        ]

    @torch.inference_mode()
    def step(self, *pieces: Piece) -> list[Tensor]:
        """Logits float32 [end - start, V] of each piece; all are computed together."""
        rows = [(s, p) for s, start, end in pieces for p in range(start, end)]
        sequence_T, position_T = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        where = Rows(
            sequence_T=sequence_T,
            position_T=position_T,
            table_SN=self._table_SN,
            store_from_S=self._store_from_S,
            rings=self._ring_rows(pieces),
        )
        token_ids = np.array([self.sequences[s][p] for s, p in rows])
        hidden = self._decoder.hidden_states(token_ids, where, self._memory.layers)
        self._restores = []
        logits = self._decoder.logits(hidden).clone()
        return list(torch.split(logits, [end - start for _, start, end in pieces]))

    def _ring_rows(self, pieces: Sequence[Piece]) -> RingRows:
        start_S = self._valid_from_S.clone()
        captures: list[Copy] = []
        for s, start, end in pieces:
            start_S[s] = start
            blocks = range(start // self.block_size, end // self.block_size)
            captures += [(s, (i + 1) * self.block_size, self._segment(s, i)) for i in blocks]
        return RingRows(
            slot_S=torch.arange(1, len(self.sequences) + 1, dtype=torch.int32),
            start_S=start_S,
            valid_from_S=self._valid_from_S,
            restores_C3=torch.tensor(self._restores, dtype=torch.int32).view(-1, 3),
            captures_C3=torch.tensor(captures, dtype=torch.int32).view(-1, 3),
        )

    def _segment(self, sequence: int, block: int) -> int:
        return int(self._table_SN[sequence, block])

    def in_chunks(
        self, sizes: Iterable[int], sequence: int = 0, *, start: int = 0, end: int | None = None
    ) -> Tensor:
        """Logits of a sequence from `start` on, so many tokens a step; the last size goes on to the end."""
        end, logits = len(self.sequences[sequence]) if end is None else end, []
        sizes = iter(sizes)
        size = end
        while start < end:
            size = next(sizes, size)
            logits += self.step((sequence, start, min(end, start + size)))
            start += size
        return torch.cat(logits)


def logits_of(loaded: LoadedModel, backend: Backend, tokens: Sequence[int], *sizes: int) -> Tensor:
    """float32 [T, V], at once or in chunks of these sizes."""
    return Pages(loaded, backend, [tokens]).in_chunks(sizes or (len(tokens),))
