"""What keys and values depend on beside the tokens: engines of one fingerprint may share them.

What they depend on of the checkpoint is its content, which has a digest of its own: all engines of a model
must have the same, also where their kernels differ.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from shoal.actors.engine.config import EngineConfig

_PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDigest:
    files: tuple[tuple[str, int, int], ...]
    """(name, bytes, nanoseconds of the last change) when they were about to be read."""
    pieces: tuple[bytes, ...]


def fingerprint(config: EngineConfig, *, numerics_id: str, content: bytes) -> bytes:
    """Equal only if the weights, the model's configuration and the numerics are, to the bit.

    numerics_id: the backend's, and what the model's path adds.
    """
    about = {
        "content": content.hex(),
        "numerics_id": numerics_id,
        "block_size": config.block_size,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    return sha256(json.dumps(about, sort_keys=True).encode()).digest()


def digest_content(config: EngineConfig, weights: WeightsDigest | None = None) -> bytes:
    """Of the model's configuration and weights.

    weights: what `digest_weights` said, if it was asked. It is asked again if files have changed since.
    """
    checkpoint = Path(config.checkpoint)
    configuration = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    whole = sha256(json.dumps(configuration, sort_keys=True).encode())
    if weights is None or weights.files != _files(checkpoint):
        weights = digest_weights(config)
    for piece in weights.pieces:
        whole.update(piece)
    return whole.digest()


def digest_weights(config: EngineConfig) -> WeightsDigest:
    """Reads every byte of the weights, about 1 GB/s a thread where the CPU has SHA instructions."""
    checkpoint = Path(config.checkpoint)
    files = _files(checkpoint)
    with ThreadPoolExecutor(config.threads) as threads:
        return WeightsDigest(files=files, pieces=tuple(threads.map(_digest, _pieces(checkpoint, files))))


def _files(checkpoint: Path) -> tuple[tuple[str, int, int], ...]:
    stats = ((file.name, file.stat()) for file in sorted(checkpoint.glob("*.safetensors")))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _pieces(checkpoint: Path, files: tuple[tuple[str, int, int], ...]) -> Iterator[tuple[Path, int]]:
    for name, num_bytes, _ in files:
        for offset in range(0, num_bytes, _PIECE_BYTES):
            yield checkpoint / name, offset


def _digest(piece: tuple[Path, int]) -> bytes:
    path, at = piece
    end = at + _PIECE_BYTES
    digest, buffer = sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := os.preadv(file.fileno(), [buffer[: end - at]], at):
            digest.update(buffer[:num_bytes])
            at += num_bytes
    return digest.digest()
