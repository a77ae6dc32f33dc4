"""What makes a folder servable, and what a person is told when it is not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cluster.sources.checkpoint import ModelSourceError, check_checkpoint, find_problems, is_whole
from tests.checkpoints import hollow_checkpoint, safetensors_bytes

Damage = Callable[[Path], object]


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def test_a_complete_folder_has_no_problems(tmp_path: Path) -> None:
    check_checkpoint(hollow_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove("config.json"), "config.json is missing"),
        (write("config.json", "{"), "config.json is not a model's configuration"),
        (write("config.json", "[]"), "config.json is not a model's configuration"),
        (write("config.json", '{"quantization_config": {"quant_method": "gptq"}}'), "is quantized with gptq"),
        (remove("tokenizer.json"), "tokenizer.json is missing"),
        (remove("model.safetensors"), "a safetensors checkpoint is needed"),
        (only_pickles, "has only pickle weights"),
        (cut_short, "model.safetensors is cut short"),
        (write("model.safetensors", "not what it says"), "model.safetensors is cut short or damaged"),
        (write("model.safetensors.index.json", "{}"), "is not a safetensors index"),
    ],
)
def test_each_problem_is_one_line_that_names_the_path(tmp_path: Path, damage: Damage, said: str) -> None:
    damage(hollow_checkpoint(tmp_path))

    (problem,) = find_problems(tmp_path)

    assert said in problem
    assert str(tmp_path) in problem
    assert "\n" not in problem


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError) as caught:
        check_checkpoint(tmp_path)

    assert len(caught.value.problems) == 3
    assert str(caught.value).splitlines() == list(caught.value.problems)


def test_a_sharded_checkpoint_needs_every_shard_of_its_index(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (hollow_checkpoint(tmp_path) / "model.safetensors").rename(tmp_path / shards[0])
    assert "model.safetensors.index.json is missing" in find_problems(tmp_path)[0]

    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_problems(tmp_path) == [
        f"{tmp_path / shards[1]} is missing (listed in model.safetensors.index.json): download it again"
    ]

    (tmp_path / shards[1]).write_bytes(safetensors_bytes())
    assert find_problems(tmp_path) == []


def test_a_folder_with_a_gguf_file_points_to_it(tmp_path: Path) -> None:
    hollow_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "tiny.gguf")

    assert find_problems(tmp_path) == [
        f"{tmp_path} has no safetensors weights: name its GGUF file instead, {tmp_path / 'tiny.gguf'}"
    ]


@pytest.mark.parametrize("files", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_older_tokenizer_files_will_do(tmp_path: Path, files: list[str]) -> None:
    (hollow_checkpoint(tmp_path) / "tokenizer.json").unlink()
    for name in files:
        (tmp_path / name).write_text("")

    assert find_problems(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 16,
        safetensors_bytes() + b"more",
        b"\x02" + bytes(7) + b"[]",
        b"\x07" + bytes(7) + b'{"w":1}',
        b"\x18" + bytes(7) + b'{"w":{"data_offsets":0}}',
    ],
)
def test_no_content_that_is_not_a_whole_file_passes_for_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)

    assert not is_whole(tmp_path / "w.safetensors")
