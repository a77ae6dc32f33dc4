"""Tensors of a safetensors checkpoint, by name, memory-mapped and in the dtype they were saved in."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.actors.engine.models.decoder_config import UnsupportedModel

INDEX_FILE = "model.safetensors.index.json"


class CheckpointTensors:
    """Open shards of one checkpoint; a context manager. Unknown names raise UnsupportedModel.

    It remembers what was read: a tensor that a model leaves unread is something that it does not compute.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._shards: dict[Path, Any] = {
            file: safe_open(file, framework="pt") for file in _shard_files(checkpoint)
        }
        self._where: dict[str, Any] = {
            name: shard for shard in self._shards.values() for name in list(shard.keys())
        }
        self._unread = set(self._where)

    @property
    def unread(self) -> frozenset[str]:
        return frozenset(self._unread)

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._where[name].get_tensor(name)
        except (KeyError, SafetensorError) as error:
            raise UnsupportedModel(f"the checkpoint has no readable tensor {name}") from error
        self._unread.discard(name)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where.clear()
        self._shards.clear()


def _shard_files(checkpoint: Path) -> list[Path]:
    index = checkpoint / INDEX_FILE
    if index.exists():
        return [
            checkpoint / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
        ]
    return [checkpoint / "model.safetensors"]
