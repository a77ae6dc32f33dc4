"""Memory is given away only when the steps that use it have finished; why, test_forks.py shows."""

import pytest

from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.pools import Holding, Pools

BLOCK_SIZE = 4


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
