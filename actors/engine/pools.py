"""What one sequence owns: paged blocks, a row of tokens, and if its model has state a slot and segments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.actors.engine.block_pool import NO_BLOCK, Admission, BlockId, BlockPool
from shoal.actors.engine.prefix_cache import PrefixCacheName, prefix_cache
from shoal.actors.engine.step import Copy


def blocks_needed(*, history: int, in_flight: int = 0, drafts: int = 0, block_size: int) -> int:
    """Blocks that cover every position a step may write.

    history: tokens known to the host. in_flight: tokens that steps not yet committed will draw.
    drafts: guesses that the next step verifies. Without the last two a step could write beyond its table.
    """
    return -(-(history + in_flight + drafts) // block_size)


@dataclass(slots=True)
class Holding:
    """Position p lives in block `block_table[p // block_size]` at offset `p % block_size`."""

    block_table: list[BlockId] = field(default_factory=list)
    row: BlockId = NO_BLOCK
    slot: BlockId = NO_BLOCK
    segments: dict[int, BlockId] = field(default_factory=dict)
    """By the index of the block whose state they are."""
    _frozen: tuple[BlockId, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def frozen_table(self) -> tuple[BlockId, ...]:
        """The table for a plan: the same object until the table changes, so that a step copies nothing."""
        if self._frozen is None:
            self._frozen = tuple(self.block_table)
        return self._frozen

    def changed(self) -> None:
        self._frozen = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A holding that goes on where another has come to, and what has to be copied before it can."""

    holding: Holding
    blocks: tuple[Copy, ...]
    slot: Copy | None
    sources: Holding
    """An owner of what is copied: to be released when the copies have been made, and no sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Pieces by state: `used` by sequences, `cached` and nobody's, `free`."""

    blocks: dict[str, int]
    segments: dict[str, int]

    @property
    def share_of_blocks(self) -> float:
        """That sequences use, from 0 to 1."""
        return self.blocks["used"] / max(1, sum(self.blocks.values()))


