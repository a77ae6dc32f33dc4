"""The file of `shoal serve --api-keys`, as a person keeps it: a key is added, and all else stays as it is."""

import json
import os
import tempfile
from pathlib import Path

from shoal.actors.ingress.keys import KeyEntry, parse_keys, read_keys

HEAD = "# Hashes of API keys, for `shoal serve --api-keys`; `shoal keys new --file` adds one.\nkeys:\n"
PRIVATE = 0o600


def as_yaml(entry: KeyEntry) -> str:
    """As one item of the list `keys`."""
    fields = entry.model_dump(exclude_none=True).items()
    return "  - " + "\n    ".join(f"{field}: {json.dumps(value)}" for field, value in fields) + "\n"


def add_key(path: Path, entry: KeyEntry) -> None:
    """Behind the others, in one step for whoever reads the file meanwhile. Raises ValueError."""
    path = path.resolve()  # a link goes on leading there
    exists = path.exists()
    before = read_keys(path) if exists else ()
    for other in before:
        if entry.name == other.name:
            raise ValueError(f"--name {entry.name}: {path} has a key of that name")
    text = path.read_text() if exists else HEAD
    text += ("" if text.endswith("\n") else "\n") + as_yaml(entry)
    if not _has(text, (*before, entry)):
        raise ValueError(
            f"{path} does not end with a list below `keys:`; without --file you are shown what to add"
        )
    mode = path.stat().st_mode & 0o777 if exists else PRIVATE
    try:
        _replace(path, text, mode)
    except OSError as error:
        raise ValueError(f"--file {path}: {error.strerror}") from error


def _has(text: str, entries: tuple[KeyEntry, ...]) -> bool:
    try:
        return parse_keys(text) == entries
    except ValueError:
        return False


def _replace(path: Path, text: str, mode: int) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
        new.write(text)
        os.fchmod(new.fileno(), mode)
    os.replace(new.name, path)
