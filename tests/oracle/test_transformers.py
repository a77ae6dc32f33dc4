"""Against Hugging Face transformers in float32: teacher-forced logits, not only tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.models.decoder_config import (
    UnsupportedModel,
    decoder_config,
    load_config,
    longest_length,
    usual_length,
)
from shoal.kernels.backend import Backend
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from tests.checkpoints import (
    smollm2,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tests.oracle.stepping import logits_of


def our_logits(loaded: LoadedModel, backend: Backend, tokens: Sequence[int]) -> Tensor:
    return logits_of(loaded, backend, tokens, 64)


@torch.inference_mode()
def their_logits(checkpoint: Path, tokens: Sequence[int]) -> Tensor:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_smollm2_within_a_thousandth(smol: LoadedModel) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2())
    story = [{"role": "user", "content": "Write a short story about a fox and a river. " * 12}]
    tokens = tokenizer.apply_chat_template(story, add_generation_prompt=True, return_dict=False)
    assert len(tokens) > 128
    difference = our_logits(smol, CpuBackend(2), tokens) - their_logits(smollm2(), tokens)
    assert difference.abs().max() < 1e-3


TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(150)]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"intermediate_size": 100},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
    ],
    ids=lambda overrides: ", ".join(f"{key}={value}" for key, value in overrides.items()) or "plain",
)
@pytest.mark.parametrize("backend", [CpuBackend(2), TorchBackend()], ids=["kernels", "reference"])
def test_llama_of_every_shape(tmp_path: Path, overrides: dict[str, Any], backend: Backend) -> None:
    checkpoint = tiny_llama(tmp_path, **overrides)
    loaded = load_model(checkpoint, backend, max_model_len=len(TOKENS) + 1)
    difference = our_logits(loaded, backend, TOKENS) - their_logits(checkpoint, TOKENS)
    assert difference.abs().max() < 2e-4


WINDOWED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
STRETCHED = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
}
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (tiny_llama, {"attention_bias": True}),
        (tiny_llama, {"mlp_bias": True}),
        (tiny_llama, {"tie_word_embeddings": True}),
        (tiny_llama, {"attention_bias": True, "mlp_bias": True, "dtype": "float16", "head_dim": 32}),
        (tiny_mistral, {}),
        (tiny_mistral, {"sliding_window": None}),
        (tiny_mistral, {"sliding_window": 64, "head_dim": 32}),
        (tiny_mistral, {"sliding_window": 1, "dtype": "float32"}),
        (tiny_qwen2, {}),
        (tiny_qwen2, {"tie_word_embeddings": True}),
        (tiny_qwen2, WINDOWED),
        (tiny_qwen3, {}),
        (tiny_qwen3, {"attention_bias": True, "tie_word_embeddings": True}),
        (tiny_qwen3, WINDOWED),
        (tiny_llama, {"hidden_act": "gelu_pytorch_tanh"}),
        (tiny_gemma3, {}),
        (tiny_gemma3, STRETCHED | {"dtype": "float32", "num_key_value_heads": 1, "head_dim": 32}),
        (tiny_gemma3, {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 64}),
        (tiny_gpt_oss, {}),
        (tiny_gpt_oss, DEFAULT_ROPE | {"dtype": "float32", "num_experts_per_tok": 1, "head_dim": 32}),
        (tiny_gpt_oss, {"num_local_experts": 8, "num_experts_per_tok": 4, "attention_bias": False}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
@pytest.mark.parametrize("backend", [CpuBackend(2), TorchBackend()], ids=["kernels", "reference"])
def test_the_families(tmp_path: Path, family: Any, overrides: dict[str, Any], backend: Backend) -> None:
    checkpoint = family(tmp_path, **overrides)
    loaded = load_model(checkpoint, backend, max_model_len=len(TOKENS))
    difference = our_logits(loaded, backend, TOKENS) - their_logits(checkpoint, TOKENS)
    assert difference.abs().max() < 2e-4


def test_a_checkpoint_in_many_files(tmp_path: Path) -> None:
    whole, parts = tiny_llama(tmp_path / "whole"), tiny_llama(tmp_path / "parts", shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    backend = CpuBackend(2)
    ours = [
        our_logits(load_model(checkpoint, backend, max_model_len=len(TOKENS)), backend, TOKENS)
        for checkpoint in (whole, parts)
    ]
    assert torch.equal(*ours)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


TRAINED = 64
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + i / 8 for i in range(8)],
    long_factor=[2.0 + i for i in range(8)],
    original_max_position_embeddings=TRAINED,
)
DYNAMIC = {"max_position_embeddings": TRAINED, **rope("dynamic", factor=4.0)}


@pytest.mark.parametrize(
    ("overrides", "length", "max_model_len"),
    [
        (DYNAMIC, TRAINED, TRAINED),
        (DYNAMIC, 20, TRAINED),
        (DYNAMIC, 150, 150),  # of a longer one transformers knows a length only when it is whole
        (LONGROPE, TRAINED, TRAINED),
        (LONGROPE, 20, TRAINED),
        (LONGROPE, 65, 150),
        (LONGROPE, 150, 512),
    ],
)
def test_ropes_that_depend_on_length_are_pinned_for_the_longest_sequence(
    tmp_path: Path, overrides: dict[str, Any], length: int, max_model_len: int
) -> None:
    checkpoint, tokens = tiny_llama(tmp_path, **overrides), TOKENS[:length]
    backend = CpuBackend(2)
    ours = our_logits(load_model(checkpoint, backend, max_model_len=max_model_len), backend, tokens)
    assert (ours - their_logits(checkpoint, tokens)).abs().max() < 2e-4


@pytest.mark.parametrize("overrides", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_pinned_rope_gives_a_prefix_the_bits_that_it_has_in_a_longer_sequence(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    loaded = load_model(tiny_llama(tmp_path, **overrides), CpuBackend(2), max_model_len=150)
    whole = logits_of(loaded, CpuBackend(2), TOKENS)
    assert torch.equal(logits_of(loaded, CpuBackend(2), TOKENS[:40]), whole[:40])
    assert torch.equal(logits_of(loaded, CpuBackend(2), TOKENS, 60, 1), whole)


@pytest.mark.parametrize(
    ("overrides", "usual", "longest"),
    [
        ({}, 512, 512),
        (rope("linear", factor=4.0), 512, 512),
        (DYNAMIC, TRAINED, 4 * TRAINED),
        (rope("yarn", factor=4.0), 512, 2048),
        (rope("yarn", factor=4.0, original_max_position_embeddings=128), 512, 512),
    ],
)
def test_how_long_a_sequence_may_be(
    tmp_path: Path, overrides: dict[str, Any], usual: int, longest: int
) -> None:
    hf = load_config(tiny_llama(tmp_path, **overrides))
    assert (usual_length(hf), longest_length(hf)) == (usual, longest)


def test_a_tensor_that_nobody_would_read_is_refused(tmp_path: Path) -> None:
    """A llama by name that has norms of its heads is none."""
    checkpoint = tiny_qwen3(tmp_path)
    config = checkpoint / "config.json"
    config.write_text(
        config.read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM").replace('"qwen3"', '"llama"')
    )
    with pytest.raises(UnsupportedModel, match=r"tensors of no llama: model\.layers\.0\.self_attn\.k_norm"):
        load_model(checkpoint, CpuBackend(1), max_model_len=64)


def config_of(tmp_path: Path, **changes: Any) -> Path:
    checkpoint = tiny_llama(tmp_path)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return checkpoint


@pytest.mark.parametrize("model_type", ["granite", "helium", "cohere", "mistral"])
def test_a_config_of_another_family_is_not_read_as_a_llamas(tmp_path: Path, model_type: str) -> None:
    """Granite multiplies what llama does not, for one; its weights have llama's names."""
    hf = load_config(config_of(tmp_path, model_type=model_type))
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM with model_type {model_type}"):
        decoder_config(hf)


def test_a_window_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window 0"):
        decoder_config(load_config(tiny_mistral(tmp_path, sliding_window=0)))


@pytest.mark.parametrize(
    ("config", "architecture", "fields", "named"),
    [
        ("Gemma3TextConfig", "Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3TextConfig", "Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3TextConfig", "Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("GptOssConfig", "GptOss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("GptOssConfig", "GptOss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ("GptOssConfig", "GptOss", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 of 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_family_can_have_and_we_cannot_compute_is_refused(
    config: str, architecture: str, fields: dict[str, Any], named: str
) -> None:
    import transformers  # noqa: PLC0415

    hf = getattr(transformers, config)(**fields)
    hf.architectures = [f"{architecture}ForCausalLM"]
    with pytest.raises(UnsupportedModel, match=f"^{named}$"):
        decoder_config(hf)


def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="transformers cannot read its config"):
        load_config(config_of(tmp_path, hidden_size="64"))
