"""DeepSeek V4 on the library path: what is done to a token by itself is transformers' own, attention ours.

What attention keeps is described in deepseek_v4_layout.py and computed with in kernels/compressed.py. A layer
of `sliding_attention` has a window alone; one of `heavily_compressed_attention` sees all its compressed rows
beside it; one of `compressed_sparse_attention` makes each of two stretches that overlap, and chooses among
them by an index, rows that are compressed in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.actors.engine.models.deepseek_v4_layout import (
    COMPRESSED,
    INDEX,
    INDEX_MAKING,
    MAKING,
    WINDOW,
)
from shoal.kernels.backend import LayerMemory, LayerParts, Rows
from shoal.kernels.compressed import (
    Index,
    LayerCompressed,
    LayerKept,
    LayerWindow,
    Queries,
    Span,
    attend,
    capture,
    commit,
    compress,
    new_rows,
    restore,
    spans_of,
)

_ATTENTION = "DeepseekV4Attention"


@dataclass(frozen=True, slots=True, eq=False)
class V4Tokens:
    """What a layer's attention is given of the rows of a step."""

    hidden_1TN: Tensor
    position_1T: Tensor
    angles: Mapping[str, tuple[Tensor, Tensor]]
    """Cosines and sines of both ropes."""


class V4Steps(Protocol):
    """What attention computes with at the moment."""

    def attend_v4(self, theirs: Any, tokens: V4Tokens) -> Tensor:
        """[1, T, N]. theirs: transformers' DeepseekV4Attention, which would make it of one sequence."""
        ...


class Now(Protocol):
    def __call__(self) -> V4Steps: ...


def swap_attention(layers: nn.Module, now: Now) -> None:
    """Have every attention of DeepSeek V4 compute what the step says. Its modules stay."""
    for module in layers.modules():
        if type(module).__name__ == _ATTENTION:
            module.forward = partial(_forward, now, module)


def _forward(
    now: Now,
    theirs: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: Mapping[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    return now().attend_v4(theirs, V4Tokens(hidden_states, position_ids, position_embeddings)), None


@dataclass(frozen=True)
class V4Step:
    """Attention of a step's rows, over what their sequences keep, and into it."""

    rows: Rows
    kv: tuple[LayerMemory, ...]

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return spans_of(self.rows)

    def attend_v4(self, theirs: Any, tokens: V4Tokens) -> Tensor:
        kept, spans = _kept(theirs, self.kv[theirs.layer_idx]), self._spans
        cos, sin = tokens.angles[theirs.rope_layer_type]
        size = *tokens.hidden_1TN.shape[:2], -1
        q_latent = theirs.q_a_norm(theirs.q_a_proj(tokens.hidden_1TN))
        q_1THD = theirs.q_b_norm(theirs.q_b_proj(q_latent).view(*size, theirs.head_dim))
        own_1T1D = theirs.kv_norm(theirs.kv_proj(tokens.hidden_1TN)).unsqueeze(2)
        own_TD = _rotated(own_1T1D, cos, sin)[0, :, 0].to(kept.window.slots_SRD.dtype)
        queries = Queries(
            q_THD=_rotated(q_1THD, cos, sin)[0],
            scale=theirs.scaling,
            window=theirs.sliding_window,
            sinks_H=theirs.sinks,
            index=None if kept.index is None else _index(theirs.compressor.indexer, q_latent, tokens),
        )
        restore(kept.window, self.rows)
        if kept.compressed is not None:
            self._compress(theirs.compressor, tokens, kept.compressed)
        if kept.index is not None:
            self._compress(theirs.compressor.indexer, tokens, kept.index)
        out_THD = attend(queries, own_TD, kept, spans)
        capture(kept.window, own_TD, self.rows, spans)
        commit(kept.window.slots_SRD, own_TD, spans)
        out_1THD = _rotated(out_THD[None], cos, -sin)  # values are keys, and so were rotated too
        mixed: Tensor = theirs.o_a_proj(out_1THD.reshape(*size[:2], theirs.config.o_groups, -1))
        out_1TN: Tensor = theirs.o_b_proj(mixed.flatten(2))
        return out_1TN

    def _compress(self, compressor: Any, tokens: V4Tokens, rows: LayerCompressed) -> None:
        """compressor: transformers' of the attention, or of its indexer."""
        hidden, spans = tokens.hidden_1TN, self._spans
        own_T2M = torch.stack([compressor.kv_proj(hidden)[0], compressor.gate_proj(hidden)[0]], dim=1)
        if (new := new_rows(rows, own_T2M, spans)) is not None:
            row_WX = compress(new.making_WK2M, compressor.position_bias, overlaps=rows.overlaps)
            row_1W1X = compressor.kv_norm(row_WX)[None, :, None]
            cos, sin = compressor.rotary_emb(
                row_1W1X, new.position_W[None], layer_type=compressor.rope_layer_type
            )
            row_WX = _rotated(row_1W1X, cos, sin)[0, :, 0]
            rows.rows_PBX[new.block_W, new.offset_W] = row_WX.to(rows.rows_PBX.dtype)
        commit(rows.making_SR2M, own_T2M, spans)


def _kept(theirs: Any, memory: LayerMemory) -> LayerKept:
    assert isinstance(memory, LayerParts), "an attention of DeepSeek V4 without its parts"
    blocks, slots, segments = memory.blocks, memory.slots, memory.segments
    window = LayerWindow(slots_SRD=slots[WINDOW], segments_KCD=segments.get(WINDOW))
    compressor = theirs.compressor
    if compressor is None:
        return LayerKept(window=window)
    is_sparse, ratio = INDEX in blocks, compressor.compress_rate

    def rows(name: str, making: str) -> LayerCompressed:
        return LayerCompressed(
            ratio=ratio, overlaps=is_sparse, rows_PBX=blocks[name], making_SR2M=slots[making]
        )

    return LayerKept(
        window=window,
        compressed=rows(COMPRESSED, MAKING),
        index=rows(INDEX, INDEX_MAKING) if is_sparse else None,
    )


def _index(indexer: Any, q_latent: Tensor, tokens: V4Tokens) -> Index:
    hidden, scorer = tokens.hidden_1TN, indexer.scorer
    cos, sin = indexer.rotary_emb(hidden, tokens.position_1T, layer_type=indexer.rope_layer_type)
    q_1THI = indexer.q_b_proj(q_latent).view(*hidden.shape[:2], -1, indexer.head_dim)
    return Index(
        q_THI=_rotated(q_1THI, cos, sin)[0],
        weight_TH=scorer.weights_proj(hidden)[0] * (scorer.weights_scaling * scorer.softmax_scale),
        top=indexer.index_topk,
    )


def _rotated(x_1THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs  # noqa: PLC0415

    rotated: Tensor = theirs.apply_rotary_pos_emb(x_1THD, cos, sin, unsqueeze_dim=2)
    return rotated
