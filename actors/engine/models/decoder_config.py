"""The shape of a decoder that the lean path can run, read from a checkpoint's config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles depend on the position alone, never on how long the sequence has become."""


class UnsupportedModel(ValueError):
    """The checkpoint cannot be served; the message says what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int


def load_config(checkpoint: Path) -> "PretrainedConfig":
    """config.json as transformers understands it: every older spelling of a field already translated."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    return config


def decoder_config(hf: "PretrainedConfig") -> DecoderConfig:
    """Refuse what the lean decoder would compute wrongly; never guess."""
    architectures = hf.architectures or ["(none named)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architectures[0]} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    for what, wrong in {
        f"hidden_act {hf.hidden_act} (supported: silu)": hf.hidden_act != "silu",
        "attention_bias": getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        f"head_dim {head_dim} (must be a multiple of 16)": head_dim % 16 != 0,
        f"rope_type {rope_type(hf)} (supported: {', '.join(STATIC_ROPE_TYPES)})": rope_type(hf)
        not in STATIC_ROPE_TYPES,
        "quantization_config": getattr(hf, "quantization_config", None) is not None,
    }.items():
        if wrong:
            raise UnsupportedModel(f"this {architectures[0]} checkpoint uses {what}, which is not supported")
    return DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        max_position_embeddings=hf.max_position_embeddings,
    )


def rope_type(hf: "PretrainedConfig") -> str:
    return str((getattr(hf, "rope_parameters", None) or {}).get("rope_type", "default"))