class Pools:
    """The pools of one engine, asked and paid together: a sequence needs blocks, a row and a slot to run.

    Blocks that nobody uses but the prefix cache count as available; they are evicted when they are needed.
    So are segments, which nobody needs: without one, a boundary is not taken up again.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        num_slots: int = 0,
        num_segments: int = 0,
        cache: PrefixCacheName = "radix",
    ) -> None:
        """All counts include ID 0, which is never issued; num_slots 0 is a model without state.

        A cache that keeps no blocks keeps no segments: then there are none.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.block_size = block_size
        self.blocks = BlockPool(num_blocks)
        self.rows = BlockPool(num_rows)
        self.slots = BlockPool(num_slots) if num_slots else None
        self.segments = BlockPool(1 if cache == "naive" else max(1, num_segments))
        self.prefix_cache = prefix_cache(cache, self.blocks, self.segments)
        self.num_evicted_blocks = 0

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.blocks.num_free + self.prefix_cache.num_evictable

    @property
    def num_available_segments(self) -> int:
        return self.segments.num_free + self.prefix_cache.segments.num_evictable

    def room_beside(self, hit: Sequence[BlockId]) -> int:
        """Blocks that are available once a match in the prefix cache has been locked."""
        return self.num_available - self.prefix_cache.num_unused(hit)

    def has_blocks(self, num_positions: int, *, hit: Sequence[BlockId] = (), headroom: int = 0) -> bool:
        """Whether there are blocks for so many positions now, with `headroom` left for the others.

        hit: blocks of the first positions, matched in the prefix cache.
        """
        wanted = blocks_needed(history=num_positions, block_size=self.block_size)
        return wanted - len(hit) + headroom <= self.room_beside(hit)

    def admission(self, num_positions: int, *, hit: Sequence[BlockId] = (), headroom: int = 0) -> Admission:
        """May a new sequence claim this many positions? As `has_blocks`, and for all the pools."""
        wanted = blocks_needed(history=num_positions, block_size=self.block_size)
        if self.blocks.admission(wanted) is Admission.NEVER:
            return Admission.NEVER
        if not self.has_blocks(num_positions, hit=hit, headroom=headroom):
            return Admission.LATER
        for pool in (self.rows, self.slots):
            if pool is not None and (answer := pool.admission(1)) is not Admission.OK:
                return answer
        return Admission.OK

    def claim(self, num_positions: int, *, hit: Sequence[BlockId] = ()) -> Holding:
        """The blocks of the whole length, a row and a slot, for a sequence that `admission` answered OK."""
        wanted = blocks_needed(history=num_positions, block_size=self.block_size)
        self.prefix_cache.lock(hit)
        return Holding(
            block_table=[*hit, *self.claim_blocks(wanted - len(hit))],
            row=self.rows.allocate(1)[0],
            slot=self.slots.allocate(1)[0] if self.slots else NO_BLOCK,
        )

    def may_fork(self, num_positions: int, *, headroom: int) -> bool:
        """Whether there is now what a fork at this position has for itself, with `headroom` blocks left."""
        num_copied = 1 if num_positions % self.block_size else 0
        return num_copied + headroom <= self.num_available and all(
            pool.num_free for pool in (self.rows, self.slots) if pool is not None
        )

    def fork(self, parent: Holding, num_positions: int) -> Branch:
        """A holding of its own over the parent's first rows, if `may_fork`.

        Complete blocks are never written again, so both own them. The tail, if it is not full, and the slot
        will be written by either: the fork gets new ones, and copies are to be made.
        """
        num_complete, rest = divmod(num_positions, self.block_size)
        shared = parent.block_table[:num_complete]
        tail = parent.block_table[num_complete : num_complete + 1] if rest else []
        self.prefix_cache.lock([*shared, *tail])
        copies = self.claim_blocks(len(tail))
        holding = Holding(block_table=[*shared, *copies], row=self.rows.allocate(1)[0])
        sources, slot = Holding(block_table=tail), None
        if self.slots:
            self.slots.pin([parent.slot])
            sources.slot, holding.slot = parent.slot, self.slots.allocate(1)[0]
            slot = (parent.slot, holding.slot)
        blocks = tuple(zip(tail, copies, strict=True))
        return Branch(holding=holding, blocks=blocks, slot=slot, sources=sources)

    def claim_segment(self) -> BlockId | None:
        """One that is free or can be evicted, if there is any."""
        if not self.segments.num_free:
            if not self.prefix_cache.segments.num_evictable:
                return None
            self.prefix_cache.segments.evict(1)
        return self.segments.allocate(1)[0]

    def claim_blocks(self, num_blocks: int) -> list[BlockId]:
        """At most num_available."""
        num_evicted = max(0, num_blocks - self.blocks.num_free)
        self.prefix_cache.evict(num_evicted)
        self.num_evicted_blocks += num_evicted
        return self.blocks.allocate(num_blocks)

    def resize(self, holding: Holding, num_blocks: int, *, headroom: int = 0) -> bool:
        """Grow or shrink the table to exactly num_blocks. False if there are too few for it to grow and leave
        `headroom`, and nothing changed."""
        table = holding.block_table
        missing = num_blocks - len(table)
        if missing == 0:
            return True
        if missing > 0 and missing + headroom > self.num_available:
            return False
        if missing > 0:
            table.extend(self.claim_blocks(missing))
        else:
            self.prefix_cache.unlock(table[num_blocks:])
            del table[num_blocks:]
        holding.changed()
        return True

    def release(self, holding: Holding) -> None:
        """Give everything back; the holding is empty afterwards."""
        self.prefix_cache.unlock(holding.block_table)
        holding.block_table.clear()
        holding.changed()
        if holding.row != NO_BLOCK:
            self.rows.release([holding.row])
            holding.row = NO_BLOCK
        if self.slots and holding.slot != NO_BLOCK:
            self.slots.release([holding.slot])
            holding.slot = NO_BLOCK
        if holding.segments:
            self.prefix_cache.segments.unlock(list(holding.segments.values()))
            holding.segments.clear()

    def usage(self) -> Usage:
        return Usage(
            blocks=_usage(self.blocks, self.prefix_cache.num_evictable),
            segments=_usage(self.segments, self.prefix_cache.segments.num_evictable),
        )

    def outstanding(self) -> dict[str, int]:
        """What somebody owns beside the prefix cache."""
        return {
            "blocks": self.blocks.num_usable - self.num_available,
            "segments": self.segments.num_usable - self.num_available_segments,
            "rows": self.rows.num_usable - self.rows.num_free,
            "slots": self.slots.num_usable - self.slots.num_free if self.slots else 0,
        }

    def check(self, holdings: Iterable[Holding]) -> None:
        """The owners are exactly these holdings, the prefix cache and the copies that save what it has."""
        held = list(holdings)
        self.prefix_cache.check()
        tables = [block for holding in held for block in holding.block_table]
        self.blocks.check([*tables, *self.prefix_cache.owned()])
        self.rows.check([holding.row for holding in held if holding.row != NO_BLOCK])
        if self.slots:
            self.slots.check([holding.slot for holding in held if holding.slot != NO_BLOCK])
        segments = [segment for holding in held for segment in holding.segments.values()]
        self.segments.check([*segments, *self.prefix_cache.segments.owned()])


def _usage(pool: BlockPool, num_cached: int) -> dict[str, int]:
    """Another thread's look may see a piece move, and then counts it as used."""
    num_free = pool.num_free
    return {"used": max(0, pool.num_usable - num_free - num_cached), "cached": num_cached, "free": num_free}
