"""A prefix cache that finds the longest prefix of any prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.actors.engine.block_pool import BlockId, BlockPool
from shoal.actors.engine.eviction_queue import EvictionQueue
from shoal.actors.engine.prefix_changes import ChangeLog
from shoal.actors.engine.segment_cache import SegmentCache
from shoal.actors.engine.transfers import Piece
from shoal.kvstore.block_hash import BlockKey


@dataclass(frozen=True, slots=True)
class _Entry:
    block: BlockId
    parent: BlockKey


class RadixPrefixCache:
    """A radix tree whose edges are block keys, kept as a flat map: a chained key is a path from the root.

    So a match is one lookup a block, and no node has to be split or searched. Blocks that nobody uses stand
    in one queue, in the order in which they were unlocked, each sequence's tail first. Since using a block
    means using those before it, a block enters the queue after all its children did: its head is always a
    leaf, and the one that was used last longest ago.
    """

    keeps = True

    def __init__(self, pool: BlockPool, segments: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[BlockKey, _Entry] = {}  # parents before children
        self._key_of: dict[BlockId, BlockKey] = {}
        self._queue = EvictionQueue(pool)
        self.changes = ChangeLog()
        self.segments = SegmentCache(segments, self.changes)

    @property
    def num_evictable(self) -> int:
        return len(self._queue)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        blocks = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def num_unused(self, hit: Sequence[BlockId]) -> int:
        return self._queue.num_unused(hit)

    def lock(self, blocks: Sequence[BlockId]) -> None:
        self._queue.pin(blocks)

    def unlock(self, blocks: Sequence[BlockId]) -> None:
        self._pool.release(blocks)
        for block in reversed(blocks):
            if (key := self._key_of.get(block)) is not None:
                self._queue.put(block)
                self.segments.touch(key)

    def insert(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> list[BlockId]:
        kept = []
        for key, block in zip(keys, blocks, strict=True):
            entry = self._entries.get(key)
            if entry is None:
                self._pool.pin([block])
                entry = self._entries[key] = _Entry(block, parent)
                self._key_of[block] = key
                self.changes.stored(key)
            elif entry.block != block:
                self.lock([entry.block])
            kept.append(entry.block)
            parent = key
        return kept

    def evict(self, num_blocks: int) -> None:
        for block in self._queue.take(num_blocks):
            key = self._key_of.pop(block)
            self.segments.detach(key)
            del self._entries[key]
            self._pool.release([block])
            self.changes.evicted(key)

    def reset(self) -> None:
        for key in self._entries:
            self.changes.removed(key)
        self.segments.reset()
        self._pool.release([entry.block for entry in self._entries.values()])
        self._entries.clear()
        self._key_of.clear()
        self._queue.clear()

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(name for key in self._entries for name in (key, *self.segments.names(key)))

    def piece(self, key: BlockKey) -> Piece | None:
        entry = self._entries.get(key)
        return None if entry is None else Piece(key=key, parent=entry.parent, block=entry.block)

    def first_to_go(self) -> Iterable[BlockKey]:
        return (self._key_of[block] for block in self._queue)

    def start_saving(self, block: BlockId) -> None:
        self._queue.start_saving(block)

    def end_saving(self, block: BlockId) -> None:
        self._queue.end_saving(block)

    def owned(self) -> list[BlockId]:
        return [*self._key_of, *self._queue.saving()]

    def check(self) -> None:
        assert self._key_of == {entry.block: key for key, entry in self._entries.items()}
        self._queue.check(self._key_of)
        age = {block: i for i, block in enumerate(self._queue)}
        seen: set[BlockKey] = set()
        for key, entry in self._entries.items():
            parent = self._entries.get(entry.parent)
            assert parent is None or entry.parent in seen, "a child before its parent"
            if parent is not None and parent.block in age:
                assert age.get(entry.block, len(age)) < age[parent.block], "a parent goes before its child"
            seen.add(key)
        self.segments.check(self._entries)
        self.changes.check(set(self.keys()))
