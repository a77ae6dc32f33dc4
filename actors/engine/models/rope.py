"""Cosines and sines of every position, with the same bits on every machine."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.actors.engine.models.decoder_config import ropes
from shoal.kernels.backend import Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rotary_tables(
    hf: "PretrainedConfig", num_positions: int, head_dim: int, device: torch.device
) -> tuple[Rotary, ...]:
    """Of each layer, tables of float32 [num_positions, rotated / 2], where `rotated` is head_dim unless the
    model says less. Layers that rotate alike share theirs.

    An angle is one float32 product, as in the checkpoint's own training code. Its cosine is taken in float64
    and rounded: a vectorised float32 cosine differs in the last bit from one instruction set to another.

    Types default, linear, llama3 and yarn have fixed frequencies. The others choose them by length: dynamic
    stretches them once a sequence is longer than was trained, longrope has two sets, for sequences up to the
    trained length and beyond. transformers looks at the longest position of the batch at hand, so that a row
    depends on its neighbours, and keys that were rotated before the change keep their old angles. Here a
    server has one set, that of a sequence of `num_positions`, which is max_model_len: a cached key is right
    for whoever meets it. It is what transformers computes for a sequence of that length in one call
    (dynamic), for any sequence longer than was trained (longrope), and for every sequence if max_model_len is
    at most the trained length (both). Beyond it shorter sequences too have the frequencies of longer ones:
    who wants the original ones for them sets --max-model-len to the trained length.
    """
    tables = {kind: _table(hf, kind, num_positions, head_dim, device) for kind in ropes(hf)}
    num_layers: int = hf.num_hidden_layers
    layer_types = [None] * num_layers if None in tables else hf.layer_types
    return tuple(tables[kind] for kind in layer_types)


def _table(
    hf: "PretrainedConfig", layer_type: str | None, num_positions: int, head_dim: int, device: torch.device
) -> Rotary:
    inverse_frequencies, factor = _inverse_frequencies(hf, layer_type, num_positions, head_dim)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.multiply.outer(positions, inverse_frequencies).astype(np.float64)
    return Rotary(
        cos=torch.from_numpy((np.cos(angles) * factor).astype(np.float32)).to(device),
        sin=torch.from_numpy((np.sin(angles) * factor).astype(np.float32)).to(device),
    )


def _inverse_frequencies(
    hf: "PretrainedConfig", layer_type: str | None, num_positions: int, head_dim: int
) -> tuple[np.ndarray, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    rope = ropes(hf)[layer_type]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return (1.0 / (rope["rope_theta"] ** exponents)).numpy(), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        hf, torch.device("cpu"), seq_len=num_positions, layer_type=layer_type
    )
    return frequencies.float().numpy(), float(factor)
