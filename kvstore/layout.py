"""How many bytes the parts of a block, a slot and a segment take, and in which order they lie."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Literal, Self

from shoal.kvstore.boundary import BoundaryRule

KVDtype = Literal["float32", "bfloat16"]
RowDtype = Literal["float32", "bfloat16", "float8"]
"""Also of rows that are only planned for."""
PartDtype = Literal["float32", "bfloat16", "uint8"]
"""uint8 is for what only its layer can read, as rows of 8-bit floats and their scales."""

_DTYPE_BYTES: dict[PartDtype, int] = {"float32": 4, "bfloat16": 2, "uint8": 1}
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor that a layer has in every block, in every slot or in every segment."""

    name: str
    shape: tuple[int, ...]
    dtype: PartDtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    layer: int
    part: Part
    offset: int
    """In bytes, of the piece that it is a part of."""

    @property
    def end(self) -> int:
        return self.offset + self.part.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the parts of all layers lie in the bytes of one block, one slot or one segment.

    These bytes are one contiguous range, so saving a piece is one copy. Neighbours of one shape lie close
    together, [layers, *shape]; what begins another kind begins at a multiple of 64 bytes.
    """

    parts: tuple[PlacedPart, ...]
    num_bytes: int

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Part]]) -> Self:
        """parts: (layer, part) in order."""
        placed: list[PlacedPart] = []
        end, num_kinds = 0, 0
        for layer, part in parts:
            if not placed or placed[-1].part != part:
                end, num_kinds = _aligned(end), num_kinds + 1
            placed.append(PlacedPart(layer=layer, part=part, offset=end))
            end = placed[-1].end
        return cls(parts=tuple(placed), num_bytes=_aligned(end) if num_kinds > 1 else end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """What attention with a window overwrites: a ring of its last rows in each such layer.

    The row of position p lies in its ring at p % ring_rows. The segment of a block has the block's last rows,
    in order of their positions, so that neighbouring boundaries share bytes.
    """

    num_layers: int
    """Layers with a ring."""
    num_dropped: int = 0
    """So many of them, the last ones, are not stored: exact again after BoundaryRule.num_recomputed."""
    window: int
    """Positions that a token sees, its own the last; the largest of all these layers."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype = "float32"
    rows_per_step: int = field(default=1, repr=False)
    """What one decode step writes: its token, and drafts. (Never a prefill chunk, whose rows are attended to
    beside the ring and then written to it as far as they fit.) Segments do not depend on it, so it is left
    out of the layout's name in a fingerprint."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_dropped <= self.num_layers:
            raise ValueError(f"cannot drop {self.num_dropped} of {self.num_layers} sliding layers")

    @property
    def needed_rows(self) -> int:
        """Before a position, that a token there sees beside its own."""
        return self.window - 1

    @property
    def ring_rows(self) -> int:
        return self.needed_rows + self.rows_per_step

    @property
    def num_stored(self) -> int:
        return self.num_layers - self.num_dropped

    @property
    def segment_rows(self) -> int:
        return min(self.block_size, self.needed_rows)

    @property
    def rule(self) -> BoundaryRule:
        stores_rows = self.num_stored and self.needed_rows
        return BoundaryRule(
            num_segments=-(-self.needed_rows // self.block_size) if stores_rows else 0,
            num_recomputed=-(-self.num_dropped * self.needed_rows // self.block_size),
        )
