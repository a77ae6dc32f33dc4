"""Which blocks hold which prefix: computed once, then shared by all that begin with the same tokens."""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from shoal.actors.engine.block_pool import BlockId, BlockNotOwned, BlockPool
from shoal.actors.engine.prefix_changes import ChangeLog
from shoal.actors.engine.radix_cache import RadixPrefixCache
from shoal.actors.engine.segment_cache import SegmentCache
from shoal.actors.engine.transfers import Piece
from shoal.kvstore.block_hash import BlockKey

PrefixCacheName = Literal["naive", "radix"]


class PrefixCache(Protocol):
    """An owner of complete blocks, found by their keys; a key names all tokens before its block as well.

    As far as a sequence's blocks are cached, they are the cache's own: `insert` sees to it. So whoever uses a
    cached block owns all that come before it, and what nobody uses can be evicted in full.
    """

    @property
    def segments(self) -> SegmentCache:
        """Of cached blocks: a block that is evicted takes its segment along."""
        ...

    @property
    def changes(self) -> ChangeLog:
        """Of blocks and segments."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether what is inserted can be a match."""
        ...

    @property
    def num_evictable(self) -> int:
        """Blocks that can be made free at once: nobody but the cache owns them."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The blocks of the longest cached prefix. They may be evicted until they are locked."""
        ...

    def num_unused(self, hit: Sequence[BlockId]) -> int:
        """How many of a match's blocks count as evictable, until they are locked."""
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
        """Of everything cached, blocks and segments, parents first."""
        ...

    def piece(self, key: BlockKey) -> Piece | None:
        """The block of this key, if it is cached."""
        ...

    def first_to_go(self) -> Iterable[BlockKey]:
        """Blocks that nobody uses, in the order in which they are evicted."""
        ...

    def start_saving(self, block: BlockId) -> None:
        """A copy reads a cached block: it becomes an owner, which does not make the block used."""
        ...

    def end_saving(self, block: BlockId) -> None:
        """The copy has ended."""
        ...

    def owned(self) -> list[BlockId]:
        """The blocks that the cache and the copies that save own, with repetition."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the cache contradicts itself or the pool."""
        ...


class NaivePrefixCache:
    """Never hits and keeps nothing."""

    keeps = False
    num_evictable = 0

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.changes = ChangeLog()
        self.segments = SegmentCache(BlockPool(1), self.changes)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        return []

    def num_unused(self, hit: Sequence[BlockId]) -> int:
        return 0

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

    def piece(self, key: BlockKey) -> Piece | None:
        return None

    def first_to_go(self) -> Iterable[BlockKey]:
        return ()

    def start_saving(self, block: BlockId) -> None:
        raise BlockNotOwned(block)

    def end_saving(self, block: BlockId) -> None:
        raise BlockNotOwned(block)

    def owned(self) -> list[BlockId]:
        return []

    def check(self) -> None:
        pass


def prefix_cache(name: PrefixCacheName, pool: BlockPool, segments: BlockPool) -> PrefixCache:
    return NaivePrefixCache(pool) if name == "naive" else RadixPrefixCache(pool, segments)
