"""What a sequence of a model takes, as its config.json tells: in blocks, in a state slot, in segments."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from shoal.actors.engine.model_layout import KV, RING, LayerLayout, ModelLayout, model_layout
from shoal.actors.engine.models.choose import model_config
from shoal.actors.engine.models.decoder_config import DecoderConfig, architecture_of
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import Part, RowDtype, StateLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VALUE_BYTES: dict[RowDtype, int] = {"float32": 4, "bfloat16": 2, "float8": 1}
FLOAT8_SCALED_VALUES = 32
"""Share a scale of one byte (Open Compute Project, microscaling formats): 512 values are 528 bytes."""

DEEPSEEK_V4 = "deepseek_v4"
V4_SPARSE, V4_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
V4_RING = "window"
V4_SPARE_ROWS = 6
"""Of a ring of DeepSeek V4, beyond its window: what one decode step with drafts writes, and from which the
compression state is computed again. Its segments have them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """What some layers keep of all positions, in blocks."""

    what: str
    num_layers: int
    rows_per_block: int
    bytes_per_row: int

    @classmethod
    def of(cls, part: Part, num_layers: int) -> Self:
        is_kv = part.name == KV
        num_rows = part.shape[1 if is_kv else 0]
        return cls(
            what="full attention" if is_kv else part.name,
            num_layers=num_layers,
            rows_per_block=num_rows,
            bytes_per_row=part.num_bytes // num_rows,
        )

    @property
    def bytes_per_block(self) -> int:
        return self.num_layers * self.rows_per_block * self.bytes_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRows:
    """What some layers keep of the last positions, in a state slot."""

    num_layers: int
    num_stored: int
    """Beside these there are some that are recomputed: the last ones."""
    window: int
    num_rows: int
    bytes_per_row: int
    segment_rows: int
    """Of a layer, in the segment of a block."""

    @property
    def bytes_per_layer(self) -> int:
        return self.num_rows * self.bytes_per_row

    @property
    def num_bytes(self) -> int:
        """Of a slot."""
        return self.num_layers * self.bytes_per_layer

    @property
    def stored_bytes(self) -> int:
        """Of a sequence: what its state at a boundary takes elsewhere."""
        return self.num_stored * self.bytes_per_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    architecture: str
    dtype: RowDtype
    rings: RingRows | None = None
    layout: ModelLayout
    """As pools have it."""
    is_served: bool = True

    @property
    def paged(self) -> tuple[PagedRows, ...]:
        kinds = Counter(placed.part for placed in self.layout.blocks.parts)
        return tuple(PagedRows.of(part, num_layers) for part, num_layers in kinds.items())

    @property
    def states(self) -> tuple[tuple[Part, int], ...]:
        """What slots have beside rings, and of how many layers."""
        kinds = Counter(placed.part for placed in self.layout.slots.parts)
        return tuple((part, count) for part, count in kinds.items() if part.name not in (RING, V4_RING))

    @property
    def other_state_bytes(self) -> int:
        """Of a slot, beside rings."""
        return self.layout.slots.num_bytes - (self.rings.num_bytes if self.rings else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_model_len: int
    max_num_seqs: int = 64
    block_size: int = 128
    dtype: RowDtype | None = None
    """None is what would be served: float32, or the model's own where there is no choice."""
    num_dropped_layers: int = 0
    num_draft_tokens: int = 0


def check_architecture(hf: "PretrainedConfig") -> None:
    """Raises ValueError (UnsupportedModel) for a model that has no footprint, whatever the limits."""
    if hf.model_type != DEEPSEEK_V4:
        model_config(hf)


def footprint(hf: "PretrainedConfig", limits: Limits) -> Footprint:
    """Raises ValueError (UnsupportedModel) with a line for the operator."""
    if hf.model_type == DEEPSEEK_V4:
        return _deepseek_v4(hf, limits)
    config = model_config(hf)
    if isinstance(config, DecoderConfig):
        return _attention(hf, limits, config.windows, config.num_kv_heads, config.head_dim)
    return _attention(hf, limits, config.layers or (None,) * hf.num_hidden_layers, *_library_heads(hf))


def _library_heads(hf: Any) -> tuple[int, int]:
    """The library path keeps what attention is given: of latent attention, the heads that are made of it."""
    if getattr(hf, "kv_lora_rank", None):
        num_heads = hf.num_attention_heads
        head_dim = max(hf.qk_nope_head_dim + hf.qk_rope_head_dim, hf.v_head_dim)
    else:
        num_heads = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return num_heads, -(-head_dim // 16) * 16


def _attention(
    hf: "PretrainedConfig",
    limits: Limits,
    layers: tuple[int | LayerLayout | None, ...],
    num_kv_heads: int,
    head_dim: int,
) -> Footprint:
    dtype = limits.dtype or "float32"
    if dtype == "float8":
        raise ValueError(f"--kv-cache-dtype float8: {architecture_of(hf)} keeps float32 or bfloat16")
    if limits.block_size % 16:
        raise ValueError(f"--block-size {limits.block_size} must be a multiple of 16, as engines ask")
    layout = model_layout(
        layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=limits.block_size,
        dtype=dtype,
        max_model_len=limits.max_model_len,
        num_dropped_layers=limits.num_dropped_layers,
        num_draft_tokens=limits.num_draft_tokens,
    )
    layout.check_drafts(limits.num_draft_tokens)
    rings = _rings(layout.rings) if layout.rings else None
    return Footprint(architecture=architecture_of(hf), dtype=dtype, rings=rings, layout=layout)


def _rings(state: StateLayout) -> RingRows:
    return RingRows(
        num_layers=state.num_layers,
        num_stored=state.num_stored,
        window=state.window,
        num_rows=state.ring_rows,
        bytes_per_row=2 * state.num_kv_heads * state.head_dim * _VALUE_BYTES[state.dtype],
        segment_rows=state.segment_rows,
    )


def _deepseek_v4(hf: Any, limits: Limits) -> Footprint:
    """Every layer has a window of rows, keys and values alike; by its type, compressed rows too."""
    dtype, block_size = limits.dtype or "float8", limits.block_size
    for ratio in hf.compress_rates.values():
        if block_size % ratio:
            raise ValueError(
                f"--block-size {block_size} must be a multiple of {ratio} for {architecture_of(hf)}"
            )
    rings = _v4_rings(hf, limits, dtype)
    recomputed = limits.num_dropped_layers * (rings.window - 1)
    layout = ModelLayout.of(
        [_v4_layer(hf, i, rings, block_size, dtype) for i in range(rings.num_layers)],
        block_size=block_size,
        rule=BoundaryRule(
            num_segments=-(-rings.num_rows // block_size) if rings.num_stored else 0,
            num_recomputed=-(-recomputed // block_size),
        ),
    )
    return Footprint(
        architecture=architecture_of(hf), dtype=dtype, rings=rings, layout=layout, is_served=False
    )


def _v4_layer(hf: Any, layer: int, rings: RingRows, block_size: int, dtype: RowDtype) -> LayerLayout:
    kind = hf.layer_types[layer]
    num_rows = block_size // int(hf.compress_rates.get(kind, block_size))
    window = partial(_rows, V4_RING, num_values=hf.head_dim, dtype=dtype)
    compressed = partial(_rows, count=num_rows, num_values=hf.head_dim, dtype=dtype)
    index = _rows("index of these", num_rows, hf.index_head_dim, dtype)
    blocks: dict[str, tuple[Part, ...]] = {
        V4_SPARSE: (compressed("compressed, sparse"), index),
        V4_HEAVY: (compressed("compressed, heavily"),),
    }
    return LayerLayout(
        blocks=blocks.get(kind, ()),
        slots=(window(rings.num_rows), *_v4_compression(hf, kind)),
        segments=(window(rings.segment_rows),) if layer < rings.num_stored else (),
    )


def _rows(name: str, count: int, num_values: int, dtype: RowDtype) -> Part:
    return Part(name=name, shape=(count, _row_bytes(num_values, dtype)), dtype="uint8")


def _v4_compression(hf: Any, kind: str) -> tuple[Part, ...]:
    """Keys and gates, in float32, of the tokens of which the next compressed row will be made.

    Rows of sparse layers and of their index overlap: they are made of two stretches, and half of each value
    is for the one after. (transformers' `DeepseekV4CSACompressor` and `DeepseekV4HCACompressor`.)
    """
    ratio = int(hf.compress_rates.get(kind, 0))
    shapes = {
        V4_SPARSE: (2, ratio, 2, 2 * (hf.head_dim + hf.index_head_dim)),
        V4_HEAVY: (1, ratio, 2, hf.head_dim),
    }
    return tuple(Part(name="compression", shape=shapes[k], dtype="float32") for k in shapes if k == kind)


def _v4_rings(hf: Any, limits: Limits, dtype: RowDtype) -> RingRows:
    num_layers, window = hf.num_hidden_layers, hf.sliding_window
    num_rows = window + V4_SPARE_ROWS
    num_stored = num_layers - limits.num_dropped_layers
    if num_stored < 0:
        raise ValueError(f"cannot leave {limits.num_dropped_layers} of {num_layers} sliding layers unstored")
    return RingRows(
        num_layers=num_layers,
        num_stored=num_stored,
        window=window,
        num_rows=num_rows,
        bytes_per_row=_row_bytes(hf.head_dim, dtype),
        segment_rows=min(limits.block_size, num_rows),
    )


def _row_bytes(num_values: int, dtype: RowDtype) -> int:
    scales = num_values // FLOAT8_SCALED_VALUES if dtype == "float8" else 0
    return num_values * _VALUE_BYTES[dtype] + scales
