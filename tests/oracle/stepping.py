"""A model without an engine: steps of any rows, over pages that hold NaN where nobody wrote."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.build import DEVICE, LoadedModel
from shoal.actors.engine.models.decoder import Decoder
from shoal.actors.engine.runner import PagedPool
from shoal.kernels.backend import Backend, Rows
from shoal.kvstore.layout import KVDtype

Piece = tuple[int, int, int]
"""Positions start to end - 1 of a sequence: (sequence, start, end)."""


@dataclass
class Pages:
    """Sequences of given tokens, in blocks that lie in no order."""

    loaded: LoadedModel
    backend: Backend
    sequences: Sequence[Sequence[int]]
    block_size: int = 16
    kv_cache_dtype: KVDtype = "float32"
    _decoder: Decoder = field(init=False)
    _pool: PagedPool = field(init=False)
    _table_SN: Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_rows = sum(map(len, self.sequences))
        blocks = -(-max(map(len, self.sequences)) // self.block_size)
        num_blocks = blocks * len(self.sequences)
        self._decoder = self.loaded.decoder(self.backend, max_rows=num_rows, max_logits=num_rows)
        layout = self.loaded.block_layout(self.block_size, self.kv_cache_dtype)
        self._pool = PagedPool(layout, num_blocks + 1, DEVICE)
        self._pool.storage.fill_(float("nan"))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
        self._table_SN = order.int().view(len(self.sequences), blocks)

    @torch.inference_mode()
    def step(self, *pieces: Piece) -> list[Tensor]:
        """Logits float32 [end - start, V] of each piece; all are computed together."""
        rows = [(s, p) for s, start, end in pieces for p in range(start, end)]
        sequence_T, position_T = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        where = Rows(sequence_T=sequence_T, position_T=position_T, table_SN=self._table_SN)
        token_ids = np.array([self.sequences[s][p] for s, p in rows])
        hidden = self._decoder.hidden_states(token_ids, where, self._pool.layers)
        logits = self._decoder.logits(hidden).clone()
        return list(torch.split(logits, [end - start for _, start, end in pieces]))

    def in_chunks(self, sizes: Iterable[int], sequence: int = 0) -> Tensor:
        """Logits of a whole sequence, so many tokens a step; the last size goes on to the end."""
        end, logits = len(self.sequences[sequence]), []
        start, sizes = 0, iter(sizes)
        size = end
        while start < end:
            size = next(sizes, size)
            logits += self.step((sequence, start, min(end, start + size)))
            start += size
        return torch.cat(logits)


def logits_of(loaded: LoadedModel, backend: Backend, tokens: Sequence[int], *sizes: int) -> Tensor:
    """float32 [T, V], at once or in chunks of these sizes."""
    return Pages(loaded, backend, [tokens]).in_chunks(sizes or (len(tokens),))
