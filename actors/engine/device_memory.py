"""The device's memory of what sequences keep: blocks, state slots and segments."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.model_layout import KV, RING, LayerLayout, ModelLayout
from shoal.actors.engine.step import Copy
from shoal.actors.engine.transfers import Piece
from shoal.kernels.backend import LayerKV, LayerMemory, LayerParts, LayerRing
from shoal.kvstore.layout import Packing

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


class DeviceMemory:
    """Not initialised: nobody reads a row that no step has written.

    blocks, slots, segments: uint8 [count, bytes of one], the last two None of a model without state. Number 0
    of each is never issued, and is where padding writes. `layers` are what a decoder computes with: views of
    their parts.
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

        def memory(count: int, packing: Packing) -> Tensor:
            return torch.empty(count, packing.num_bytes, dtype=torch.uint8, device=device)

        self.blocks = memory(num_blocks, layout.blocks)
        has_state = layout.slots.num_bytes > 0
        self.slots = memory(num_slots, layout.slots) if has_state else None
        self.segments = memory(max(1, num_segments), layout.segments) if has_state else None
        own = _own_rows(layout, max_rows, device)
        parts = zip(
            layout.layers,
            _views(self.blocks, layout, layout.blocks),
            _views(self.slots, layout, layout.slots),
            _views(self.segments, layout, layout.segments),
            strict=True,
        )
        self.layers: tuple[LayerMemory, ...] = tuple(
            _layer(layer, LayerParts(blocks=in_blocks, slots=in_slots, segments=in_segments), own)
            for layer, in_blocks, in_slots, in_segments in parts
        )
        # Copied by numpy, which asks no other thread to help.
        self._block_bytes = self.blocks.numpy()
        self._slot_bytes = None if self.slots is None else self.slots.numpy()
        self._segment_bytes = None if self.segments is None else self.segments.numpy()

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
            raise ValueError(f"a model without state has no segment {piece.segment}")
        return self._segment_bytes[piece.segment, :]


def _views(memory: Tensor | None, layout: ModelLayout, packing: Packing) -> list[dict[str, Tensor]]:
    """Of each layer, its parts by name: [count, *shape], strided in the first dimension alone."""
    views: list[dict[str, Tensor]] = [{} for _ in layout.layers]
    if memory is not None:
        for placed in packing.parts:
            flat = memory[:, placed.offset : placed.end].view(_DTYPES[placed.part.dtype])
            views[placed.layer][placed.part.name] = flat.view(len(flat), *placed.part.shape)
    return views


def _own_rows(layout: ModelLayout, max_rows: int, device: torch.device) -> LayerKV | None:
    """A step's own rows, beside the rings. All layers share them."""
    if layout.rings is None:
        return None
    shape = (1, 2, max_rows, layout.rings.num_kv_heads, layout.rings.head_dim)
    return _kv(torch.empty(shape, dtype=_DTYPES[layout.rings.dtype], device=device))


def _layer(layer: LayerLayout, parts: LayerParts, own: LayerKV | None) -> LayerMemory:
    if not layer.is_attention:
        return parts
    if KV in parts.blocks:
        return _kv(parts.blocks[KV])
    assert own is not None, "a ring that the layout does not know of"
    saved = parts.segments.get(RING)
    return LayerRing(slots=_kv(parts.slots[RING]), segments=None if saved is None else _kv(saved), own=own)


def _kv(rows_P2BHD: Tensor) -> LayerKV:
    return LayerKV(k_PBHD=rows_P2BHD[:, 0], v_PBHD=rows_P2BHD[:, 1])
