"""Which path computes a checkpoint: the lean decoder if it can, else transformers' own modeling."""

from typing import TYPE_CHECKING

from shoal.actors.engine.models.decoder_config import (
    DYNAMIC_ROPE_TYPES,
    LEAN_ARCHITECTURES,
    DecoderConfig,
    LeanModel,
    UnsupportedModel,
    decoder_config,
    rope_types,
)
from shoal.actors.engine.models.library_config import LibraryConfig, library_config
from shoal.actors.engine.models.rope import rope_frequencies
from shoal.kernels.reference import torch_numerics

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROVEN_IN_LIBRARY = (
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "NemotronHForCausalLM",
    "Olmo2ForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Those whose logits the oracle tests compare; others prove themselves when they are loaded."""


def model_config(hf: "PretrainedConfig") -> DecoderConfig | LibraryConfig:
    """Raises UnsupportedModel, with what is supported, if neither can."""
    try:
        return decoder_config(hf)
    except UnsupportedModel:
        pass
    try:
        return library_config(hf)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{error} is not supported; supported: {', '.join(LEAN_ARCHITECTURES)} exactly, and within a "
            "tolerance other text decoders of transformers: "
            f"{', '.join(PROVEN_IN_LIBRARY)} and more"
        ) from error


def lean_model(hf: "PretrainedConfig", max_model_len: int) -> LeanModel | None:
    """What the lean decoder needs, or None if a checkpoint takes the library path."""
    config = model_config(hf)
    if isinstance(config, LibraryConfig):
        return None
    ropes = rope_frequencies(hf, max_model_len, config.head_dim)
    return LeanModel(config=config, ropes=ropes, numerics=numerics(hf, max_model_len))


def numerics(hf: "PretrainedConfig", max_model_len: int) -> str:
    """What a model's keys and values depend on beside its weights, its tokens and the kernels.

    Part of a fingerprint: what two paths compute, or two lengths of a dynamic rope, is never taken for the
    same.
    """
    if isinstance(model_config(hf), DecoderConfig):
        path = "lean decoder"
    else:
        from transformers import __version__  # noqa: PLC0415

        path = f"library path of transformers {__version__}, {torch_numerics()}"
    if set(rope_types(hf)) & set(DYNAMIC_ROPE_TYPES):
        path += f", rope for {max_model_len} positions"
    return path
