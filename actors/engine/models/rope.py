"""Cosines and sines of every position, with the same bits on every machine."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.actors.engine.models.decoder_config import RopeFrequencies, rope_types
from shoal.kernels.backend import Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rotary_tables(rope: RopeFrequencies, num_positions: int, device: torch.device) -> Rotary:
    """Tables of float32 [num_positions, rotated / 2].

    An angle is one float32 product, as in the checkpoint's own training code. Its cosine is taken in float64
    and rounded: a vectorised float32 cosine differs in the last bit from one instruction set to another.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.multiply.outer(positions, np.array(rope.inverse, dtype=np.float32)).astype(np.float64)
    return Rotary(
        cos=torch.from_numpy((np.cos(angles) * rope.factor).astype(np.float32)).to(device),
        sin=torch.from_numpy((np.sin(angles) * rope.factor).astype(np.float32)).to(device),
    )


def rope_frequencies(hf: "PretrainedConfig", num_positions: int, head_dim: int) -> RopeFrequencies:
    """rotated / 2 of them, where `rotated` is head_dim unless the model says less.

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
    inverse, factor = _inverse_frequencies(hf, num_positions, head_dim)
    return RopeFrequencies(inverse=tuple(inverse.tolist()), factor=factor)


def _inverse_frequencies(
    hf: "PretrainedConfig", num_positions: int, head_dim: int
) -> tuple[np.ndarray, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    (kind,) = rope_types(hf)
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return (1.0 / (hf.rope_parameters["rope_theta"] ** exponents)).numpy(), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=num_positions)
    return frequencies.float().numpy(), float(factor)
