"""What a folder must hold to be served: config.json, a tokenizer, and whole safetensors files.

A front door needs all but the weights.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.cluster.package import hint_in_a_package

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Any of these sets is enough for transformers to build the tokenizer."""


WEIGHTS_FILES = ("*.safetensors", "*.safetensors.index.json")
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
UNNEEDED_FILES = ("*/*", "consolidated*")
"""Other formats of the same weights, which some models keep in subfolders or beside them."""


class Part(StrEnum):
    """Of a model's files."""

    WHOLE = "whole"
    TEXT = "text"
    """Configuration and tokenizer, without the weights."""

    @property
    def files(self) -> tuple[str, ...]:
        return TEXT_FILES if self is Part.TEXT else (*TEXT_FILES, *WEIGHTS_FILES)

    def has(self, name: str) -> bool:
        """Whether a file of a model's folder is of it."""
        wanted = any(fnmatchcase(name, pattern) for pattern in self.files)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in UNNEEDED_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A local folder that can be served, the name that clients ask for, and where others get the same."""

    directory: Path
    name: str
    source: str
    """See `sources.pinned`."""


class ModelSourceError(Exception):
    """There is no checkpoint to serve. Each problem is one line for a person: what, where, the way out."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def first_line(error: BaseException) -> str:
    """What a library's error says, as far as a person needs it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def has_weights(names: Iterable[str]) -> bool:
    """Whether there are any that can be served among a folder's files."""
    return any(name.endswith(".safetensors") and Part.WHOLE.has(name) for name in names)


class ModelUnreachable(ModelSourceError):
    """So is it now; it may be had later."""


def check_checkpoint(directory: Path) -> None:
    """Raise with every problem of the folder at once, so that a person fixes it in one go."""
    if problems := find_problems(directory):
        raise ModelSourceError(*problems)


def find_problems(directory: Path, part: Part = Part.WHOLE) -> list[str]:
    if not directory.is_dir():
        choice = "give a checkpoint folder, a .gguf file, a hub id, s3:// or gs://"
        return [f"{directory} is not a directory: {choice}{hint_in_a_package()}"]
    weights = _weights_problems(directory) if part is Part.WHOLE else ()
    return [*config_problems(directory), *weights, *_tokenizer_problems(directory)]


def config_problems(directory: Path) -> Iterator[str]:
    path = directory / "config.json"
    if not path.is_file():
        yield f"{path} is missing: download the model's whole folder again"
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        method = (config.get("quantization_config") or {}).get("quant_method", "an unnamed method")
    except (ValueError, AttributeError) as error:
        yield f"{path} is not a model's configuration ({error}): download it again"
        return
    # Packed weights would be read as if they were plain ones, so they are refused before anything is loaded.
    if config.get("quantization_config"):
        yield f"{directory} is quantized with {method}, which is not supported: use its bf16 checkpoint"


def _weights_problems(directory: Path) -> Iterator[str]:
    index = directory / INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            yield f"{index} is not a safetensors index: download it again"
            return
        paths = [directory / shard for shard in shards]
    elif (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    else:
        yield _why_no_weights(directory)
        return
    for path in paths:
        if not path.is_file():
            yield f"{path} is missing (listed in {INDEX}): download it again"
        elif not is_whole(path):
            yield f"{path} is cut short or damaged: download it again"


def _why_no_weights(directory: Path) -> str:
    if any(directory.glob("*.safetensors")):
        return f"{directory / INDEX} is missing, and so is {SINGLE}: download the model's whole folder again"
    if any(any(directory.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth")):
        return f"{directory} has only pickle weights (.bin, .pt), which may run code: safetensors is needed"
    if gguf := min(directory.glob("*.gguf"), default=None):
        return f"{directory} has no safetensors weights: name its GGUF file instead, {gguf}"
    return f"{directory} has no {SINGLE} and no {INDEX}: a safetensors checkpoint is needed"


def _tokenizer_problems(directory: Path) -> Iterator[str]:
    if not any(all((directory / file).is_file() for file in files) for files in TOKENIZERS):
        yield f"{directory / 'tokenizer.json'} is missing: download the model's tokenizer into that folder"


def is_whole(path: Path) -> bool:
    """Whether a safetensors file ends where its header says: after an interrupted download it does not."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        try:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > file_bytes:
                return False
            header = json.loads(file.read(header_bytes))
            ends = [
                int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"
            ]
        except (struct.error, ValueError, LookupError, AttributeError, TypeError):
            return False
    return file_bytes == 8 + int(header_bytes) + max(ends, default=0)
