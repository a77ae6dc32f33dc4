"""What a checkpoint says of sampling, and of where its answers end."""

from pathlib import Path

import pytest

from shoal.actors.ingress.generation_config import GenerationDefaults, generation_defaults
from shoal.actors.ingress.text import TextCodec
from tests.checkpoints import write_tiny_tokenizer

LLAMA_3 = """{"bos_token_id": 128000, "do_sample": true, "eos_token_id": [128001, 128008, 128009],
 "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"}"""
QWEN_3 = '{"do_sample": true, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}'


def written(directory: Path, text: str) -> Path:
    (directory / "generation_config.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_3, GenerationDefaults(temperature=0.6, top_p=0.9)),
        (QWEN_3, GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)),
        (
            '{"repetition_penalty": 1.05, "min_p": 0.1}',
            GenerationDefaults(repetition_penalty=1.05, min_p=0.1),
        ),
        ('{"temperature": null, "top_k": 0}', GenerationDefaults()),
        ('{"eos_token_id": 2}', GenerationDefaults()),
        ('{"do_sample": false, "temperature": 0.7}', GenerationDefaults(temperature=0.7)),
    ],
)
def test_what_it_says_is_taken(tmp_path: Path, text: str, expected: GenerationDefaults) -> None:
    assert generation_defaults(written(tmp_path, text)) == expected


def test_without_one_the_defaults_are_the_apis(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": -1}',
        '{"temperature": "hot"}',
        '{"temperature": true}',
        '{"top_p": 0}',
        '{"top_k": 2.5}',
        '{"min_p": 2}',
        '{"repetition_penalty": 0}',
        '{"repetition_penalty": NaN}',
        "[]",
        "{",
    ],
)
def test_what_cannot_be_sampled_by_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        generation_defaults(written(tmp_path, text))


def test_every_end_token_of_a_list_ends_an_answer(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)  # its own is </s>, 1
    codec = TextCodec.load(written(tmp_path, LLAMA_3))
    assert codec.stop_token_ids == {1, 128001, 128008, 128009}
