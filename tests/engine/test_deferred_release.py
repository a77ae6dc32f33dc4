"""Memory is given away only when the steps that use it have finished: the sharing lab of DeepInfer, 4.2."""

import pytest

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.pools import Holding, Pools

BLOCK_SIZE, COPY_STEP = 4, 1


class SharingLab:
    """Four blocks whose rows hold token IDs; a copy that is queued when a prompt of ten tokens is forked."""

    def __init__(self) -> None:
        self.pools = Pools(num_blocks=5, block_size=BLOCK_SIZE, num_rows=4)
        self.deferred = DeferredRelease(self.pools)
        self.rows: dict[BlockId, list[int]] = {}

        self.parent = self.pools.claim(10)
        for position in range(10):
            self._write(self.parent.block_table, position, 100 + position)

        self.pools.blocks.pin(self.parent.block_table)
        shared, tail = self.parent.block_table[:2], self.parent.block_table[2]
        self.child = Holding([*shared, *self.pools.blocks.allocate(1)])
        self.pin_on_tail = Holding([tail])
        self.copy = (tail, self.child.block_table[2])
        self.owners = {block: self.pools.blocks.num_owners(BlockId(block)) for block in range(1, 5)}

    def writer_takes_a_block(self) -> list[BlockId]:
        """A new request, as soon as there is a block for it."""
        holding = Holding()
        self.pools.resize(holding, 1)
        for position in range(len(holding.block_table) * BLOCK_SIZE):
            self._write(holding.block_table, position, 900 + position)
        return holding.block_table

    def run_copy(self) -> None:
        source, target = self.copy
        self.rows[target] = list(self.rows[source])

    def child_reads(self) -> list[int]:
        table = self.child.block_table
        return [self.rows[table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(10)]

    def _write(self, table: list[BlockId], position: int, token: int) -> None:
        rows = self.rows.setdefault(table[position // BLOCK_SIZE], [0] * BLOCK_SIZE)
        rows[position % BLOCK_SIZE] = token


@pytest.fixture
def lab() -> SharingLab:
    lab = SharingLab()
    assert (lab.parent.block_table, lab.child.block_table) == ([1, 2, 3], [1, 2, 4])
    assert lab.owners == {1: 2, 2: 2, 3: 2, 4: 1}
    assert lab.copy == (3, 4)
    lab.pools.release(lab.parent)
    assert lab.pools.blocks.num_free == 0, "blocks 1 and 2 are still the child's, 3 is pinned for the copy"
    return lab


def test_a_tail_released_before_its_copy_is_overwritten(lab: SharingLab) -> None:
    """Why there is a DeferredRelease."""
    lab.pools.release(lab.pin_on_tail)
    assert lab.writer_takes_a_block() == [3], "before the copy has run"
    lab.run_copy()
    assert lab.child_reads() == [*range(100, 108), 900, 901]


def test_48_a_tail_released_after_its_copy_is_intact(lab: SharingLab) -> None:
    lab.deferred.release(lab.pin_on_tail, after_step=COPY_STEP)
    lab.pools.check([lab.child, *lab.deferred.holdings()])
    assert lab.writer_takes_a_block() == [], "the writer waits"
    lab.run_copy()
    lab.deferred.step_finished(COPY_STEP)
    assert lab.writer_takes_a_block() == [3]
    assert lab.child_reads() == list(range(100, 110))


def test_each_holding_waits_for_its_own_step() -> None:
    pools = Pools(num_blocks=5, block_size=BLOCK_SIZE, num_rows=4)
    deferred = DeferredRelease(pools)
    never_used, first, second = (pools.claim(4) for _ in range(3))
    deferred.release(second, after_step=2)
    deferred.release(first, after_step=1)
    deferred.release(never_used, after_step=0)
    assert pools.blocks.num_free == 2 and deferred.holds_blocks
    deferred.step_finished(1)
    assert pools.blocks.num_free == 3 and deferred.holds_blocks
    deferred.step_finished(2)
    assert pools.blocks.num_free == 4 and not deferred.holds_blocks
    assert first == second == never_used == Holding()


@pytest.mark.parametrize("step", [2, 0])
def test_steps_finish_in_order(step: int) -> None:
    deferred = DeferredRelease(Pools(num_blocks=2, block_size=BLOCK_SIZE, num_rows=2))
    with pytest.raises(AssertionError, match=f"step {step} finished after step 0"):
        deferred.step_finished(step)
