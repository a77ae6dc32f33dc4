"""What a sequence of a model takes, as its config.json tells: in blocks, in a state slot, in segments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.actors.engine.model_layout import model_layout
from shoal.actors.engine.models.choose import model_config
from shoal.actors.engine.models.decoder_config import DecoderConfig, architecture_of
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import RowDtype, StateLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VALUE_BYTES: dict[RowDtype, int] = {"float32": 4, "bfloat16": 2, "float8": 1}
FLOAT8_SCALED_VALUES = 32
"""Share a scale of one byte (Open Compute Project, microscaling formats): 512 values are 528 bytes."""

DEEPSEEK_V4 = "deepseek_v4"
V4_SPARSE, V4_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
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
    def stored_bytes(self) -> int:
        """Of a sequence: what its state at a boundary takes elsewhere."""
        return self.num_stored * self.bytes_per_layer

    @property
    def bytes_per_segment(self) -> int:
        return self.num_stored * self.segment_rows * self.bytes_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    architecture: str
    dtype: RowDtype
    paged: tuple[PagedRows, ...]
    rings: RingRows | None = None
    other_state_bytes: int = 0
    """Of a slot, beside rings: rolling state that is never stored."""
    rule: BoundaryRule
    is_served: bool = True

    @property
    def bytes_per_block(self) -> int:
        return sum(rows.bytes_per_block for rows in self.paged)

    @property
    def bytes_per_slot(self) -> int:
        rings = self.rings.num_layers * self.rings.bytes_per_layer if self.rings else 0
        return rings + self.other_state_bytes


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
    return _attention(hf, limits, (None,) * hf.num_hidden_layers, *_library_heads(hf))


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
    windows: tuple[int | None, ...],
    num_kv_heads: int,
    head_dim: int,
) -> Footprint:
    dtype = limits.dtype or "float32"
    if dtype == "float8":
        raise ValueError(f"--kv-cache-dtype float8: {architecture_of(hf)} keeps float32 or bfloat16")
    if limits.block_size % 16:
        raise ValueError(f"--block-size {limits.block_size} must be a multiple of 16, as engines ask")
    layout = model_layout(
        windows,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=limits.block_size,
        dtype=dtype,
        max_model_len=limits.max_model_len,
        num_dropped_layers=limits.num_dropped_layers,
        num_draft_tokens=limits.num_draft_tokens,
    )
    layout.check_drafts(limits.num_draft_tokens)
    blocks, state = layout.blocks, layout.state
    rows = PagedRows(
        what="full attention",
        num_layers=blocks.num_layers,
        rows_per_block=blocks.block_size,
        bytes_per_row=2 * num_kv_heads * head_dim * _VALUE_BYTES[dtype],
    )
    return Footprint(
        architecture=architecture_of(hf),
        dtype=dtype,
        paged=(rows,) if rows.num_layers else (),
        rings=_rings(state) if state else None,
        rule=layout.rule,
    )


def _rings(state: StateLayout) -> RingRows:
    return RingRows(
        num_layers=state.num_layers,
        num_stored=state.num_stored,
        window=state.window,
        num_rows=state.ring_rows,
        bytes_per_row=state.bytes_per_row,
        segment_rows=state.segment_rows,
    )


def _deepseek_v4(hf: Any, limits: Limits) -> Footprint:
    """Every layer has a window of rows, keys and values alike; by its type, compressed rows too."""
    dtype = limits.dtype or "float8"
    rings, rule = _v4_rings(hf, limits, dtype)
    return Footprint(
        architecture=architecture_of(hf),
        dtype=dtype,
        paged=tuple(rows for rows in _v4_paged(hf, limits.block_size, dtype) if rows.num_layers),
        rings=rings,
        other_state_bytes=_v4_compression_bytes(hf),
        rule=rule,
        is_served=False,
    )


def _v4_paged(hf: Any, block_size: int, dtype: RowDtype) -> Iterator[PagedRows]:
    """A compressed row stands for `ratio` tokens; layers that choose among theirs have as many index rows."""
    row, index_row = _row_bytes(hf.head_dim, dtype), _row_bytes(hf.index_head_dim, dtype)
    for kind, what, bytes_per_row in (
        (V4_SPARSE, "compressed, sparse", row),
        (V4_SPARSE, "index of these", index_row),
        (V4_HEAVY, "compressed, heavily", row),
    ):
        ratio = hf.compress_rates[kind]
        if block_size % ratio:
            raise ValueError(
                f"--block-size {block_size} must be a multiple of {ratio} for {architecture_of(hf)}"
            )
        yield PagedRows(
            what=what,
            num_layers=hf.layer_types.count(kind),
            rows_per_block=block_size // ratio,
            bytes_per_row=bytes_per_row,
        )


def _v4_compression_bytes(hf: Any) -> int:
    """Keys and gates, in float32, of the tokens of which the next compressed row will be made.

    Rows of sparse layers and of their index overlap: they are made of two stretches, and half of each value
    is for the one after. (transformers' `DeepseekV4CSACompressor` and `DeepseekV4HCACompressor`.)
    """
    sparse = 2 * hf.compress_rates[V4_SPARSE] * 2 * (hf.head_dim + hf.index_head_dim)
    heavy = hf.compress_rates[V4_HEAVY] * hf.head_dim
    num_values = hf.layer_types.count(V4_SPARSE) * sparse + hf.layer_types.count(V4_HEAVY) * heavy
    return 2 * int(num_values) * _VALUE_BYTES["float32"]


def _v4_rings(hf: Any, limits: Limits, dtype: RowDtype) -> tuple[RingRows, BoundaryRule]:
    num_layers, window, block_size = hf.num_hidden_layers, hf.sliding_window, limits.block_size
    num_rows = window + V4_SPARE_ROWS
    num_stored = num_layers - limits.num_dropped_layers
    if num_stored < 0:
        raise ValueError(f"cannot leave {limits.num_dropped_layers} of {num_layers} sliding layers unstored")
    rings = RingRows(
        num_layers=num_layers,
        num_stored=num_stored,
        window=window,
        num_rows=num_rows,
        bytes_per_row=_row_bytes(hf.head_dim, dtype),
        segment_rows=min(block_size, num_rows),
    )
    rule = BoundaryRule(
        num_segments=-(-num_rows // block_size) if num_stored else 0,
        num_recomputed=-(-limits.num_dropped_layers * (window - 1) // block_size),
    )
    return rings, rule


def _row_bytes(num_values: int, dtype: RowDtype) -> int:
    scales = num_values // FLOAT8_SCALED_VALUES if dtype == "float8" else 0
    return num_values * _VALUE_BYTES[dtype] + scales
