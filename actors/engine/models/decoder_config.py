"""The shape of a decoder that the lean path can run, read from a checkpoint's config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shoal.actors.engine.model_layout import ModelLayout, model_layout
from shoal.kvstore.layout import KVDtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from shoal.kernels.backend import Gate

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles depend on the position alone."""
DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")
"""Rope types whose angles depend on how long a sequence may become: see rope.py."""
LAYER_TYPES = ("full_attention", "sliding_attention")


class UnsupportedModel(ValueError):
    """The checkpoint cannot be served; the message says what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    family: str
    """The type of its config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Of each layer: how many positions a token sees, its own the last; None is all."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Queries and keys are normed, each head by itself, before they are rotated."""
    attention_scale: float
    """Scores are multiplied by it."""
    sinks: bool = False
    """Each query head has a logit that takes its share of the softmax and has no value."""
    gate: "Gate" = "silu"
    num_experts: int = 0
    """0: one MLP for all tokens."""
    experts_per_token: int = 0
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    branch_norms: bool = False
    """What attention and the MLP make of a token is normed before it is added."""
    embedding_scale: float = 1.0

    def layout(
        self,
        *,
        block_size: int,
        dtype: KVDtype,
        max_model_len: int,
        num_dropped_layers: int = 0,
        num_draft_tokens: int = 0,
    ) -> ModelLayout:
        return model_layout(
            self.windows,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            max_model_len=max_model_len,
            num_dropped_layers=num_dropped_layers,
            num_draft_tokens=num_draft_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """How far pairs of a head turn from one position to the next, and what scales cosines and sines."""

    inverse: tuple[float, ...]
    """Radians a position; each is a float32."""
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanModel:
    """All that the lean decoder needs of a config.json: who has it need not import transformers, which takes
    seconds."""

    config: DecoderConfig
    ropes: tuple[RopeFrequencies, ...]
    """Of each layer."""
    numerics: str
    """See models.choose.numerics."""


class _Options(TypedDict, total=False):
    windows: tuple[int | None, ...]
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    head_norms: bool
    attention_scale: float
    sinks: bool
    gate: "Gate"
    num_experts: int
    experts_per_token: int
    norm_offset: float
    branch_norms: bool
    embedding_scale: float


_GATES: dict[str, "Gate"] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By the name that config.json has for the activation."""


def _llama(hf: "PretrainedConfig") -> _Options:
    return {**_attention_biases(hf), "mlp_bias": hf.mlp_bias}


def _mistral(hf: "PretrainedConfig") -> _Options:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers}


def _qwen2(hf: "PretrainedConfig") -> _Options:
    return {"windows": _windows_by_layer(hf), "qkv_bias": True}


def _qwen3(hf: "PretrainedConfig") -> _Options:
    return {**_attention_biases(hf), "windows": _windows_by_layer(hf), "head_norms": True}


def _gemma3(hf: "PretrainedConfig") -> _Options:
    softcaps = ("attn_logit_softcapping", "final_logit_softcapping")
    _refuse({name: getattr(hf, name) is not None for name in softcaps})
    _refuse({"use_bidirectional_attention": bool(hf.use_bidirectional_attention)})
    return {
        **_attention_biases(hf),
        "windows": _windows_by_layer(hf),
        "head_norms": True,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "norm_offset": 1.0,
        "branch_norms": True,
        # transformers rounds it to the type that it computes in; ours is float32, wherever it is multiplied.
        "embedding_scale": hf.hidden_size**0.5,
    }


def _gpt_oss(hf: "PretrainedConfig") -> _Options:
    alpha, limit = hf.swiglu_alpha, hf.swiglu_limit
    _refuse({f"swiglu_alpha {alpha}": alpha != 1.702, f"swiglu_limit {limit}": limit != 7})
    experts, top = hf.num_local_experts, hf.num_experts_per_tok
    _refuse({f"num_experts_per_tok {top} of {experts}": not 0 < top <= experts})
    return {
        **_attention_biases(hf),
        "windows": _windows_by_layer(hf),
        "sinks": True,
        "gate": "clamped_swiglu",
        "num_experts": experts,
        "experts_per_token": top,
    }


def _attention_biases(hf: "PretrainedConfig") -> _Options:
    """Where one flag says it of all four projections."""
    return {"qkv_bias": hf.attention_bias, "attention_out_bias": hf.attention_bias}


def _refuse(wrong: dict[str, bool]) -> None:
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedModel(what)


def _windows_by_layer(hf: "PretrainedConfig") -> tuple[int | None, ...]:
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types)


LEAN_ARCHITECTURES: dict[str, tuple[str, Callable[["PretrainedConfig"], _Options]]] = {
    "LlamaForCausalLM": ("llama", _llama),
    "MistralForCausalLM": ("mistral", _mistral),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "Gemma3ForCausalLM": ("gemma3_text", _gemma3),
    "GptOssForCausalLM": ("gpt_oss", _gpt_oss),
}
"""The type of each one's config, and what it differs in from a llama without biases."""


def load_config(checkpoint: Path) -> "PretrainedConfig":
    """config.json as transformers understands it: every older spelling of a field already translated."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    try:
        # Said aloud, or it would ask the terminal whether a checkpoint's own code may run.
        hf: PretrainedConfig = AutoConfig.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a config's class, or its validation, makes of a strange value
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModel(f"{checkpoint}: transformers cannot read its config.json: {reason}") from error
    return hf


def decoder_config(hf: "PretrainedConfig") -> DecoderConfig:
    """Refuse what the lean decoder would compute wrongly, by name; never guess."""
    architecture = architecture_of(hf)
    if architecture not in LEAN_ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture}")
    model_type, options_of = LEAN_ARCHITECTURES[architecture]
    if hf.model_type != model_type:  # then it means by its fields what that type means by them
        raise UnsupportedModel(f"architecture {architecture} with model_type {hf.model_type}")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    activation = getattr(hf, "hidden_activation", None) or hf.hidden_act
    kinds, layer_kinds = rope_types(hf), set(getattr(hf, "layer_types", None) or ())
    refuse_quantized(hf)
    _refuse(
        {
            f"hidden_act {activation}": activation not in _GATES,
            f"head_dim {head_dim}": head_dim % 16 != 0,
            f"rope_type {', '.join(kinds)}": not set(kinds) <= {*STATIC_ROPE_TYPES, *DYNAMIC_ROPE_TYPES},
            "partial_rotary_factor": any(
                rope.get("partial_rotary_factor", 1) != 1 for rope in ropes(hf).values()
            ),
            f"layer_types {', '.join(sorted(layer_kinds))}": not layer_kinds <= set(LAYER_TYPES),
        }
    )
    options: _Options = {
        "windows": (None,) * hf.num_hidden_layers,
        "attention_scale": head_dim**-0.5,
        "gate": _GATES[activation],
    }
    options.update(options_of(hf))
    if 0 in options["windows"]:
        raise UnsupportedModel("sliding_window 0")
    return DecoderConfig(
        family=model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        **options,
    )


def architecture_of(hf: "PretrainedConfig") -> str:
    return (hf.architectures or ["(none named)"])[0]


def refuse_quantized(hf: "PretrainedConfig") -> None:
    if (how := getattr(hf, "quantization_config", None)) is not None:
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
        raise UnsupportedModel(f"quantization_config ({getattr(method, 'value', method)})")


def ropes(hf: "PretrainedConfig") -> dict[str | None, dict[str, Any]]:
    """Parameters by type of layer if those differ; else one set, of None."""
    rope = getattr(hf, "rope_parameters", None) or {}
    by_layer = {kind: of_kind for kind, of_kind in rope.items() if isinstance(of_kind, dict)}
    return by_layer or {None: rope}


def rope_types(hf: "PretrainedConfig") -> tuple[str, ...]:
    """Usually one."""
    return tuple(sorted({str(rope.get("rope_type", "default")) for rope in ropes(hf).values()}))


def usual_length(hf: "PretrainedConfig") -> int:
    """How many positions a sequence may have if nobody says otherwise."""
    if not (length := getattr(hf, "max_position_embeddings", None)):
        raise UnsupportedModel(
            "config.json does not say how long a sequence may be (max_position_embeddings)"
        )
    return int(length)


def longest_length(hf: "PretrainedConfig") -> int:
    """How many it may have at most: some ropes were made to be stretched."""
    usual, kinds, rope = usual_length(hf), rope_types(hf), ropes(hf).get(None)
    if rope is None or kinds not in (("dynamic",), ("yarn",)):
        return usual
    original = usual if kinds == ("dynamic",) else rope.get("original_max_position_embeddings", usual)
    return max(usual, int(original * rope["factor"]))
