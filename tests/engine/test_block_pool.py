"""Blocks and their owners: the block lab of DeepInfer, section 4.1, with its exact numbers; then rules."""

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.actors.engine.block_pool import Admission, BlockId, BlockNotOwned, BlockPool, OutOfBlocks
from shoal.actors.engine.pools import Holding, Pools, blocks_needed


def test_the_block_lab() -> None:
    """Eight blocks of four positions; block 0 is never issued."""
    pools = Pools(num_blocks=8, block_size=4, num_rows=9)

    a, b = pools.claim(6), pools.claim(9)
    assert (a.block_table, b.block_table) == ([1, 2], [3, 4, 5])
    assert pools.blocks.num_free == 2

    _fit(pools, a, history=8)
    assert a.block_table == [1, 2]
    _fit(pools, a, history=9)
    assert a.block_table == [1, 2, 6], "the third block comes with the ninth token"

    _fit(pools, a, history=11, drafts=2)
    assert a.block_table == [1, 2, 6, 7], "positions for drafts exist before the step writes them"
    assert pools.blocks.num_free == 0
    _fit(pools, a, history=12)
    assert a.block_table == [1, 2, 6], "both drafts were rejected: the surplus goes back at once"

    assert pools.admission(4 * 4) is Admission.LATER
    pools.release(b)
    assert pools.admission(4 * 4) is Admission.OK
    assert pools.admission(8 * 4) is Admission.NEVER, "waiting would not help: only seven can be issued"
    assert pools.blocks.allocate(4) == [7, 5, 4, 3], "B's last block is reused before its first"


def _fit(pools: Pools, holding: Holding, *, history: int, drafts: int = 0) -> None:
    needed = blocks_needed(history=history, drafts=drafts, block_size=pools.block_size)
    assert pools.resize(holding, needed)


def test_a_block_outlives_its_first_owner() -> None:
    pool = BlockPool(num_blocks=4)
    parent = pool.allocate(2)
    pool.pin(parent[:1])
    pool.release(parent)
    assert pool.allocate(2) == [3, 2], "block 1 is still the child's"
    assert pool.admission(1) is Admission.LATER


def test_blocks_needed_counts_what_the_history_does_not_show() -> None:
    assert blocks_needed(history=8, block_size=4) == 2
    assert blocks_needed(history=8, in_flight=1, block_size=4) == 3
    assert blocks_needed(history=11, in_flight=1, drafts=5, block_size=4) == 5


def test_misuse_names_the_block() -> None:
    pool = BlockPool(num_blocks=3)
    (block,) = pool.allocate(1)
    pool.release([block])
    for misuse in (pool.release, pool.pin):
        for wrong in (block, BlockId(0), BlockId(99), BlockId(-1)):
            with pytest.raises(BlockNotOwned, match=str(wrong)):
                misuse([wrong])
    with pytest.raises(OutOfBlocks, match="wanted 3 blocks, 2 free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
    pool.check()


def test_a_sequence_needs_both_pools() -> None:
    pools = Pools(num_blocks=10, block_size=4, num_rows=9, num_slots=2)
    first = pools.claim(4)
    assert first.slot == 1
    assert pools.admission(4) is Admission.LATER, "blocks are free, but no state slot is"
    pools.release(first)
    assert pools.admission(4) is Admission.OK
    assert (first.block_table, first.slot) == ([], 0)
    pools.check([])


def test_headroom_makes_an_arrival_wait_but_never_refuses_it() -> None:
    pools = Pools(num_blocks=4, block_size=4, num_rows=9)
    assert pools.admission(12, headroom=1) is Admission.LATER
    assert pools.admission(12) is Admission.OK
    assert pools.admission(13, headroom=1) is Admission.NEVER


def test_a_table_that_cannot_grow_stays_as_it_was() -> None:
    pools = Pools(num_blocks=4, block_size=4, num_rows=9)
    holding = pools.claim(8)
    assert not pools.resize(holding, 4)
    assert holding.block_table == [1, 2]
    pools.check([holding])


class PoolModel(RuleBasedStateMachine):
    """Against the obvious model: a list of holders, each with its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[list[BlockId]] = []

    @rule(num_blocks=st.integers(0, 8))
    def allocate(self, num_blocks: int) -> None:
        free = self.pool.num_free
        if self.pool.admission(num_blocks) is Admission.OK:
            self.holders.append(self.pool.allocate(num_blocks))
        else:
            assert num_blocks > free
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(num_blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.holders)))
        self.pool.pin(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def owners_are_the_holders(self) -> None:
        self.pool.check(self._held())

    def _held(self) -> Iterator[BlockId]:
        return (block for holder in self.holders for block in holder)


TestPoolModel = PoolModel.TestCase
