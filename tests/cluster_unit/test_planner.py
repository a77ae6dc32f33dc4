"""What models take in memory: numbers that others have published, and what a person sees of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cluster.cli import app
from shoal.cluster.planner import Plan, PlanOptions, make_plan

GIB = 1 << 30
QWEN3_06B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
}
LLAMA_31_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 40,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"] * 20,
    "max_position_embeddings": 131072,
}
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 256,
    "sliding_window": 1000,
    "max_position_embeddings": 32768,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
}

QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def plan(folder: Path, config: dict[str, Any], **options: Any) -> Plan:
    return make_plan(written(folder, config), PlanOptions(**options))


def test_qwen3_06b(tmp_path: Path) -> None:
    for memory_bytes, tokens in ((4 * GIB, 37_449), (40 * GIB, 374_491)):
        made = plan(tmp_path, QWEN3_06B, kv_cache_dtype="bfloat16", memory_bytes=memory_bytes)
        assert (made.bytes_per_token, made.most_tokens) == (114_688, tokens)
        assert (made.footprint.layout.slots.num_bytes, made.usable_slots) == (0, 0)
    assert made.memory is not None
    assert made.memory.num_tokens == (40 * GIB // (128 * 114_688) - 1) * 128, "whole blocks, and one spare"


def test_llama_31_8b(tmp_path: Path) -> None:
    assert plan(tmp_path, LLAMA_31_8B, kv_cache_dtype="bfloat16").bytes_per_token == 131_072
    assert plan(tmp_path, LLAMA_31_8B).bytes_per_token == 2 * 131_072, "float32, as it would be served"


def test_deepseek_v4_in_rows_of_8_bits(tmp_path: Path) -> None:
    """A row is 512 values and 16 scales; a ring is the window of 128 and 6 rows."""
    options: dict[str, Any] = {"kv_cache_dtype": "float8", "num_dropped_layers": 20, "memory_bytes": 80 * GIB}
    made = plan(tmp_path, DEEPSEEK_V4, max_num_seqs=64, **options)
    rings, layout = made.footprint.rings, made.footprint.layout
    assert rings is not None
    assert (rings.bytes_per_row, rings.num_rows, rings.bytes_per_layer) == (528, 134, 70_752)
    assert (rings.num_stored, rings.stored_bytes) == (20, 1_415_040)
    assert layout.stored_bytes == 1_415_040, "in front of what is not stored"
    assert [rows.rows_per_block for rows in made.footprint.paged] == [128 // 4, 128 // 4, 128 // 128]
    assert layout.blocks.num_bytes == 20 * (32 * 528 + 32 * 132 + 528)
    assert made.usable_slots == 76, "floor(1.2 × 64)"
    assert (layout.rule.num_segments, layout.rule.num_recomputed, layout.rule.num_rewound) == (1, 20, 4)
    sparse, heavy = 2 * 4 * 2 * 2 * (512 + 128) * 4, 128 * 2 * 512 * 4
    assert made.footprint.other_state_bytes == 20 * (sparse + heavy)
    slot = 40 * rings.bytes_per_layer + made.footprint.other_state_bytes
    assert made.memory is not None
    assert made.memory.state_bytes == 2 * 77 * slot, "and one that is never issued, and staging"
    assert made.memory.segment_bytes == 20 * (127 + 4) * 528
    assert made.memory.num_blocks * made.memory.block_bytes + made.memory.num_segments * (
        made.memory.segment_bytes
    ) <= (80 * GIB - made.memory.state_bytes)


def test_deepseek_v4_as_it_can_be_served_and_as_it_is_published(tmp_path: Path) -> None:
    made = plan(tmp_path, DEEPSEEK_V4, kv_cache_dtype="bfloat16", num_dropped_layers=20)
    assert made.footprint.rings is not None and made.footprint.is_served
    assert made.footprint.rings.bytes_per_layer == 134 * 1024
    assert made.footprint.layout.stored_bytes == 20 * 134 * 1024
    assert made.footprint.layout.blocks.num_bytes == 20 * (32 * 1024 + 32 * 256 + 1024)
    published = plan(tmp_path, DEEPSEEK_V4 | {"quantization_config": {"quant_method": "fp8"}})
    assert (published.footprint.dtype, published.footprint.is_served) == ("float8", False)
    assert plan(tmp_path, DEEPSEEK_V4).footprint.dtype == "float32"


def test_layers_of_deepseek_v4_are_those_of_its_compress_ratios(tmp_path: Path) -> None:
    ratios = {"layer_types": None, "compress_ratios": [0, 0, *[4, 128] * 19]}
    paged = plan(tmp_path, DEEPSEEK_V4 | ratios).footprint.paged
    assert [(rows.what, rows.num_layers, rows.rows_per_block) for rows in paged] == [
        ("compressed", 19, 32),
        ("index", 19, 32),
        ("compressed", 19, 1),
    ]


def test_windows_are_state_and_not_blocks(tmp_path: Path) -> None:
    made = plan(tmp_path, MISTRAL, num_dropped_layers=1, memory_bytes=GIB, max_num_seqs=10)
    rings, row = made.footprint.rings, 2 * 2 * 32 * 4
    assert rings is not None and made.footprint.paged == ()
    assert (rings.num_rows, rings.bytes_per_layer, rings.num_stored) == (1000, 1000 * row, 3)
    assert made.footprint.layout.segments.num_bytes == 3 * 128 * row
    assert made.footprint.layout.rule.num_segments == 8, "999 rows in blocks of 128"
    assert (made.bytes_per_token, made.most_tokens, made.usable_slots) == (0, None, 12)


def test_three_of_four_layers_keep_a_whole_state(tmp_path: Path) -> None:
    made = plan(tmp_path, QWEN3_NEXT_80B, kv_cache_dtype="bfloat16", max_model_len=32768)
    matrices, inputs = 36 * 32 * 128 * 128 * 4, 36 * 3 * (2 * 16 + 32) * 128 * 4
    assert made.bytes_per_token == 12 * 2 * 2 * 256 * 2
    layout = made.footprint.layout
    assert layout.slots.num_bytes == layout.segments.num_bytes == matrices + inputs
    assert (layout.rule.num_segments, layout.whole_states) == (1, True)
    said = output(str(tmp_path), "--max-model-len", "32768")
    assert "36 layers × 32 × 128 × 128 float32" in said
    assert "one is the state at a boundary" in said


def test_a_window_that_nothing_outgrows_is_in_blocks(tmp_path: Path) -> None:
    made = plan(tmp_path, MISTRAL, max_model_len=1000)
    assert (made.footprint.rings, made.bytes_per_token) == (None, 4 * 2 * 2 * 32 * 4)


def test_latent_attention_is_kept_as_the_heads_that_are_made_of_it(tmp_path: Path) -> None:
    assert plan(tmp_path, DEEPSEEK_V3).bytes_per_token == 2 * 2 * 4 * 32 * 4


def test_82_what_does_not_fit_is_said_beside_what_would(tmp_path: Path) -> None:
    written(tmp_path, QWEN3_06B)
    said = output(str(tmp_path), "--memory", "4GiB", "--kv-cache-dtype", "bfloat16")
    assert "37,449 tokens" in said
    assert "not enough memory: one sequence of max_model_len 40960 needs 320 KV blocks of 14MiB" in said


def output(*command: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *command], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_a_table_and_json_say_the_same(tmp_path: Path) -> None:
    written(tmp_path, DEEPSEEK_V4)
    (tmp_path / "model.safetensors").write_bytes(bytes(2048))
    limits = ("--num-dropped-layers", "20", "--memory", "80GiB")
    command = (str(tmp_path), *limits, "--kv-cache-dtype", "float8")
    table = output(*command)
    for expected in ("70,752 B", "1,415,040 B (1.3MiB)", "20 of 40 layers", "76 usable", "2,048 B (2KiB)"):
        assert expected in table
    said = json.loads(output(*command, "--json"))
    assert (said["rings"]["bytes_per_layer"], said["rings"]["stored_bytes"]) == (70_752, 1_415_040)
    assert (said["usable_slots"], said["weights_bytes"], said["served"]) == (76, 2048, False)


def test_json_says_what_recurrent_layers_keep(tmp_path: Path) -> None:
    said = json.loads(output(str(written(tmp_path, QWEN3_NEXT_80B)), "--json"))
    assert said["rings"] is None
    assert [(state["name"], state["num_layers"], state["shape"]) for state in said["states"]] == [
        ("convolution", 36, [3, 8192]),
        ("recurrent", 36, [32, 128, 128]),
    ]
    assert said["bytes_per_segment"] == said["bytes_per_slot"] == 36 * 4 * (3 * 8192 + 32 * 128 * 128)


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (
            QWEN3_06B | {"architectures": ["OpusForCausalLM"]},
            (),
            "architecture OpusForCausalLM is not supported",
        ),
        ({"hello": "world"}, (), "transformers cannot read its config.json"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            (),
            "T5ForConditionalGeneration",
        ),
        (QWEN3_06B, ("--max-model-len", "50000"), "must be from 1 to the model's own 40960"),
        (QWEN3_06B, ("--kv-cache-dtype", "float8"), "Qwen3ForCausalLM keeps float32 or bfloat16"),
        (QWEN3_06B, ("--num-dropped-layers", "1"), "0 have a window shorter than max_model_len 40960"),
        (DEEPSEEK_V4, ("--num-dropped-layers", "41"), "cannot leave 41 of 40 sliding layers unstored"),
        (DEEPSEEK_V4, ("--block-size", "64"), "must be a multiple of 128"),
        (QWEN3_06B, ("--block-size", "17"), "must be a multiple of 16"),
        (QWEN3_06B, ("--memory", 400 * "9" + "TiB"), "is not a memory size"),
        (QWEN3_06B, ("--revision", "main"), "needs a hub id"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, config: dict[str, Any], flags: tuple[str, ...], message: str
) -> None:
    said = output(str(written(tmp_path, config)), *flags, status=1)
    assert message in said and said.count("\n") == 1


def test_a_config_that_is_not_there() -> None:
    assert "/nowhere is neither a config.json nor a directory that has one" in output("/nowhere", status=1)
