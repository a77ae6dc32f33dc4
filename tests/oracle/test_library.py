"""The library path: transformers' own modeling, paged, gives its logits within 2e-3 and its greedy tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.actors.engine.build import load_model
from shoal.actors.engine.models.choose import PROVEN_IN_LIBRARY, numerics
from shoal.actors.engine.models.decoder_config import UnsupportedModel, load_config
from shoal.actors.engine.models.library_decoder import LibraryModel
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from tests.checkpoints import TINY_LIBRARY, tiny_library, tiny_llama
from tests.oracle.cuts import RECURRENT
from tests.oracle.stepping import Pages, logits_of

BACKEND = CpuBackend(2)
TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(150)]
OTHER = [(11 * i * i + 5 * i + 1) % 500 for i in range(70)]
TOLERANCE = 2e-3


def theirs(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)


@pytest.mark.parametrize("config", [config for config in TINY_LIBRARY if config not in RECURRENT.values()])
@torch.inference_mode()
def test_logits_in_every_kind_of_step(tmp_path: Path, config: str) -> None:
    checkpoint = tiny_library(config, tmp_path)
    loaded, peer = load_model(checkpoint, BACKEND, max_model_len=256), theirs(checkpoint)
    assert type(peer).__name__ in PROVEN_IN_LIBRARY
    expected, other = (peer(torch.tensor([ids]), use_cache=False).logits[0] for ids in (TOKENS, OTHER))

    for sizes in ((150,), (64,), (100, 1)):
        assert (logits_of(loaded, BACKEND, TOKENS, *sizes) - expected).abs().max() < TOLERANCE, sizes

    pages = Pages(loaded, BACKEND, [TOKENS, OTHER])  # a chunk, a prompt and single tokens together
    first, early = pages.step((0, 0, 100), (1, 0, 69))
    second, late = pages.step((0, 100, 101), (1, 69, 70))
    (third,) = pages.step((0, 101, 150))
    assert (torch.cat([first, second, third]) - expected).abs().max() < TOLERANCE
    assert (torch.cat([early, late]) - other).abs().max() < TOLERANCE


@pytest.mark.parametrize("config", TINY_LIBRARY)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, config: str) -> None:
    checkpoint = tiny_library(config, tmp_path)
    loaded, peer, tokens = load_model(checkpoint, BACKEND, max_model_len=256), theirs(checkpoint), TOKENS[:40]
    output = peer.generate(
        torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=2
    )[0].tolist()

    pages = Pages(loaded, BACKEND, [[*tokens, *[0] * 20]])
    sequence = list(tokens)
    pages.sequences = [sequence]
    (logits,) = pages.step((0, 0, 40))
    for position in range(40, 60):
        sequence.append(int(logits[-1].argmax()))
        (logits,) = pages.step((0, position, position + 1))
    assert sequence == output


@pytest.mark.parametrize(
    "overrides", [{"hidden_act": "gelu"}, {"head_dim": 24}, {"hidden_act": "gelu", "head_dim": 72}]
)
@torch.inference_mode()
def test_a_llama_that_the_lean_decoder_cannot_run(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Head sizes between multiples of 16 too: the pool's heads are filled up with zeros."""
    checkpoint = tiny_llama(tmp_path, **overrides)
    loaded = load_model(checkpoint, BACKEND, max_model_len=256)
    assert isinstance(loaded.config, LibraryModel) and loaded.config.head_dim % 16 == 0
    expected = theirs(checkpoint)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (logits_of(loaded, BACKEND, TOKENS, 64) - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_without_kernels(tmp_path: Path) -> None:
    checkpoint, backend = tiny_library("GPT2Config", tmp_path), TorchBackend()
    expected = theirs(checkpoint)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    ours = logits_of(load_model(checkpoint, backend, max_model_len=256), backend, TOKENS, 64)
    assert (ours - expected).abs().max() < TOLERANCE


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}


