"""Which architectures of transformers with recurrent layers can be served, and what these layers keep.

A recurrent layer keeps whole states: the last inputs of its short convolution, and a matrix of each head.
What is said here of a config.json a model must agree with when it is loaded: see library_decoder.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.actors.engine.model_layout import LayerLayout
from shoal.kvstore.layout import Part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONVOLUTION = "convolution"
"""float32 [kernel size - 1, channels]: the last inputs, oldest first."""
RECURRENT = "recurrent"
"""float32 [heads, key size, value size]."""


def convolution(channels: int, kernel_size: int) -> Part:
    return Part(name=CONVOLUTION, shape=(kernel_size - 1, channels), dtype="float32")


def recurrent(heads: int, key_size: int, value_size: int) -> Part:
    return Part(name=RECURRENT, shape=(heads, key_size, value_size), dtype="float32")


def _gated_delta_net(hf: Any) -> tuple[Part, ...]:
    key_size, heads, value_size = (
        hf.linear_key_head_dim,
        hf.linear_num_value_heads,
        hf.linear_value_head_dim,
    )
    channels = 2 * hf.linear_num_key_heads * key_size + heads * value_size
    return convolution(channels, hf.linear_conv_kernel_dim), recurrent(heads, key_size, value_size)


def _mamba2(heads: int, head_size: int, state_size: int, groups: int, kernel_size: int) -> tuple[Part, ...]:
    channels = heads * head_size + 2 * groups * state_size
    return convolution(channels, kernel_size), recurrent(heads, state_size, head_size)


def _granite(hf: Any) -> tuple[Part, ...]:
    groups, kernel_size = hf.mamba_n_groups, hf.mamba_d_conv
    return _mamba2(hf.mamba_n_heads, hf.mamba_d_head, hf.mamba_d_state, groups, kernel_size)


def _nemotron(hf: Any) -> tuple[Part, ...]:
    groups, kernel_size = hf.n_groups, hf.conv_kernel
    return _mamba2(hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size, groups, kernel_size)


def _short_convolution(hf: Any) -> tuple[Part, ...]:
    return (convolution(hf.hidden_size, hf.conv_L_cache),)


_STATES: dict[str, Callable[[Any], tuple[Part, ...]]] = {
    "granitemoehybrid": _granite,
    "lfm2": _short_convolution,
    "nemotron_h": _nemotron,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
}
"""By the type of config.json: what each recurrent layer keeps."""

_KEEPS: dict[str, bool | None] = {
    "full_attention": None,
    "linear_attention": True,
    "conv": True,
    "mlp": False,
    "moe": False,
}
"""By a layer's type: whether it keeps state; None attends."""


def recurrent_layers(hf: "PretrainedConfig") -> tuple[LayerLayout | None, ...]:
    """Of each layer what it keeps, None attends; nothing of an architecture that is not supported so."""
    state_of, kinds = _STATES.get(hf.model_type), tuple(getattr(hf, "layer_types", None) or ())
    if state_of is None or not set(kinds) <= _KEEPS.keys():
        return ()
    state = state_of(hf)
    keeps = {True: LayerLayout(slots=state, segments=state), False: LayerLayout(), None: None}
    return tuple(keeps[_KEEPS[kind]] for kind in kinds)
