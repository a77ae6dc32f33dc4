"""Extents of made-up paths: the key of block i of path "a" is b"a<i>", its parent is block i - 1.

Path "a:b" branches off path "a" behind its first block.
"""

from collections.abc import Sequence

from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.messages import Extent, StoredEntry
from shoal.kvstore.store import ENTRY_BYTES

UNIT = 10 * ENTRY_BYTES
"""What one entry of these extents takes of a budget."""


def block(path: str, index: int) -> BlockKey:
    if index == 0:
        path = path.partition(":")[0]
    return BlockKey(f"{path}{index}".encode())


def blocks(path: str, first: int, end: int, *, by: str = "engine", size: int = UNIT - ENTRY_BYTES) -> Extent:
    """An extent of blocks first, ..., end - 1."""
    entries = [(block(path, i), block(path, i - 1)) for i in range(first, end)]
    return _extent(f"{by}/{path}{first}-{end}", entries, size)


def segments(
    path: str, indices: Sequence[int], *, kept: bool = True, size: int = UNIT - ENTRY_BYTES
) -> Extent:
    """An extent of the segments of these blocks; tails come first."""
    entries = [(segment(path, i), block(path, i)) for i in sorted(indices, reverse=True)]
    return _extent(f"engine/{path}-segments-{indices}", entries, size, kept=kept)


def segment(path: str, index: int) -> BlockKey:
    return segment_key(block(path, index))


def _extent(
    extent_id: str, entries: Sequence[tuple[BlockKey, BlockKey]], size: int, *, kept: bool = True
) -> Extent:
    return Extent(
        extent_id=extent_id,
        entries=tuple(
            StoredEntry(key=key, parent=parent, offset=i * size, size=size, checksum=0)
            for i, (key, parent) in enumerate(entries)
        ),
        num_bytes=len(entries) * size,
        kept=kept,
    )
