"""The sequences of a `Paged`, in rings: what no step has written is NaN, so it shows where it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.kernels.backend import Backend, LayerKV, LayerRing, RingRows, Rows
from tests.kernels.helpers import BEST, NAN, Paged

BLOCK = 16
"""Tokens between two boundaries."""
Chunk = tuple[int, int, int]
"""Positions start to end - 1 of a sequence: (sequence, start, end)."""
Piece = tuple[int, int, int]
"""(sequence, boundary, segment)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Chunks that are computed together, and which segments are read before and written after them."""

    chunks: Sequence[Chunk]
    restores: Sequence[Piece] = ()
    captures: Sequence[Piece] = ()
    valid_from: Mapping[int, int] = field(default_factory=dict)

    @property
    def which(self) -> list[tuple[int, int]]:
        return [(s, p) for s, start, end in self.chunks for p in range(start, end)]

    def rows(self, num_sequences: int) -> Rows:
        """Sequence s has slot num_sequences - s, so that no number is two things."""
        start_S = torch.zeros(num_sequences, dtype=torch.int32)
        valid_from_S = torch.zeros(num_sequences, dtype=torch.int32)
        for s, start, _ in self.chunks:
            start_S[s], valid_from_S[s] = start, self.valid_from.get(s, 0)
        sequence_T, position_T = torch.tensor(self.which, dtype=torch.int32).T.contiguous()
        return Rows(
            sequence_T=sequence_T,
            position_T=position_T,
            table_SN=torch.zeros(num_sequences, 1, dtype=torch.int32),
            rings=RingRows(
                slot_S=torch.arange(num_sequences, 0, -1, dtype=torch.int32),
                start_S=start_S,
                valid_from_S=valid_from_S,
                restores_C3=torch.tensor(self.restores, dtype=torch.int32).view(-1, 3),
                captures_C3=torch.tensor(self.captures, dtype=torch.int32).view(-1, 3),
            ),
        )


def part(shape: tuple[int, ...], dtype: torch.dtype) -> LayerKV:
    """The middle one of three layers, as a pool holds them."""
    first, *rest = shape
    layers = torch.full((first, 3, 2, *rest), NAN, dtype=dtype)
    return LayerKV(k_PBHD=layers[:, 1, 0], v_PBHD=layers[:, 1, 1])


class Ringed:
    def __init__(
        self,
        paged: Paged,
        window: int,
        *,
        dtype: torch.dtype = torch.float32,
        most: int = 330,
        num_segments: int | None = 40,
        spare: int = 1,
    ) -> None:
        """most: rows a step. num_segments None: the layer is not stored. spare: rows beyond window - 1."""
        self.paged, self.window = paged, window
        shape = (paged.kv_heads, paged.head_size)
        segment_rows = min(BLOCK, window - 1)
        self.ring = LayerRing(
            slots=part((len(paged.lengths) + 1, window - 1 + spare, *shape), dtype),
            segments=(num_segments and part((num_segments, segment_rows, *shape), dtype)) or None,
            own=LayerKV(
                k_PBHD=torch.full((1, most, *shape), NAN, dtype=dtype),
                v_PBHD=torch.full((1, most, *shape), NAN, dtype=dtype),
            ),
        )

    def step(self, step: Step, backend: Backend = BEST) -> Tensor:
        """What the chunks' rows attend to, [T, H, D]."""
        rows = step.rows(len(self.paged.lengths))
        q_THD, k_THD, v_THD = self.paged.fused(step.which)
        backend.restore(self.ring, rows)
        backend.store(k_THD, v_THD, self.ring, rows)
        out_THD, scale = torch.empty(q_THD.shape), self.paged.head_size**-0.5
        backend.attention(q_THD, self.ring, rows, scale, out_THD, window=self.window)
        backend.capture(self.ring, rows)
        backend.commit(self.ring, rows)
        return out_THD

    def forget(self) -> None:
        """All slots are somebody else's now."""
        self.ring.slots.k_PBHD.fill_(NAN)
        self.ring.slots.v_PBHD.fill_(NAN)


def chunks(length: int, size: int, sequence: int = 0, start: int = 0) -> list[Chunk]:
    return [(sequence, first, min(length, first + size)) for first in range(start, length, size)]
