"""Which blocks hold which prefix: computed once, then shared by all that begin with the same tokens."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.actors.engine.block_pool import BlockId, BlockPool
from shoal.kvstore.block_hash import BlockKey

PrefixCacheName = Literal["naive", "radix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """What a cache holds and did not when it was last asked, and the other way round. No key is in both."""

    stored: tuple[BlockKey, ...] = ()
    """Parents first."""
    removed: tuple[BlockKey, ...] = ()


class PrefixCache(Protocol):
    """An owner of complete blocks, found by their keys; a key names all tokens before its block as well.

    As far as a sequence's blocks are cached, they are the cache's own: `insert` sees to it. So whoever owns a
    cached block owns all that come before it, and what nobody but the cache owns can be evicted in full.
    """

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody but the cache owns."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The blocks of the longest cached prefix. They may be evicted until they are locked."""
        ...

    def lock(self, blocks: Sequence[BlockId]) -> None:
        """Add an owner to each block of a match."""
        ...

    def unlock(self, blocks: Sequence[BlockId]) -> None:
        """Drop an owner of each block, cached or not, as BlockPool.release does."""
        ...

    def insert(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> list[BlockId]:
        """Become an owner of complete blocks that the caller owns; `parent` names what comes before them.

        Returns the blocks to use from now on. Where a key had a block already, it keeps that one and the
        caller has become an owner of it; its own is a duplicate, which it should release.
        """
        ...

    def evict(self, num_blocks: int) -> None:
        """Free so many, at most num_evictable: of those last used longest ago the tails first."""
        ...

    def reset(self) -> None:
        """Forget every prefix. Blocks that are in use stay with their users, and are not offered again."""
        ...

    def keys(self) -> tuple[BlockKey, ...]:
        """Of everything cached, parents first."""
        ...

    def take_changes(self) -> PrefixChanges:
        """Since they were last taken."""
        ...

    def blocks(self) -> Iterable[BlockId]:
        """What the cache owns, each once."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the cache contradicts itself or the pool."""
        ...


class NaivePrefixCache:
    """Never hits and keeps nothing."""

    num_evictable = 0

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        return []

    def lock(self, blocks: Sequence[BlockId]) -> None:
        self._pool.pin(blocks)

    def unlock(self, blocks: Sequence[BlockId]) -> None:
        self._pool.release(blocks)

    def insert(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> list[BlockId]:
        return list(blocks)

    def evict(self, num_blocks: int) -> None:
        if num_blocks > 0:
            raise ValueError(f"cannot evict {num_blocks} of 0 blocks")

    def reset(self) -> None:
        pass

    def keys(self) -> tuple[BlockKey, ...]:
        return ()

    def take_changes(self) -> PrefixChanges:
        return PrefixChanges()

    def blocks(self) -> Iterable[BlockId]:
        return ()

    def check(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Entry:
    block: BlockId
    parent: BlockKey


class RadixPrefixCache:
    """A radix tree whose edges are block keys, kept as a flat map: a chained key is a path from the root.

    So a match is one lookup a block, and no node has to be split or searched. Blocks that nobody else owns
    stand in one queue, in the order in which they were unlocked, each sequence's tail first. Since owning a
    block means owning those before it, a block enters the queue after all its children did: its head is
    always a leaf, and the one that was used last longest ago.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[BlockKey, _Entry] = {}  # parents before children
        self._key_of: dict[BlockId, BlockKey] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        blocks = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def lock(self, blocks: Sequence[BlockId]) -> None:
        self._pool.pin(blocks)
        for block in blocks:
            self._evictable.pop(block, None)

    def unlock(self, blocks: Sequence[BlockId]) -> None:
        self._pool.release(blocks)
        for block in reversed(blocks):
            if block in self._key_of and self._pool.num_owners(block) == 1:
                self._evictable[block] = None

    def insert(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> list[BlockId]:
        kept = []
        for key, block in zip(keys, blocks, strict=True):
            entry = self._entries.get(key)
            if entry is None:
                self._pool.pin([block])
                entry = self._entries[key] = _Entry(block, parent)
                self._key_of[block] = key
                _note(key, self._stored, undoes=self._removed)
            elif entry.block != block:
                self.lock([entry.block])
            kept.append(entry.block)
            parent = key
        return kept

    def evict(self, num_blocks: int) -> None:
        if num_blocks > len(self._evictable):
            raise ValueError(f"cannot evict {num_blocks} of {len(self._evictable)} blocks")
        for _ in range(num_blocks):
            block, _ = self._evictable.popitem(last=False)
            key = self._key_of.pop(block)
            del self._entries[key]
            self._pool.release([block])
            _note(key, self._removed, undoes=self._stored)

    def reset(self) -> None:
        for key in self._entries:
            _note(key, self._removed, undoes=self._stored)
        self._pool.release([entry.block for entry in self._entries.values()])
        self._entries.clear()
        self._key_of.clear()
        self._evictable.clear()

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._entries)

    def take_changes(self) -> PrefixChanges:
        changes = PrefixChanges(stored=tuple(self._stored), removed=tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes

    def blocks(self) -> Iterable[BlockId]:
        return self._key_of

    def check(self) -> None:
        assert self._key_of == {entry.block: key for key, entry in self._entries.items()}
        unused = {block for block in self._key_of if self._pool.num_owners(block) == 1}
        assert unused == self._evictable.keys(), f"unused {unused}, evictable {list(self._evictable)}"
        age = {block: i for i, block in enumerate(self._evictable)}
        seen: set[BlockKey] = set()
        for key, entry in self._entries.items():
            parent = self._entries.get(entry.parent)
            assert parent is None or entry.parent in seen, "a child before its parent"
            if parent is not None and parent.block in age:
                assert age.get(entry.block, len(age)) < age[parent.block], "a parent goes before its child"
            seen.add(key)
        assert self._stored.keys() <= self._entries.keys()
        assert not self._removed.keys() & self._entries.keys()


def _note(key: BlockKey, where: dict[BlockKey, None], *, undoes: dict[BlockKey, None]) -> None:
    """What was undone before anybody asked has not changed."""
    if key in undoes:
        del undoes[key]
    else:
        where[key] = None


_BY_NAME: dict[PrefixCacheName, type[NaivePrefixCache] | type[RadixPrefixCache]] = {
    "naive": NaivePrefixCache,
    "radix": RadixPrefixCache,
}


def prefix_cache(name: PrefixCacheName, pool: BlockPool) -> PrefixCache:
    return _BY_NAME[name](pool)
