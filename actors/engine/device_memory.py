"""The device's memory of keys and values: blocks, state slots and segments."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.model_layout import ModelLayout
from shoal.actors.engine.step import Copy
from shoal.actors.engine.transfers import Piece
from shoal.kernels.backend import LayerKV, LayerRing
from shoal.kvstore.layout import StateLayout


class DeviceMemory:
    """Not initialised: nobody reads a row that no step has written.

    blocks: the layout's `pool_shape`; slots, segments: its `slot_shape` and `segment_shape`, None of a model
    without rings. Number 0 of each is never issued, and is where padding writes.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        num_blocks: int,
        num_slots: int = 1,
        num_segments: int = 1,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """All counts include number 0. max_rows: the most that a step computes."""
        self.layout = layout
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[layout.blocks.dtype]

        def memory(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.blocks = memory(layout.blocks.pool_shape(num_blocks))
        self.slots: Tensor | None = None
        self.segments: Tensor | None = None
        rings: Iterator[LayerRing] = iter(())
        if layout.state is not None:
            self.slots = memory(layout.state.slot_shape(num_slots))
            self.segments = memory(layout.state.segment_shape(max(1, num_segments)))
            own = memory((2, 1, max_rows, layout.state.num_kv_heads, layout.state.head_dim))
            rings = _rings(layout.state, self.slots, self.segments, own)
        paged = (_layer(self.blocks, i) for i in range(layout.blocks.num_layers))
        self.layers: tuple[LayerKV | LayerRing, ...] = tuple(
            next(rings) if has_ring else next(paged) for has_ring in layout.has_ring
        )
        self._block_bytes = _as_bytes(self.blocks)
        self._slot_bytes = None if self.slots is None else _as_bytes(self.slots)
        self._segment_bytes = None if self.segments is None else _as_bytes(self.segments)

    def num_bytes(self, piece: Piece) -> int:
        return len(self._bytes_of(piece))

    def copy_out(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        """The pieces' bytes, one after the other, to `out`: uint8, exactly as many.

        On the caller's own thread, which may be any, without the GIL. Nobody may write the pieces meanwhile.
        """
        for there, ours in self._beside(pieces, out):
            there[:] = ours

    def copy_in(self, pieces: Sequence[Piece], data: np.ndarray) -> None:
        """The opposite of `copy_out`. Nobody may read or write the pieces meanwhile."""
        for there, ours in self._beside(pieces, data):
            ours[:] = there

    def copy(self, blocks: Iterable[Copy], slot: Copy | None) -> None:
        """Whole blocks, and a slot. By who computes the steps: between two of them nobody writes a source."""
        for source, to in blocks:
            self._block_bytes[to] = self._block_bytes[source]
        if slot is not None:
            assert self._slot_bytes is not None
            source, to = slot
            self._slot_bytes[to] = self._slot_bytes[source]

    def _beside(self, pieces: Sequence[Piece], data: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(bytes of `data`, bytes of the device) of each piece."""
        ours = [self._bytes_of(piece) for piece in pieces]
        needed = sum(map(len, ours))
        if data.dtype != np.uint8 or data.shape != (needed,):
            raise ValueError(f"{len(pieces)} pieces take {needed} bytes, not {data.dtype} {data.shape}")
        offset = 0
        for piece in ours:
            yield data[offset : offset + len(piece)], piece
            offset += len(piece)

    def _bytes_of(self, piece: Piece) -> np.ndarray:
        if (piece.block == NO_BLOCK) is (piece.segment == NO_BLOCK):
            raise ValueError(f"a piece is a block or a segment, not {piece}")
        if piece.segment == NO_BLOCK:
            return self._block_bytes[piece.block, :]
        if self._segment_bytes is None:
            raise ValueError(f"a model without rings has no segment {piece.segment}")
        return self._segment_bytes[piece.segment, :]


def _layer(memory: Tensor, layer: int) -> LayerKV:
    return LayerKV(k_PBHD=memory[:, layer, 0], v_PBHD=memory[:, layer, 1])


def _rings(state: StateLayout, slots: Tensor, segments: Tensor, own: Tensor) -> Iterator[LayerRing]:
    for layer in range(state.num_layers):
        is_stored = layer < state.num_stored
        yield LayerRing(
            slots=_layer(slots, layer),
            segments=_layer(segments, layer) if is_stored else None,
            own=LayerKV(k_PBHD=own[0], v_PBHD=own[1]),
        )


def _as_bytes(memory: Tensor) -> np.ndarray:
    """uint8 [count, bytes of each], the same memory. Copied by numpy, which asks no other thread to help."""
    count = memory.shape[0]
    num_bytes = memory.nbytes // count
    return memory.view(-1).view(torch.uint8).numpy().reshape(count, num_bytes)
