"""A GGUF file becomes the very checkpoint that it was made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from transformers import AutoTokenizer

from shoal.cluster.sources import convert
from shoal.cluster.sources.checkpoint import check_checkpoint
from shoal.cluster.sources.gguf import convert_gguf
from tests.checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS, TINY_LLAMA, tiny_llama

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps the two halves that rope rotates interleaved; safetensors keeps them one after the other."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(checkpoint: Path, path: Path, *, split: str = "smollm") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(TINY_LLAMA["max_position_embeddings"])
    writer.add_embedding_length(TINY_LLAMA["hidden_size"])
    writer.add_feed_forward_length(TINY_LLAMA["intermediate_size"])
    writer.add_block_count(TINY_LLAMA["num_hidden_layers"])
    writer.add_head_count(TINY_LLAMA["num_attention_heads"])
    writer.add_head_count_kv(TINY_LLAMA["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(TINY_LLAMA["vocab_size"])
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = list(model["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            weight = interleave(weight, TINY_LLAMA[heads])  # noqa: PLW2901
        writer.add_tensor(gguf_name(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_and_tokenizer_survive_the_way_through_gguf(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    original = tiny_llama(tmp_path / "original")
    write_gguf(original, tmp_path / "tiny.gguf")
    capfd.readouterr()

    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")

    assert capfd.readouterr() == ("", "")
    check_checkpoint(tmp_path / "converted")
    expected = load_file(original / "model.safetensors")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name], weight), name

    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 500_000
    assert config["tie_word_embeddings"] is False
    generation = json.loads((tmp_path / "converted" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 2]

    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.model_max_length == 512
    assert tokenizer.tokenize("at  12</s>") == ["at", "ĠĠ", "1", "2", "</s>"]


def test_a_split_of_text_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tiny_llama(tmp_path / "original"), tmp_path / "tiny.gguf", split="klingon")

    with pytest.raises(SystemExit, match=r"splits text in a way we do not know \('klingon'\)"):
        convert.main(tmp_path / "tiny.gguf", tmp_path / "converted")


def test_the_tiny_llama_is_the_same_every_time(tmp_path: Path) -> None:
    once = tiny_llama(tmp_path / "once", seed=1)
    again = tiny_llama(tmp_path / "again", seed=1)
    other = tiny_llama(tmp_path / "other", seed=2)

    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (once / name).read_bytes() == (again / name).read_bytes()
    assert (once / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_tiny_llama_takes_another_shape(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, dtype="float32", tie_word_embeddings=True, intermediate_size=50)

    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (50, 64)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_the_tiny_tokenizer_knows_every_byte_and_a_chat(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama(tmp_path))

    assert len(tokenizer) == 512
    for text in ("", "the heat", "naïve\t你好 🙂\n"):
        assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<s>user: hi</s>assistant: "
