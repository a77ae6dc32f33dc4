"""What a model's config.json means, kept from one start to the next.

Reading it takes transformers and torch, two to three seconds of imports, in a process that needs them for
nothing else. What engines on the lean path are told is a page of numbers, so that is kept.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

from shoal.actors.engine.models import decoder_config
from shoal.actors.engine.models.decoder_config import DecoderConfig, LeanModel, RopeFrequencies
from shoal.cluster.sources.cache import cache_root

LIBRARIES = ("transformers", "torch", "numpy")
"""They read, and compute frequencies: other versions may do so otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    max_model_len: int
    """What was asked for, else the model's own."""
    lean: LeanModel


class Readings:
    """A file a reading, named by the hash of all that it follows from: the bytes of the configuration, the
    length that was asked for, the code and the libraries that read it.

    So none is ever out of date. One that is damaged, or that cannot be written, counts as absent.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def from_environment(cls) -> "Readings":
        return cls(cache_root() / "readings")

    def find(self, checkpoint: Path, max_model_len: int | None) -> Reading | None:
        try:
            return _parse(self._file(checkpoint, max_model_len).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def keep(self, checkpoint: Path, max_model_len: int | None, reading: Reading) -> None:
        text = json.dumps(asdict(reading))
        if _parse(text) != reading:
            raise AssertionError("a reading must be the same when it is read again")
        with suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            file = self._file(checkpoint, max_model_len)
            fresh = file.with_name(f".{file.name}.{token_hex(4)}")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(file)  # whoever looks sees none or a whole one

    def _file(self, checkpoint: Path, max_model_len: int | None) -> Path:
        about = {
            "max_model_len": max_model_len,
            "libraries": [version(library) for library in LIBRARIES],
            "code": _digests(Path(decoder_config.__file__).parent, "*.py"),
            "configuration": _digests(checkpoint, "config*.json"),  # it may name another one
        }
        return self._root / f"{sha256(json.dumps(about).encode()).hexdigest()}.json"


def _digests(folder: Path, pattern: str) -> list[tuple[str, str]]:
    return [(file.name, sha256(file.read_bytes()).hexdigest()) for file in sorted(folder.glob(pattern))]


def _parse(text: str) -> Reading:
    said: dict[str, Any] = json.loads(text)
    lean = said["lean"]
    config = DecoderConfig(**lean["config"] | {"windows": tuple(lean["config"]["windows"])})
    ropes = (RopeFrequencies(inverse=tuple(rope["inverse"]), factor=rope["factor"]) for rope in lean["ropes"])
    return Reading(
        max_model_len=said["max_model_len"],
        lean=LeanModel(config=config, ropes=tuple(ropes), numerics=lean["numerics"]),
    )
