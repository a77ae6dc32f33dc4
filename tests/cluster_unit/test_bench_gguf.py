"""A checkpoint as GGUF: what was written is read back with the gguf package's own reader."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.cluster.bench.contender import Dtype, PeerError
from shoal.cluster.bench.gguf_vocabulary import split_name
from shoal.cluster.bench.gguf_weights import cached_gguf, interleaved, write_gguf
from tests.checkpoints import tiny_llama, tiny_qwen2

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoint"))


def written(checkpoint: Path, folder: Path, dtype: Dtype = "float16") -> gguf.GGUFReader:
    path = folder / "model.gguf"
    write_gguf(checkpoint, path, dtype)
    return gguf.GGUFReader(path)


def metadata(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape)))
        for tensor in reader.tensors
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_weight_comes_back(checkpoint: Path, tmp_path: Path, dtype: Dtype) -> None:
    ours = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    theirs = tensors(written(checkpoint, tmp_path, dtype))
    assert len(theirs) == len(ours)
    rounded = ours["model.layers.1.mlp.down_proj.weight"].to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(theirs["blk.1.ffn_down.weight"], rounded)
    assert np.array_equal(theirs["output_norm.weight"], ours["model.norm.weight"].numpy())
    assert np.array_equal(
        theirs["blk.0.attn_v.weight"],
        ours["model.layers.0.self_attn.v_proj.weight"].to(getattr(torch, dtype)).float().numpy(),
    )


def test_rope_turns_neighbours_where_transformers_turns_halves() -> None:
    row_of_head = torch.arange(2 * 4)[:, None]  # two heads of four
    assert interleaved(row_of_head, head_dim=4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_queries_and_keys_are_reordered(checkpoint: Path, tmp_path: Path) -> None:
    ours = load_file(checkpoint / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"].float()
    (theirs,) = [
        tensor
        for name, tensor in tensors(written(checkpoint, tmp_path, "float32")).items()
        if name == "blk.1.attn_k.weight"
    ]
    head_dim = 16
    assert np.array_equal(theirs[0::2][: head_dim // 2], ours[: head_dim // 2].numpy())
    assert np.array_equal(theirs[1::2][: head_dim // 2], ours[head_dim // 2 : head_dim].numpy())


def test_the_shape_and_the_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    reader = written(checkpoint, tmp_path)
    for key, value in {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10_000.0,
        "llama.context_length": 512,
        "llama.vocab_size": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }.items():
        assert metadata(reader, key) == value, key
    tokens, kinds = metadata(reader, "tokenizer.ggml.tokens"), metadata(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(kinds) == 512
    assert tokens[:3] == ["<s>", "</s>", "<pad>"]
    assert kinds[0] == gguf.TokenType.CONTROL
    assert kinds[100] == gguf.TokenType.NORMAL
    assert metadata(reader, "tokenizer.ggml.merges")[0] == "Ġ Ġ"
    assert "add_generation_prompt" in metadata(reader, "tokenizer.chat_template")


def test_a_vocabulary_that_llama_cpp_would_split_otherwise_is_left_out(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    tokenizer = checkpoint / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"use_regex": true', '"use_regex": false'))
    reader = written(checkpoint, tmp_path)
    assert metadata(reader, "tokenizer.ggml.model") == "no_vocab"
    assert reader.get_field("tokenizer.ggml.tokens") is None


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (BYTE_LEVEL, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
            },
            "smollm",
        ),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL],
            },
            None,
        ),
        (BYTE_LEVEL | {"add_prefix_space": True}, None),
        (None, None),
    ],
)
def test_ways_to_split_text(pre_tokenizer: Any, name: str | None) -> None:
    assert split_name(pre_tokenizer) == name


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    theirs = tensors(written(tiny_llama(tmp_path / "tied", tie_word_embeddings=True), tmp_path))
    assert "token_embd.weight" in theirs
    assert "output.weight" not in theirs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "without biases"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "without rope_type linear",
        ),
        ({"hidden_act": "gelu"}, "without hidden_act gelu"),
    ],
)
def test_other_llamas_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", **overrides)
    with pytest.raises(PeerError, match=message):
        written(checkpoint, tmp_path)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="plain llamas only, not for Qwen2ForCausalLM: choose another --vs"):
        written(tiny_qwen2(tmp_path / "checkpoint"), tmp_path)


def test_weights_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    file = tiny_llama(tmp_path / "checkpoint") / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][0, 0] = 1e6
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(PeerError, match=r"output.weight has weights that float16 cannot hold"):
        written(file.parent, tmp_path)
    assert tensors(written(file.parent, tmp_path, "bfloat16"))["output.weight"][0, 0] > 9e5


def test_a_file_is_written_once_until_the_checkpoint_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    first = cached_gguf(checkpoint, "float16")
    written_at = first.stat().st_mtime_ns
    assert cached_gguf(checkpoint, "float16") == first
    assert first.stat().st_mtime_ns == written_at
    tiny_llama(checkpoint, seed=1)
    assert cached_gguf(checkpoint, "float16") != first
    assert sorted(path.name for path in first.parent.iterdir()) == sorted(
        path.name for path in first.parent.glob("checkpoint-*-float16.gguf")
    ), "no half-written file is left"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(PeerError, match=r"Not a directory.*set SHOAL_CACHE"):
        cached_gguf(tiny_llama(tmp_path / "checkpoint"), "float16")
