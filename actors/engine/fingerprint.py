"""What keys and values depend on beside the tokens: engines of one fingerprint may share them."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from shoal.actors.engine.config import EngineConfig

_PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def fingerprint(config: EngineConfig, *, numerics_id: str, weights: Sequence[bytes] | None = None) -> bytes:
    """Equal only if the weights, the model's configuration and the numerics are, to the bit.

    numerics_id: the backend's, and what the model's path adds. weights: what `digest_weights` said, if it was
    asked.
    """
    checkpoint = Path(config.checkpoint)
    about = {
        "config.json": json.loads((checkpoint / "config.json").read_text(encoding="utf-8")),
        "numerics_id": numerics_id,
        "block_size": config.block_size,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    whole = sha256(json.dumps(about, sort_keys=True).encode())
    for digest in digest_weights(config) if weights is None else weights:
        whole.update(digest)
    return whole.digest()


def digest_weights(config: EngineConfig) -> tuple[bytes, ...]:
    """Reads every byte of the weights, about 1 GB/s a thread where the CPU has SHA instructions."""
    with ThreadPoolExecutor(config.threads) as threads:
        return tuple(threads.map(_digest, _pieces(Path(config.checkpoint))))


def _pieces(checkpoint: Path) -> Iterator[tuple[Path, int]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        for offset in range(0, file.stat().st_size, _PIECE_BYTES):
            yield file, offset


def _digest(piece: tuple[Path, int]) -> bytes:
    path, at = piece
    end = at + _PIECE_BYTES
    digest, buffer = sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := os.preadv(file.fileno(), [buffer[: end - at]], at):
            digest.update(buffer[:num_bytes])
            at += num_bytes
    return digest.digest()
