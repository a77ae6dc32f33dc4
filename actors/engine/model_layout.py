"""What the layers of a model keep of a sequence: in blocks, in its slot, and of that in segments.

A layer keeps named parts, of any shape and type. Three kinds of pieces have them:

- **a block** has what a layer keeps of all positions: a row for each of its tokens, or fewer that stand for
  several each. A row of a position before `store_from` is there already, shared, and stays as it is.
- **a slot** has what a sequence overwrites: the last rows in a ring, or a whole state that each token
  changes. It is not initialised. Who computes position 0 reads nothing of it; who begins later restores it.
- **a segment** has what is saved of a slot at the end of a block: of a ring that block's last rows, in order
  of their positions, and some before them if `rule.num_rewound` says so; of a whole state all of it. Parts of
  a slot that its layer's segments do not have by the same name are dropped: they must be exact again once
  what `rule.num_recomputed` and `rule.num_rewound` say has been computed.

A step's rows say which (`RingRows` of kernels/backend.py): each sequence's slot and first position, and the
segments to restore and to capture. In a layer a step goes in this order: restore, compute, capture, commit.
A segment is captured as of the position it is named for, wherever that lies in the step's rows. Of the
`rule.num_segments` that are restored, rings take each one's rows, and a whole state that of the boundary at
`start` alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import KVDtype, Packing, Part, StateLayout

KV = "kv"
"""Keys and values of full attention, in blocks: [2 (K, V), block_size, num_kv_heads, head_dim]."""
RING = "ring"
"""Keys and values of attention with a window: [2, ring or segment rows, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """The parts of one layer. A layer may have none."""

    blocks: tuple[Part, ...] = ()
    slots: tuple[Part, ...] = ()
    segments: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        for parts in (self.blocks, self.slots, self.segments):
            if len({part.name for part in parts}) < len(parts):
                raise ValueError(f"two parts of one name: {parts}")
        if unknown := self._stored - {part.name for part in self.slots}:
            raise ValueError(f"a segment has {', '.join(sorted(unknown))}, which the slot has not")

    @property
    def is_attention(self) -> bool:
        """Whether it keeps keys and values alone, as our attention kernels read them."""
        return {part.name for part in (*self.blocks, *self.slots)} in ({KV}, {RING})

    @property
    def _stored(self) -> set[str]:
        return {part.name for part in self.segments}

    def slot_parts(self, *, stored: bool) -> tuple[Part, ...]:
        return tuple(part for part in self.slots if (part.name in self._stored) is stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The bytes of a block, a slot and a segment: what memory is planned by, and what lies in it."""

    layers: tuple[LayerLayout, ...]
    block_size: int
    rule: BoundaryRule
    rings: StateLayout | None = None
    """Of attention with a window, if layers have it."""
    whole_states: bool = False
    """Whether some layer keeps one. Segments are then large, and any boundary's is enough, so not each is
    captured. Nor can a sequence go on from before the last tokens computed, as after drafts that were wrong:
    rings are longer for that."""
    blocks: Packing
    slots: Packing
    """The stored region in front, behind it the dropped one."""
    segments: Packing

    @classmethod
    def of(
        cls,
        layers: Iterable[LayerLayout],
        *,
        block_size: int,
        rule: BoundaryRule,
        rings: StateLayout | None = None,
        whole_states: bool = False,
    ) -> Self:
        layers = tuple(layers)
        return cls(
            layers=layers,
            block_size=block_size,
            rule=rule,
            rings=rings,
            whole_states=whole_states,
            blocks=_packed(layer.blocks for layer in layers),
            slots=_packed(
                (layer.slot_parts(stored=True) for layer in layers),
                (layer.slot_parts(stored=False) for layer in layers),
            ),
            segments=_packed(layer.segments for layer in layers),
        )

    @property
    def bytes_per_token(self) -> float:
        """Of blocks. Not whole where a row stands for several tokens."""
        return self.blocks.num_bytes / self.block_size

    @property
    def stored_bytes(self) -> int:
        """Of a slot: its front, without which no sequence can be taken up."""
        stored = (p for p in self.slots.parts if p.part in self.layers[p.layer].slot_parts(stored=True))
        return max((p.end for p in stored), default=0)

    @property
    def identity(self) -> str:
        """What a fingerprint must say of it: engines that differ in it cannot read each other's pieces."""
        others = ((i, layer) for i, layer in enumerate(self.layers) if not layer.is_attention)
        kept = [(i, layer.blocks, layer.segments) for i, layer in others if layer != LayerLayout()]
        return "".join(f", {what}" for what in (self.rings, kept) if what)

    def check_drafts(self, num_draft_tokens: int) -> None:
        """Raises ValueError if there are to be some, and those that were wrong could not be taken back."""
        if num_draft_tokens and self.whole_states:
            raise ValueError(
                "speculative: the model's recurrent layers cannot take rejected drafts back: leave it out"
            )


def _packed(*regions: Iterable[Iterable[Part]]) -> Packing:
    """Each region's parts by kind, in the order in which layers first have them."""
    ordered: list[tuple[int, Part]] = []
    for region in regions:
        kinds: dict[Part, list[int]] = {}
        for layer, parts in enumerate(region):
            for part in parts:
                kinds.setdefault(part, []).append(layer)
        ordered += [(layer, part) for part, layers in kinds.items() for layer in layers]
    return Packing.of(ordered)


def paged_layer(*, num_kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype) -> LayerLayout:
    """Attention to all positions."""
    return LayerLayout(blocks=(Part(name=KV, shape=(2, block_size, num_kv_heads, head_dim), dtype=dtype),))


def ring_layer(rings: StateLayout, *, stored: bool) -> LayerLayout:
    """Attention with a window."""

    def rows(count: int) -> tuple[Part, ...]:
        return (Part(name=RING, shape=(2, count, rings.num_kv_heads, rings.head_dim), dtype=rings.dtype),)

    is_saved = stored and rings.segment_rows > 0
    return LayerLayout(slots=rows(rings.ring_rows), segments=rows(rings.segment_rows) if is_saved else ())


def model_layout(
    layers: Sequence[int | LayerLayout | None],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: KVDtype,
    max_model_len: int,
    num_dropped_layers: int = 0,
    num_draft_tokens: int = 0,
) -> ModelLayout:
    """Of layers that attend, all with the same heads, and of others that keep whole states or nothing.

    layers: how many positions a token sees in each, None is all; or what else it keeps. A window that no
    sequence outgrows bounds nothing: such a layer is paged. Rings are as long as the largest of the other
    windows needs, and longer by as many drafts as a step may have: the rows of those that were wrong lie
    where no row lay that is needed. Raises ValueError if more layers are to be dropped than have a window.
    """
    kinds = [None if isinstance(kind, int) and kind >= max_model_len else kind for kind in layers]
    windows = [kind for kind in kinds if isinstance(kind, int)]
    if num_dropped_layers > len(windows):
        raise ValueError(
            f"cannot drop {num_dropped_layers} sliding layers: of the model's {len(layers)} layers, "
            f"{len(windows)} have a window shorter than max_model_len {max_model_len}"
        )
    paged = paged_layer(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    rings: StateLayout | None = None
    ringed: Iterator[LayerLayout] = iter(())
    if windows:
        rings = StateLayout(
            num_layers=len(windows),
            num_dropped=num_dropped_layers,
            window=max(windows),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            rows_per_step=1 + num_draft_tokens,
        )
        stored = [ring_layer(rings, stored=True)] * rings.num_stored
        ringed = iter([*stored, *[ring_layer(rings, stored=False)] * rings.num_dropped])
    made = [
        kind if isinstance(kind, LayerLayout) else paged if kind is None else next(ringed) for kind in kinds
    ]
    has_states = any(isinstance(kind, LayerLayout) and kind.slots for kind in kinds)
    return ModelLayout.of(
        made,
        block_size=block_size,
        rule=_rule(rings, has_states=has_states),
        rings=rings,
        whole_states=has_states,
    )


def _rule(rings: StateLayout | None, *, has_states: bool) -> BoundaryRule:
    """A whole state at a boundary is in the segment of the block before it."""
    rule = rings.rule if rings else BoundaryRule()
    return replace(rule, num_segments=max(1, rule.num_segments)) if has_states else rule
