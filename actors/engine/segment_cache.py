"""Which state segments are at hand, by the blocks whose state they are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.actors.engine.block_pool import BlockId, BlockPool
from shoal.actors.engine.eviction_queue import EvictionQueue
from shoal.actors.engine.prefix_changes import ChangeLog
from shoal.actors.engine.transfers import Piece
from shoal.kvstore.block_hash import BlockKey, segment_key

_INTERIOR, _KEPT = 0, 1


@dataclass(slots=True)
class _Entry:
    segment: BlockId
    name: BlockKey
    tier: int = _INTERIOR


class SegmentCache:
    """An owner of state segments, each of them of a cached block.

    Those that nobody uses wait in two queues. What no boundary needs to which somebody is likely to come back
    (the end of a prompt or of a turn, a place where prompts part) goes first, then what such a boundary
    needs; within each, what was used longest ago. A segment is used when a sequence takes up its state there,
    and with its block: when a sequence gives its blocks back, the tail of its path goes before its head.
    """

    def __init__(self, pool: BlockPool, changes: ChangeLog) -> None:
        self._pool = pool
        self._changes = changes
        self._entries: dict[BlockKey, _Entry] = {}
        self._key_of: dict[BlockId, BlockKey] = {}
        self._queue = EvictionQueue(pool, num_tiers=2)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the segment of the block of this key is at hand."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        return len(self._queue)

    def lock(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Become an owner of the segments of these blocks, which are all at hand."""
        segments = [self._entries[key].segment for key in keys]
        self._queue.pin(segments)
        return segments

    def unlock(self, segments: Sequence[BlockId]) -> None:
        """Drop an owner of each, cached or not."""
        self._pool.release(segments)
        for segment in reversed(segments):
            self._put(segment)

    def attach(self, key: BlockKey, segment: BlockId, *, kept: bool) -> bool:
        """Become an owner of the segment of a cached block. False, and nothing done, if the block has one."""
        if key in self._entries:
            return False
        self._pool.pin([segment])
        entry = self._entries[key] = _Entry(segment, segment_key(key), _KEPT if kept else _INTERIOR)
        self._key_of[segment] = key
        self._changes.stored(entry.name)
        return True

    def keep(self, key: BlockKey) -> None:
        """Somebody is likely to come back to a boundary that needs it, if it is at hand."""
        entry = self._entries.get(key)
        if entry is not None and entry.tier != _KEPT:
            entry.tier = _KEPT
            self._put(entry.segment)

    def give_up(self, key: BlockKey) -> None:
        """A later one has taken its place, if it was of no other use."""
        entry = self._entries.get(key)
        if entry is not None and entry.tier != _KEPT:
            self.detach(key)

    def touch(self, key: BlockKey) -> None:
        """Its block has been used."""
        if (entry := self._entries.get(key)) is not None:
            self._put(entry.segment)

    def evict(self, num_segments: int) -> None:
        """Free so many, at most num_evictable."""
        for segment in self._queue.take(num_segments):
            self._drop(self._key_of[segment])

    def detach(self, key: BlockKey) -> None:
        """Its block is no longer cached."""
        if key in self._entries:
            self._queue.forget(self._entries[key].segment)
            self._drop(key)

    def reset(self) -> None:
        """Forget all. Segments that are in use stay with their users."""
        for entry in self._entries.values():
            self._changes.removed(entry.name)
        self._pool.release([entry.segment for entry in self._entries.values()])
        self._entries.clear()
        self._key_of.clear()
        self._queue.clear()

    def names(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """What its segment is called, if it is at hand."""
        entry = self._entries.get(key)
        return () if entry is None else (entry.name,)

    def piece(self, key: BlockKey) -> Piece | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        return Piece(key=entry.name, parent=key, segment=entry.segment, kept=entry.tier == _KEPT)

    def first_to_go(self) -> Iterable[BlockKey]:
        """Blocks whose segments nobody uses, in the order in which these are given up."""
        return (self._key_of[segment] for segment in self._queue)

    def start_saving(self, segment: BlockId) -> None:
        self._queue.start_saving(segment)

    def end_saving(self, segment: BlockId) -> None:
        self._queue.end_saving(segment)

    def owned(self) -> list[BlockId]:
        """What the cache and the copies that save own, with repetition."""
        return [*self._key_of, *self._queue.saving()]

    def _put(self, segment: BlockId) -> None:
        if (key := self._key_of.get(segment)) is not None:
            self._queue.put(segment, self._entries[key].tier)

    def _drop(self, key: BlockKey) -> None:
        entry = self._entries.pop(key)
        del self._key_of[entry.segment]
        self._pool.release([entry.segment])
        self._changes.evicted(entry.name)

    def check(self, cached: Iterable[BlockKey]) -> None:
        assert self._key_of == {entry.segment: key for key, entry in self._entries.items()}
        assert self._entries.keys() <= set(cached), "a segment without its block"
        self._queue.check(self._key_of)
