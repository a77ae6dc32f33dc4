"""What one sequence owns: a table of paged blocks, and one state slot if its model has state."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.actors.engine.block_pool import NO_BLOCK, Admission, BlockId, BlockPool


def blocks_needed(*, history: int, in_flight: int = 0, drafts: int = 0, block_size: int) -> int:
    """Blocks that cover every position a step may write.

    history: tokens known to the host. in_flight: positions of steps planned but not yet committed.
    drafts: guesses that the next step verifies. Without the last two a step could write beyond its table.
    """
    return -(-(history + in_flight + drafts) // block_size)


@dataclass(slots=True)
class Holding:
    """Position p lives in block `block_table[p // block_size]` at offset `p % block_size`."""

    block_table: list[BlockId] = field(default_factory=list)
    slot: BlockId = NO_BLOCK


class Pools:
    """The paged pool and the slot pool, asked and paid together: a sequence needs both to run."""

    def __init__(self, *, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        """Both counts include ID 0, which is never issued; num_slots 0 is a model without state."""
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.block_size = block_size
        self.blocks = BlockPool(num_blocks)
        self.slots = BlockPool(num_slots) if num_slots else None

    def admission(self, num_positions: int, *, headroom: int = 0) -> Admission:
        """May a new sequence claim this many positions, leaving `headroom` blocks free for the others?"""
        wanted = blocks_needed(history=num_positions, block_size=self.block_size)
        answer = self.blocks.admission(wanted)
        if answer is not Admission.OK:
            return answer
        if self.blocks.admission(wanted + headroom) is not Admission.OK:
            return Admission.LATER
        return self.slots.admission(1) if self.slots else Admission.OK

    def claim(self, num_positions: int) -> Holding:
        """The blocks of the whole length and a slot, for a sequence that `admission` answered OK."""
        wanted = blocks_needed(history=num_positions, block_size=self.block_size)
        blocks = self.blocks.allocate(wanted)
        return Holding(blocks, self.slots.allocate(1)[0] if self.slots else NO_BLOCK)

    def resize(self, holding: Holding, num_blocks: int) -> bool:
        """Grow or shrink the table to exactly num_blocks; False, and nothing changed, if too few are free."""
        table = holding.block_table
        missing = num_blocks - len(table)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            table.extend(self.blocks.allocate(missing))
        elif missing < 0:
            self.blocks.release(table[num_blocks:])
            del table[num_blocks:]
        return True

    def release(self, holding: Holding) -> None:
        """Give everything back; the holding is empty afterwards."""
        if self.slots and holding.slot != NO_BLOCK:
            self.slots.release([holding.slot])
        self.blocks.release(holding.block_table)
        holding.block_table.clear()
        holding.slot = NO_BLOCK

    def check(self, holdings: Iterable[Holding]) -> None:
        """The owners are exactly these holdings."""
        held = list(holdings)
        self.blocks.check([block for holding in held for block in holding.block_table])
        if self.slots:
            self.slots.check([holding.slot for holding in held])
