"""Cosines and sines of every position, with the same bits on every machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.actors.engine.models.decoder_config import RopeFrequencies, ropes
from shoal.kernels.backend import Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rotary_tables(
    frequencies: Sequence[RopeFrequencies], num_positions: int, device: torch.device
) -> tuple[Rotary, ...]:
    """Of each layer, tables of float32 [num_positions, rotated / 2]. Layers that rotate alike share theirs.

    An angle is one float32 product, as in the checkpoint's own training code. Its cosine is taken in float64
    and rounded: a vectorised float32 cosine differs in the last bit from one instruction set to another.
    """
    tables = {rope: _table(rope, num_positions, device) for rope in set(frequencies)}
    return tuple(tables[rope] for rope in frequencies)


def _table(rope: RopeFrequencies, num_positions: int, device: torch.device) -> Rotary:
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.multiply.outer(positions, np.array(rope.inverse, dtype=np.float32)).astype(np.float64)
    return Rotary(
        cos=torch.from_numpy((np.cos(angles) * rope.factor).astype(np.float32)).to(device),
        sin=torch.from_numpy((np.sin(angles) * rope.factor).astype(np.float32)).to(device),
    )


def rope_frequencies(
    hf: "PretrainedConfig", num_positions: int, head_dim: int
) -> tuple[RopeFrequencies, ...]:
    """Of each layer, rotated / 2 of them, where `rotated` is head_dim unless the model says less.

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
    of_type = {
        kind: RopeFrequencies(inverse=tuple(inverse.tolist()), factor=factor)
        for kind in ropes(hf)
        for inverse, factor in [_inverse_frequencies(hf, kind, num_positions, head_dim)]
    }
    num_layers: int = hf.num_hidden_layers
    layer_types = [None] * num_layers if None in of_type else hf.layer_types
    return tuple(of_type[kind] for kind in layer_types)


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