@torch.inference_mode()
def test_a_rope_that_depends_on_length_is_pinned_here_too(tmp_path: Path) -> None:
    checkpoint = tiny_library("Phi3Config", tmp_path, **LONGROPE)
    peer = theirs(checkpoint)
    loaded = load_model(checkpoint, BACKEND, max_model_len=256)
    expected = peer(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (logits_of(loaded, BACKEND, TOKENS, 40, 1) - expected).abs().max() < TOLERANCE
    alone = logits_of(loaded, BACKEND, TOKENS[:40])
    assert (alone - expected[:40]).abs().max() < TOLERANCE, "a short prompt has the angles of a long one"

    short = load_model(checkpoint, BACKEND, max_model_len=64)
    expected = peer(torch.tensor([TOKENS[:40]]), use_cache=False).logits[0]
    assert (logits_of(short, BACKEND, TOKENS[:40]) - expected).abs().max() < TOLERANCE
    hf = load_config(checkpoint)
    assert numerics(hf, 64) != numerics(hf, 256)


def test_the_two_paths_never_share_what_they_computed(tmp_path: Path) -> None:
    lean = load_config(tiny_llama(tmp_path / "lean"))
    library = load_config(tiny_library("GPT2Config", tmp_path / "library"))
    assert numerics(lean, 256) == numerics(lean, 512) == "lean decoder"
    assert numerics(library, 256).startswith("library path of transformers 5.")


def config_of(config: str, **fields: Any) -> Any:
    import transformers  # noqa: PLC0415

    hf = getattr(transformers, config)(**fields)
    hf.architectures = [fields["architecture"]]
    return hf


@pytest.mark.parametrize(
    ("config", "fields", "named"),
    [
        (
            "T5Config",
            {"architecture": "T5ForConditionalGeneration"},
            "T5ForConditionalGeneration (an encoder and a decoder)",
        ),
        ("MambaConfig", {"architecture": "MambaForCausalLM"}, "MambaForCausalLM (with linear_attention)"),
        (
            "BloomConfig",
            {"architecture": "BloomForCausalLM"},
            "BloomForCausalLM (its attention cannot be replaced)",
        ),
        ("BertConfig", {"architecture": "BertForMaskedLM"}, "architecture BertForMaskedLM"),
        (
            "LlamaConfig",
            {"architecture": "LlamaForCausalLM", "quantization_config": {"quant_method": "x"}},
            "quantization_config (x)",
        ),
        (
            "GptOssConfig",
            {"architecture": "GptOssForCausalLM", "quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config (mxfp4)",
        ),
        (
            "Gemma3Config",
            {"architecture": "Gemma3ForConditionalGeneration"},
            "Gemma3ForConditionalGeneration (not of text alone)",
        ),
    ],
)
def test_refused_by_name_with_what_is_supported(config: str, fields: dict[str, Any], named: str) -> None:
    supported = "is not supported; supported: LlamaForCausalLM, .*Phi3ForCausalLM"
    with pytest.raises(UnsupportedModel, match=f"{re.escape(named)} {supported}"):
        numerics(config_of(config, **fields), 64)


def test_a_checkpoint_with_code_of_its_own_is_refused_without_a_question(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}'
    )
    with pytest.raises(UnsupportedModel, match=r"transformers cannot read its config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        ("Gemma2Config", {"layer_types": None, "query_pre_attn_scalar": 16}, "attention with a softcap"),
        (
            "GptOssConfig",
            {"num_local_experts": 2, "num_experts_per_tok": 1, "swiglu_limit": 5.0},
            "attention with sinks",
        ),
        ("PhimoeConfig", {"num_local_experts": 2, "sliding_window": 24}, "not told of a window"),
        ("DogeConfig", {}, "attention with a mask of its own"),
    ],
)
def test_an_attention_that_ours_is_not_is_refused_when_loaded(
    tmp_path: Path, config: str, overrides: dict[str, Any], reason: str
) -> None:
    TINY_LIBRARY.setdefault(config, {})
    try:
        checkpoint = tiny_library(config, tmp_path, **overrides)
    finally:
        del TINY_LIBRARY[config]
    with pytest.raises(UnsupportedModel, match=f"cannot be served: .*{reason}"):
        load_model(checkpoint, BACKEND, max_model_len=64)
