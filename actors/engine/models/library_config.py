"""Which other architectures of transformers can be served: those whose state we know how to keep."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.actors.engine.model_layout import LayerLayout
from shoal.actors.engine.models.decoder_config import (
    DYNAMIC_ROPE_TYPES,
    LAYER_TYPES,
    UnsupportedModel,
    architecture_of,
    refuse_quantized,
    rope_types,
)
from shoal.actors.engine.models.library_state import recurrent_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    architecture: str
    vocab_size: int
    layers: tuple[LayerLayout | None, ...] = ()
    """What each keeps beside keys and values, None attends; () is a model whose layers all attend."""


def library_config(hf: "PretrainedConfig") -> LibraryConfig:
    """Refuse by name what blocks and slots cannot hold, or what would be computed wrongly.

    What no configuration tells, the model must prove when it is loaded: see library_decoder.py.
    """
    architecture = architecture_of(hf)
    if getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedModel(f"architecture {architecture} (an encoder and a decoder)")
    refuse_quantized(hf)
    if not hasattr(hf, "vocab_size"):
        raise UnsupportedModel(f"architecture {architecture} (not of text alone)")
    model = _model_class(hf, architecture)
    layers, layer_kinds = recurrent_layers(hf), set(getattr(hf, "layer_types", None) or ())
    if not layers and (model._is_stateful or not layer_kinds <= set(LAYER_TYPES)):
        what = ", ".join(sorted(layer_kinds - set(LAYER_TYPES))) or "recurrent layers"
        raise UnsupportedModel(f"architecture {architecture} (with {what})")
    if not layers and not model._supports_attention_backend:
        raise UnsupportedModel(f"architecture {architecture} (its attention cannot be replaced)")
    if len(kinds := rope_types(hf)) > 1 and set(kinds) & set(DYNAMIC_ROPE_TYPES):
        raise UnsupportedModel(f"a dynamic rope for a part of the layers ({', '.join(kinds)})")
    return LibraryConfig(architecture=architecture, vocab_size=hf.vocab_size, layers=layers)


def _model_class(hf: "PretrainedConfig", architecture: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (takes seconds to import)

    model: Any = AutoModelForCausalLM._model_mapping.get(type(hf), None)
    if model is None or model.__name__ != architecture:
        raise UnsupportedModel(f"architecture {architecture}")
    return model
