"""What a sequence of a model takes, as its config.json tells: in blocks, in a state slot, in segments."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shoal.actors.engine.model_layout import KV, RING, LayerLayout, ModelLayout, model_layout
from shoal.actors.engine.models.choose import model_config
from shoal.actors.engine.models.decoder_config import DecoderConfig, architecture_of
from shoal.actors.engine.models.deepseek_v4_layout import DEEPSEEK_V4, WINDOW, V4Shape
from shoal.kvstore.layout import Part, RowDtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RINGS = {RING, WINDOW}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """What some layers keep of all positions, in blocks."""

    what: str
    num_layers: int
    rows_per_block: int
    bytes_per_row: int

    @classmethod
    def of(cls, part: Part, num_layers: int) -> Self:
        num_rows = _num_rows(part)
        return cls(
            what="full attention" if part.name == KV else part.name,
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
    rings: RingRows | None
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
        return tuple((part, count) for part, count in kinds.items() if part.name not in _RINGS)

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
    rings = _rings(layout, layout.rings.window) if layout.rings else None
    return Footprint(architecture=architecture_of(hf), dtype=dtype, rings=rings, layout=layout)


def _deepseek_v4(hf: "PretrainedConfig", limits: Limits) -> Footprint:
    """Quantized, as it is published, it can be planned, and so can rows of 8 bits."""
    shape, is_quantized = V4Shape.of(hf), getattr(hf, "quantization_config", None) is not None
    dtype = limits.dtype or ("float8" if is_quantized else "float32")
    layout = shape.layout(
        block_size=limits.block_size,
        dtype=dtype,
        num_dropped_layers=limits.num_dropped_layers,
        num_draft_tokens=limits.num_draft_tokens,
    )
    return Footprint(
        architecture=shape.architecture,
        dtype=dtype,
        rings=_rings(layout, shape.window),
        layout=layout,
        is_served=dtype != "float8" and not is_quantized,
    )


def _rings(layout: ModelLayout, window: int) -> RingRows:
    rings, saved = (
        [placed.part for placed in packing.parts if placed.part.name in _RINGS]
        for packing in (layout.slots, layout.segments)
    )
    num_rows = _num_rows(rings[0])
    return RingRows(
        num_layers=len(rings),
        num_stored=len(saved),
        window=window,
        num_rows=num_rows,
        bytes_per_row=rings[0].num_bytes // num_rows,
        segment_rows=_num_rows(saved[0]) if saved else 0,
    )


def _num_rows(part: Part) -> int:
    """Behind the first dimension where that is keys and values."""
    return part.shape[1 if part.name in {KV, RING} else 0]
