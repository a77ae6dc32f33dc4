"""How many bytes a token, a block and a pool take, and in which order they lie."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.kvstore.boundary import BoundaryRule

KVDtype = Literal["float32", "bfloat16"]
RowDtype = Literal["float32", "bfloat16", "float8"]
"""Also of rows that are only planned for."""

_DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The paged pool is [blocks, layers, 2 (K, V), block_size, num_kv_heads, head_dim].

    The block comes first, so its bytes over all layers are one contiguous range: saving a block is one copy.
    """

    num_layers: int
    """Layers whose rows are paged: those that see all positions. May be 0."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype = "float32"

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """What a sequence overwrites: for each sliding-window layer a ring of its last rows.

    The row of position p lies in its ring at p % ring_rows. Slots are [slots, layers, 2 (K, V), ring_rows,
    num_kv_heads, head_dim]: the stored layers in front, behind them the dropped ones, which are never saved.
    Segments, the pieces that are saved, are [segments, stored layers, 2, segment_rows, num_kv_heads,
    head_dim]: the segment of a block has the block's last rows, in order of their positions, so that
    neighbouring boundaries share bytes.
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

    @property
    def bytes_per_row(self) -> int:
        """Of one layer, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_slot(self) -> int:
        return self.num_layers * self.ring_rows * self.bytes_per_row

    @property
    def bytes_per_segment(self) -> int:
        return self.num_stored * self.segment_rows * self.bytes_per_row

    def slot_shape(self, num_slots: int) -> tuple[int, int, int, int, int, int]:
        return (num_slots, self.num_layers, 2, self.ring_rows, self.num_kv_heads, self.head_dim)

    def segment_shape(self, num_segments: int) -> tuple[int, int, int, int, int, int]:
        return (num_segments, self.num_stored, 2, self.segment_rows, self.num_kv_heads, self.head_dim)
