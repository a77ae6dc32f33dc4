"""The vocabulary of a checkpoint as GGUF metadata, so that a server of llama.cpp takes and speaks text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer


def add_vocabulary(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, eos: object) -> None:
    """Byte-level BPE whose way to split text llama.cpp knows; with any other it is given token ids alone."""
    path = checkpoint / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    split = split_name(spec.get("pre_tokenizer"))
    if split is None or spec["model"]["type"] != "BPE":
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, kinds = zip(*_tokens(spec, vocab_size), strict=True)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    first = Tokenizer.from_file(str(path)).encode("a").ids[0]
    begins_with_bos = kinds[first] is gguf.TokenType.CONTROL
    writer.add_add_bos_token(begins_with_bos)
    if begins_with_bos:
        writer.add_bos_token_id(first)
    if isinstance(eos, int):
        writer.add_eos_token_id(eos)
    template = checkpoint / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def split_name(pre_tokenizer: Any) -> str | None:
    """llama.cpp's name of a way to split text into words, if it is one of those that we know."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return "gpt-2"
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            return "smollm"
    return None


def _tokens(spec: dict[str, Any], vocab_size: int) -> Iterator[tuple[str, gguf.TokenType]]:
    """By id, without gaps; a model's last rows may be no token's."""
    by_id = {token_id: (token, gguf.TokenType.NORMAL) for token, token_id in spec["model"]["vocab"].items()}
    for token in spec["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        by_id[token["id"]] = (token["content"], kind)
    for token_id in range(vocab_size):
        yield by_id.get(token_id, (f"[PAD{token_id}]", gguf.TokenType.UNUSED))
