"""What stores say, and what is said to them: frozen data, to which the actors' own messages add theirs."""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, NewType

from shoal.kvstore.block_hash import BlockKey

StoreId = NewType("StoreId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """One block or segment within an extent's bytes."""

    key: BlockKey
    parent: BlockKey
    """What it is of no use without: the block before a block, the block of a segment."""
    offset: int
    size: int
    checksum: int
    """xxh3-64 of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is saved, fetched and evicted as one: up to 8 MiB of consecutive blocks, or of segments."""

    extent_id: str
    """Unique in the cluster: it begins with the name of the engine that made it."""
    entries: tuple[StoredEntry, ...]
    """One behind the other from offset 0. Blocks from the head of their path on, segments from its tail, so
    that the first one's parent is what the whole builds upon."""
    num_bytes: int
    kept: bool = True
    """False for segments of boundaries to which nobody is likely to come back: they are evicted first."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError(f"extent {self.extent_id!r} has no entries")
        end = 0
        for entry in self.entries:
            if not entry.key or entry.size < 0 or entry.offset != end:
                raise ValueError(f"extent {self.extent_id!r}: an entry without a key, or not behind the last")
            end += entry.size
        keys = set(self.keys)
        if end != self.num_bytes or len(keys) < len(self.entries) or self.parent in keys:
            raise ValueError(f"extent {self.extent_id!r}: a key twice, or {self.num_bytes} bytes for {end}")

    @property
    def parent(self) -> BlockKey:
        return self.entries[0].parent

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(entry.key for entry in self.entries)

    def without(self, keys: Container[BlockKey]) -> "Extent | None":
        """The same without these, closed up; None if nothing is left."""
        if not any(key in keys for key in self.keys):
            return self
        entries, end = [], 0
        for entry in self.entries:
            if entry.key not in keys:
                entries.append(replace(entry, offset=end))
                end += entry.size
        return replace(self, entries=tuple(entries), num_bytes=end) if entries else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadExtent:
    """Wanted entries of one extent, as they lie in its bytes; `ticket` leads to these, see transfer."""

    entries: tuple[StoredEntry, ...]
    ticket: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a store has of the keys it was asked for."""

    lease_id: int
    """To be handed back when the bytes have been read. It ends by itself if it is not."""
    extents: tuple[ReadExtent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a store has now of the blocks that it was asked for, by their place in the question."""

    blocks: tuple[int, ...]
    segments: tuple[int, ...]
    """The blocks whose segments it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """A KV store's account of what it holds, pushed to the router in batches. Blocks and segments alike."""

    store_id: StoreId
    sequence: int
    """Grows by one a report, so that a lost one is noticed: the keys are then asked for as a whole."""
    stored: tuple[BlockKey, ...] = ()
    """Parents first."""
    removed: tuple[BlockKey, ...] = ()
    """A key is in at most one of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSnapshot:
    """All that a store held when it made its report `sequence`."""

    store_id: StoreId
    sequence: int
    block_keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """What a ready store says of itself, for people."""

    store_id: StoreId
    node: str
    budget_bytes: int
