"""In which order cached pieces of memory are given up."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from shoal.actors.engine.block_pool import BlockId, BlockPool


class EvictionQueue:
    """The cached pieces of one pool that nobody uses, those to be given up first in front.

    The cache is an owner of each. A copy that saves a piece is another, but no user: it changes nothing of
    the order. Should the piece's turn come meanwhile, the cache lets go of it; it is free when the copy ends.
    """

    def __init__(self, pool: BlockPool, *, num_tiers: int = 1) -> None:
        """num_tiers: nothing of a tier is given up while there is something in one before it."""
        self._pool = pool
        self._tiers = tuple(OrderedDict[BlockId, None]() for _ in range(num_tiers))
        self._saving: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        """What can be made free at once."""
        num_saving = 0
        if self._saving:
            num_saving = sum(len(tier.keys() & self._saving.keys()) for tier in self._tiers)
        return sum(map(len, self._tiers)) - num_saving

    def __iter__(self) -> Iterator[BlockId]:
        return (block for tier in self._tiers for block in tier)

    def num_unused(self, blocks: Iterable[BlockId]) -> int:
        """How many of these `len` would lose if they were pinned."""
        return sum(self._pool.num_owners(block) == 1 for block in blocks)

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Use them."""
        self._pool.pin(blocks)
        for block in blocks:
            self._remove(block)

    def put(self, block: BlockId, tier: int = 0) -> None:
        """Last of its tier, if it is cached and nobody uses it."""
        self._remove(block)
        if self._is_unused(block):
            self._tiers[tier][block] = None

    def take(self, num_blocks: int) -> list[BlockId]:
        """Those to be given up, so that num_blocks become free when the cache lets go of them."""
        if num_blocks > len(self):
            raise ValueError(f"cannot evict {num_blocks} of {len(self)} blocks")
        taken: list[BlockId] = []
        while num_blocks:
            tier = next(tier for tier in self._tiers if tier)
            block, _ = tier.popitem(last=False)
            taken.append(block)
            num_blocks -= block not in self._saving
        return taken

    def forget(self, block: BlockId) -> None:
        """The cache lets go of it out of turn."""
        self._remove(block)

    def clear(self) -> None:
        """The cache lets go of everything."""
        for tier in self._tiers:
            tier.clear()

    def start_saving(self, block: BlockId) -> None:
        self._pool.pin([block])
        self._saving[block] += 1

    def end_saving(self, block: BlockId) -> None:
        self._saving[block] -= 1
        if not self._saving[block]:
            del self._saving[block]
        self._pool.release([block])

    def saving(self) -> Iterable[BlockId]:
        """What copies own, with repetition."""
        return self._saving.elements()

    def _is_unused(self, block: BlockId) -> bool:
        return self._pool.num_owners(block) == 1 + self._saving[block]

    def _remove(self, block: BlockId) -> None:
        for tier in self._tiers:
            tier.pop(block, None)

    def check(self, cached: Iterable[BlockId]) -> None:
        unused = sorted(block for block in cached if self._is_unused(block))
        assert unused == sorted(self), f"unused {unused}, queued {sorted(self)}"
