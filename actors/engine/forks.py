"""Who begins where another sequence has come to: the choices of one prompt, which is computed once."""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Series
from dataclasses import replace

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.sequence import Sequence
from shoal.actors.engine.step import Fork, SequenceId, SequenceStep, StepPlan

Computed = tuple[SequenceId, BlockId]
"""A sequence, and the row of tokens that it had when its step was planned."""


class Forks:
    """Those that were forked, until the step that draws their first tokens has finished.

    They share rows that steps in flight compute for another, their parent. So what becomes of such a step is
    theirs too, also of one that was planned before they were forked: its rows are committed for them as for
    their parent, and if it fails they end. What becomes of the parent is not: it may end, or lose all, and
    they go on with what they own.
    """

    def __init__(self, pools: Pools, deferred: DeferredRelease) -> None:
        self._pools = pools
        self._deferred = deferred
        self._in_flight: dict[SequenceId, tuple[Fork, ...]] = {}  # by whom they were forked from
        self.num_forked = 0

    def next(self, parent: Sequence, waiting: Iterable[Sequence], *, headroom: int) -> Sequence | None:
        """The first that waits, if it can be forked from `parent`, whose last token is in the next step.

        In the queue's order, as with any admission: whoever cannot start holds back those behind it.
        """
        first = next((sequence for sequence in waiting if sequence.fetching is None), None)
        if first is None or parent.is_outdated or not first.has_same_tokens(parent):
            return None
        return first if self._pools.may_fork(len(parent.tokens), headroom=headroom) else None

    def fork(self, parent: Sequence, sequence: Sequence) -> Fork:
        """Give a sequence what it needs to run, in the step that has just been planned for its parent."""
        branch = self._pools.fork(parent.holding, len(parent.tokens))
        self._deferred.release(branch.sources, after_step=parent.last_step)
        sequence.fork(parent, branch.holding)
        return Fork(
            sequence_id=sequence.sequence_id,
            row=branch.holding.row,
            draw=sequence.draw,
            blocks=branch.blocks,
            slot=branch.slot,
        )

    def begin(self, step: SequenceStep, forks: Series[Fork]) -> SequenceStep:
        if not forks:
            return step
        self._in_flight[step.sequence_id] = tuple(forks)
        self.num_forked += len(forks)
        return replace(step, forks=tuple(forks))

    def computed_in(self, step: SequenceStep) -> Iterator[Computed]:
        """Those for whom a step's rows were computed."""
        yield step.sequence_id, BlockId(step.row)
        for fork in self._in_flight.get(step.sequence_id, ()):
            yield fork.sequence_id, BlockId(fork.row)

    def end(self, plan: StepPlan) -> None:
        """The plan's step has finished, or has failed."""
        for step in plan.sequences:
            if step.forks:
                del self._in_flight[step.sequence_id]

    def check(self, running: Iterable[Sequence]) -> None:
        """Only complete blocks have several users: what a sequence is to write is its own."""
        holdings = [sequence.holding for sequence in running]
        users = Counter(block for holding in holdings for block in holding.block_table)
        for sequence in running:
            written = max(sequence.num_planned // self._pools.block_size, sequence.resume.boundary)
            assert all(users[block] == 1 for block in sequence.holding.block_table[written:])
        for owned in ([holding.row for holding in holdings], [holding.slot for holding in holdings]):
            assert max(Counter(owned).values(), default=1) == 1 or set(owned) == {NO_BLOCK}
        forked = [fork.sequence_id for forks in self._in_flight.values() for fork in forks]
        for sequence in running:
            assert sequence.sequence_id not in forked or sequence.num_drawing, "nothing is drawn for it"
