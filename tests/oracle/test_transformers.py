"""Against Hugging Face transformers in float32: teacher-forced logits, not only tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.models.decoder_config import UnsupportedModel
from shoal.actors.engine.step import SequenceId
from shoal.kernels.backend import Backend
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from tests.checkpoints import smollm2, tiny_llama
from tests.oracle.recording import Setup, greedy, serve


def our_logits(loaded: LoadedModel, backend: Backend, tokens: Sequence[int]) -> Tensor:
    rows: dict[int, Tensor] = {}
    setup = Setup(backend=backend, max_num_batched_tokens=64)

    def keep(_: SequenceId, position: int, logits: Tensor) -> None:
        rows[position] = logits.clone()

    serve(loaded, setup, [greedy("it", tokens, 1)], look=keep)
    return torch.stack([rows[position] for position in range(len(tokens))])


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


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"head_dim": 24}, "head_dim 24"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type dynamic",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    checkpoint = tiny_llama(tmp_path, **overrides)
    with pytest.raises(UnsupportedModel, match=named):
        load_model(checkpoint, CpuBackend(1), max_model_len=64)
