"""When may memory that a step still uses be given to somebody else? When that step has finished."""

from collections.abc import Iterator

from shoal.actors.engine.pools import Holding, Pools


class DeferredRelease:
    """Owns what nobody wants any more until every step that may still read or write it has finished.

    A step is planned long before it runs, and it was given its blocks when it was planned. Were they released
    at once, the next plan could hand them out; that this would often go well, because one device runs its
    steps in order, is nothing that an owner of memory should depend on.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._held: dict[int, list[Holding]] = {}  # by the last step that uses it
        self._finished = 0

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks come back when the steps in flight have finished."""
        return any(holding.block_table for holding in self.holdings())

    def release(self, holding: Holding, *, after_step: int) -> None:
        """Take over a holding that no step after this one uses; 0 if no step ever did."""
        if after_step <= self._finished:
            self._pools.release(holding)
        else:
            self._held.setdefault(after_step, []).append(holding)

    def step_finished(self, step_id: int) -> None:
        """Steps are numbered from 1 and finish in order."""
        assert step_id == self._finished + 1, f"step {step_id} finished after step {self._finished}"
        self._finished = step_id
        for holding in self._held.pop(step_id, ()):
            self._pools.release(holding)

    def holdings(self) -> Iterator[Holding]:
        return (holding for held in self._held.values() for holding in held)
