"""The weights of a llama checkpoint as a GGUF file, which is what llama.cpp reads. Written once, then cached.

Names, metadata and the order of rows are those of llama.cpp's own convert_hf_to_gguf.py.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from torch import Tensor

from shoal.actors.engine.models.decoder_config import (
    DecoderConfig,
    UnsupportedModel,
    architecture_of,
    decoder_config,
    load_config,
    rope_types,
    usual_length,
)
from shoal.actors.engine.models.weights import CheckpointTensors
from shoal.cluster.bench.contender import Dtype, PeerError
from shoal.cluster.bench.gguf_vocabulary import add_vocabulary
from shoal.cluster.sources.cache import CheckpointCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYOUT = "version 1"
"""Raise it when other bytes are written: cached files are then made again."""

FILE_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def cached_gguf(checkpoint: Path, dtype: Dtype) -> Path:
    """The file, written now if no earlier run has. Raises PeerError if it cannot be."""
    folder = CheckpointCache.from_environment().root.parent / "gguf"
    path = folder / f"{checkpoint.name}-{_stamp(checkpoint)}-{dtype}.gguf"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(checkpoint, path, dtype)
        except OSError as error:
            raise PeerError(
                f"cannot write {path} ({error.strerror or error}): free some space, or set SHOAL_CACHE"
            ) from error
    return path


def _write_whole(checkpoint: Path, path: Path, dtype: Dtype) -> None:
    """Under another name until it is whole, so that nobody reads half of it."""
    scratch = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        write_gguf(checkpoint, scratch, dtype)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _stamp(checkpoint: Path) -> str:
    """Other files, other stamp; by their sizes and times, for weights may take minutes to read."""
    stats = [(file.name, file.stat()) for file in sorted(checkpoint.iterdir())]
    described = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return sha256(json.dumps([LAYOUT, str(checkpoint.resolve()), described]).encode()).hexdigest()[:12]


def write_gguf(checkpoint: Path, path: Path, dtype: Dtype) -> None:
    """Matrices in `dtype`, norms in float32. Raises PeerError for what is not a plain llama."""
    hf = load_config(checkpoint)
    config = _llama_config(hf)
    writer = gguf.GGUFWriter(path, arch="llama")
    try:
        _add_metadata(writer, hf, config, dtype)
        add_vocabulary(writer, checkpoint, config.vocab_size, hf.eos_token_id)
        for name, values in _tensors(checkpoint, config):
            data, kind = _encoded(name, values, dtype)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _llama_config(hf: "PretrainedConfig") -> DecoderConfig:
    refused = "llama.cpp's weights can be written for plain llamas only"
    if architecture_of(hf) != "LlamaForCausalLM":
        raise PeerError(f"{refused}, not for {architecture_of(hf)}: choose another --vs")
    try:
        config = decoder_config(hf)
    except UnsupportedModel as error:
        raise PeerError(f"{refused}, without {error}: choose another --vs") from error
    if config.qkv_bias or config.mlp_bias:
        raise PeerError(f"{refused}, without biases: choose another --vs")
    if rope_types(hf) != ("default",):
        raise PeerError(f"{refused}, without rope_type {', '.join(rope_types(hf))}: choose another --vs")
    return config


def _add_metadata(
    writer: gguf.GGUFWriter, hf: "PretrainedConfig", config: DecoderConfig, dtype: Dtype
) -> None:
    writer.add_context_length(usual_length(hf))
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(hf.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(FILE_TYPES[dtype][1])


def _tensors(checkpoint: Path, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """All of them, by llama.cpp's names, in the dtype of the checkpoint."""
    with CheckpointTensors(checkpoint) as tensors:
        for theirs, name in NAMES.items():
            if theirs != "lm_head" or not config.tie_word_embeddings:
                yield f"{name}.weight", tensors[f"{theirs}.weight"]
        for layer in range(config.num_layers):
            for theirs, name in LAYER_NAMES.items():
                weight = tensors[f"model.layers.{layer}.{theirs}.weight"]
                if name in ("attn_q", "attn_k"):
                    weight = interleaved(weight, config.head_dim)
                yield f"blk.{layer}.{name}.weight", weight
        left = sorted(name for name in tensors.unread if name != "lm_head.weight")
        if left:
            raise PeerError(f"{checkpoint} has tensors that llama.cpp would not know, such as {left[0]}")


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k, [heads * head_dim, hidden], in the order of llama.cpp's rope.

    It rotates neighbours, (0, 1), (2, 3), ...; transformers rotates halves, (0, d/2), (1, d/2 + 1), ...
    """
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _encoded(
    name: str, values: Tensor, dtype: Dtype
) -> tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]:
    kind = FILE_TYPES["float32" if values.dim() == 1 else dtype][0]
    with np.errstate(over="ignore"):
        data = gguf.quantize(values.float().numpy(), kind)
    if dtype == "float16" and not np.isfinite(data).all():
        raise PeerError(f"{name} has weights that float16 cannot hold: choose --peer-dtype bfloat16")
    return data, kind
