"""What DeepSeek V4 keeps of a sequence, as its config.json tells.

Every layer has a ring of the last rows, in slots. A layer that compresses has rows that stand for `ratio`
tokens each, in blocks, and in its slot what the next of them will be made of. That is never saved: where
stretches overlap, a sequence that is taken up computes the last one before the boundary again, from rows that
the segments have beyond the window; where they do not, one ends at every boundary.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Self

from shoal.actors.engine.model_layout import LayerLayout, ModelLayout
from shoal.actors.engine.models.decoder_config import architecture_of
from shoal.kvstore.layout import Part, PartDtype, RowDtype, StateLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEEPSEEK_V4 = "deepseek_v4"
"""The type of config.json."""
SPARSE = "compressed_sparse_attention"

WINDOW, COMPRESSED, INDEX = "window", "compressed", "index"
"""[rows, values], keys and values alike."""
MAKING, INDEX_MAKING = "making", "index making"
"""float32 [rows, 2 (value, gate), values]."""

SPARE_ROWS = 6
"""Of a ring beyond its window: for drafts, and for what is computed again."""
FLOAT8_SCALED_VALUES = 32
"""Share a scale of one byte (Open Compute Project, microscaling formats): 512 values are 528 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Layer:
    ratio: int = 0
    """Tokens of a compressed row; 0 has none."""
    is_sparse: bool = False
    """Whether queries choose among these, by an index; then each is made of two stretches, its own and the
    one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Shape:
    architecture: str
    layers: tuple[V4Layer, ...]
    window: int
    head_dim: int
    index_head_dim: int

    @classmethod
    def of(cls, hf: "PretrainedConfig") -> Self:
        return cls(
            architecture=architecture_of(hf),
            layers=tuple(
                V4Layer(ratio=int(hf.compress_rates.get(kind, 0)), is_sparse=kind == SPARSE)
                for kind in hf.layer_types
            ),
            window=hf.sliding_window,
            head_dim=hf.head_dim,
            index_head_dim=hf.index_head_dim,
        )

    @property
    def stretches(self) -> int:
        """Tokens after which all kinds of stretches end together."""
        return lcm(*(layer.ratio for layer in self.layers if layer.ratio))

    @property
    def num_rewound(self) -> int:
        """Tokens of the longest stretch that overlaps the next."""
        return max((layer.ratio for layer in self.layers if layer.is_sparse), default=0)

    def layout(
        self,
        *,
        block_size: int,
        dtype: RowDtype,
        num_dropped_layers: int = 0,
        num_draft_tokens: int = 0,
    ) -> ModelLayout:
        """A sequence can go on from before so many tokens as there are drafts, and from no further back.

        Raises ValueError, for the operator to read, if blocks do not end where stretches do, or fewer layers
        could be dropped.
        """
        if block_size % self.stretches:
            raise ValueError(
                f"--block-size {block_size} must be a multiple of {self.stretches} for {self.architecture}"
            )
        num_stored = len(self.layers) - num_dropped_layers
        if num_stored < 0:
            raise ValueError(
                f"cannot leave {num_dropped_layers} of {len(self.layers)} sliding layers unstored"
            )
        rule = self._windows(block_size, num_dropped_layers).rule
        return ModelLayout.of(
            (
                LayerLayout(
                    blocks=self._paged(layer, block_size, dtype),
                    slots=(
                        self._window(self._ring_rows(num_draft_tokens), dtype),
                        *self._making(layer, num_draft_tokens),
                    ),
                    segments=(self._window(self.segment_rows(block_size), dtype),) if i < num_stored else (),
                )
                for i, layer in enumerate(self.layers)
            ),
            block_size=block_size,
            rule=replace(rule, num_rewound=self.num_rewound),
        )

    def segment_rows(self, block_size: int) -> int:
        """A block's last rows that a window needs, and so many before them as are computed again: each of a
        boundary's segments reaches back to where the first row that is computed looks."""
        return self._windows(block_size).segment_rows + self.num_rewound

    def _windows(self, block_size: int, num_dropped_layers: int = 0) -> StateLayout:
        """As other models have them: what a boundary needs for a window."""
        return StateLayout(
            num_layers=len(self.layers),
            num_dropped=num_dropped_layers,
            window=self.window,
            num_kv_heads=1,
            head_dim=self.head_dim,
            block_size=block_size,
        )

    def _ring_rows(self, num_draft_tokens: int) -> int:
        """What a segment needs of a boundary behind the first row of a step is there, although rows of drafts
        that were wrong have taken the place of older ones."""
        spare = max(SPARE_ROWS, self.num_rewound - 2 + num_draft_tokens)
        return self.window + spare

    def _window(self, num_rows: int, dtype: RowDtype) -> Part:
        return _rows(WINDOW, num_rows, self.head_dim, dtype)

    def _paged(self, layer: V4Layer, block_size: int, dtype: RowDtype) -> tuple[Part, ...]:
        if not layer.ratio:
            return ()
        num_rows = block_size // layer.ratio
        compressed = _rows(COMPRESSED, num_rows, self.head_dim, dtype)
        index = _rows(INDEX, num_rows, self.index_head_dim, dtype)
        return (compressed, index) if layer.is_sparse else (compressed,)

    def _making(self, layer: V4Layer, num_draft_tokens: int) -> tuple[Part, ...]:
        """Values and gates. Where stretches overlap a token gives to the row of its own and of the next."""
        if not layer.ratio:
            return ()
        times = 1 + layer.is_sparse
        num_rows = times * layer.ratio + num_draft_tokens
        making, index = (
            Part(name=name, shape=(num_rows, 2, times * size), dtype="float32")
            for name, size in ((MAKING, self.head_dim), (INDEX_MAKING, self.index_head_dim))
        )
        return (making, index) if layer.is_sparse else (making,)


def _rows(name: str, count: int, num_values: int, dtype: RowDtype) -> Part:
    if dtype == "float8":
        return Part(name=name, shape=(count, num_values + num_values // FLOAT8_SCALED_VALUES), dtype="uint8")
    kept: PartDtype = dtype
    return Part(name=name, shape=(count, num_values), dtype=kept)
