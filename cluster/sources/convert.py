"""A program, `convert.py FILE FOLDER`: reads a GGUF file, writes the same model as bf16 safetensors.

It runs as its own process (`sources.gguf` starts it), so that the command line never imports torch, the
memory of the dequantized weights is gone when it ends, and whatever transformers prints stays out of the
terminal. It imports nothing of ours: it is started by path, whatever `sys.path` the parent has.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata

INDIVIDUAL_DIGITS = ("smollm",)
"""Splits that transformers does not know: every digit alone, then GPT-2's pattern."""

PLAIN_BYTE_LEVEL = ("gpt-2",)
"""What transformers builds for any split it does not know; right for these alone."""


def main(gguf_file: Path, folder: Path) -> None:
    # transformers' own reader: the gguf package's takes two more seconds for a vocabulary of 50,000.
    metadata, _ = read_gguf_metadata(str(gguf_file))
    write_tokenizer(gguf_file, metadata, folder)
    write_model(gguf_file, metadata, folder)


def write_tokenizer(gguf_file: Path, metadata: dict[str, Any], folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    if metadata["tokenizer.ggml.model"] == "gpt2":
        split = metadata.get("tokenizer.ggml.pre")
        if split in INDIVIDUAL_DIGITS:
            # Otherwise two spaces before a digit, for one, become other tokens than the model was trained on.
            digits = pre_tokenizers.Digits(individual_digits=True)
            words = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        elif split not in PLAIN_BYTE_LEVEL and split not in GGUF_PRE_TOKENIZER_SPLITS:
            sys.exit(f"its tokenizer splits text in a way we do not know ({split!r})")
    tokenizer.model_max_length = metadata[f"{metadata['general.architecture']}.context_length"]
    for how_it_was_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_it_was_loaded, None)
    tokenizer.save_pretrained(folder)


def write_model(gguf_file: Path, metadata: dict[str, Any], folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path
    model.generation_config = generation_config(metadata)
    model.save_pretrained(folder)


def generation_config(metadata: dict[str, Any]) -> Any:
    # A chat model's turn (eot) may end with another token than its documents (eos).
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
    ends = sorted({metadata[key] for key in keys if key in metadata})
    make: Any = GenerationConfig  # its constructor has no types
    return make(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends or None,
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
