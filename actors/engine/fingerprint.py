"""What keys and values depend on beside the tokens: engines of one fingerprint may share them."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from shoal.actors.engine.config import EngineConfig

_PIECE_BYTES = 64 << 20


def fingerprint(config: EngineConfig, *, numerics_id: str) -> bytes:
    """Equal only if the weights, the model's configuration and the numerics are, to the bit.

    numerics_id: the backend's, and what the model's path adds.

    Reads every byte of the weights, about 1 GB/s a thread where the CPU has SHA instructions.
    """
    checkpoint = Path(config.checkpoint)
    about = {
        "config.json": json.loads((checkpoint / "config.json").read_text(encoding="utf-8")),
        "numerics_id": numerics_id,
        "block_size": config.block_size,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    whole = sha256(json.dumps(about, sort_keys=True).encode())
    with ThreadPoolExecutor(config.threads) as threads:
        for digest in threads.map(_digest, _pieces(checkpoint)):
            whole.update(digest)
    return whole.digest()


def _pieces(checkpoint: Path) -> Iterator[tuple[Path, int]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        for offset in range(0, file.stat().st_size, _PIECE_BYTES):
            yield file, offset


def _digest(piece: tuple[Path, int]) -> bytes:
    path, offset = piece
    with path.open("rb") as file:
        return sha256(os.pread(file.fileno(), _PIECE_BYTES, offset)).digest()
