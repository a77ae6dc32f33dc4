"""Where the layers of a model keep their rows: in blocks, or a window of them in a ring."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import BlockLayout, KVDtype, StateLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    blocks: BlockLayout
    state: StateLayout | None
    """None if no layer has a ring."""
    has_ring: tuple[bool, ...]
    """Of each layer. The others are paged."""
    can_rewind: bool = True
    """Whether a sequence can go on from before the last tokens computed, as after drafts that were rejected.
    With a whole state it cannot."""

    @property
    def rule(self) -> BoundaryRule:
        return self.state.rule if self.state else BoundaryRule()

    @property
    def segment_bytes(self) -> int:
        return self.state.bytes_per_segment if self.state else 0

    def check_drafts(self, num_draft_tokens: int) -> None:
        """Raises ValueError if there are to be some, and those that were wrong could not be taken back."""
        if num_draft_tokens and not self.can_rewind:
            raise ValueError(
                "speculative: the model's recurrent layers cannot take rejected drafts back: leave it out"
            )


def model_layout(
    windows: Sequence[int | None],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: KVDtype,
    max_model_len: int,
    num_dropped_layers: int = 0,
    num_draft_tokens: int = 0,
) -> ModelLayout:
    """windows: of each layer, how many positions a token sees; None is all.

    One that no sequence outgrows bounds nothing: such a layer is paged. Rings are as long as the largest of
    the other windows needs, and longer by as many drafts as a step may have: the rows of those that were
    wrong lie where no row lay that is needed. Raises ValueError if more layers are to be dropped than have
    a window.
    """
    has_ring = tuple(window is not None and window < max_model_len for window in windows)
    num_rings = sum(has_ring)
    if num_dropped_layers > num_rings:
        raise ValueError(
            f"cannot drop {num_dropped_layers} sliding layers: of the model's {len(windows)} layers, "
            f"{num_rings} have a window shorter than max_model_len {max_model_len}"
        )
    blocks = BlockLayout(
        num_layers=len(windows) - num_rings,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    if not num_rings:
        return ModelLayout(blocks=blocks, state=None, has_ring=has_ring)
    state = StateLayout(
        num_layers=num_rings,
        num_dropped=num_dropped_layers,
        window=max(window for window, ring in zip(windows, has_ring, strict=True) if ring and window),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        rows_per_step=1 + num_draft_tokens,
    )
    return ModelLayout(blocks=blocks, state=state, has_ring=has_ring)
