"""Memory in equal pieces, and who owns each piece."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NewType

BlockId = NewType("BlockId", int)

NO_BLOCK = BlockId(0)
"""Never issued: it means "none" in a table, and it is where padding reads and writes."""


class Admission(Enum):
    OK = auto()
    LATER = auto()
    """It fits, but not beside what is owned now."""
    NEVER = auto()
    """It would not fit an empty pool: waiting cannot help."""


class OutOfBlocks(Exception):
    def __init__(self, *, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} blocks, {free} free")


class BlockNotOwned(Exception):
    """A pin or a release named a block that nobody owns: a bug in the caller."""

    def __init__(self, block: BlockId) -> None:
        super().__init__(f"block {block}")


class BlockPool:
    """Hands out block IDs and counts the owners of each.

    A request, a cached prefix and a copy still in flight are all owners; to the pool they are the same thing.
    A block becomes free when its last owner lets go. All pools of the engine are of this class: paged
    blocks, which grow with a sequence, and token rows and state slots, of which a sequence has one.
    """

    def __init__(self, num_blocks: int) -> None:
        """IDs 1 to num_blocks - 1 can be issued."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1 (block 0 is never issued), got {num_blocks}")
        self._owners = [0] * num_blocks
        self._free = deque(BlockId(block) for block in range(1, num_blocks))
        # First in, first out: a block freed last is overwritten last, so what it held is found the longest.

    @property
    def num_usable(self) -> int:
        return len(self._owners) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, block: BlockId) -> int:
        return self._owners[block]

    def admission(self, num_blocks: int) -> Admission:
        if num_blocks > self.num_usable:
            return Admission.NEVER
        return Admission.OK if num_blocks <= len(self._free) else Admission.LATER

    def allocate(self, num_blocks: int) -> list[BlockId]:
        if num_blocks > len(self._free):
            raise OutOfBlocks(wanted=num_blocks, free=len(self._free))
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """Add one owner to each block. Sharing starts from a live one."""
        for block in blocks:
            if not self._is_owned(block):
                raise BlockNotOwned(block)
            self._owners[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one owner of each block. Tails go first, so a shared prefix is reused last."""
        for block in reversed(blocks):
            if not self._is_owned(block):
                raise BlockNotOwned(block)
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def _is_owned(self, block: BlockId) -> bool:
        return NO_BLOCK < block < len(self._owners) and self._owners[block] > 0

    def check(self, held: Iterable[BlockId] | None = None) -> None:
        """Every usable block is owned or free, never both and never neither.

        Given `held`, the blocks of every owner with repetition, also that the counts are theirs.
        """
        unowned = [block for block in range(1, len(self._owners)) if self._owners[block] == 0]
        assert sorted(self._free) == unowned, f"free {sorted(self._free)}, unowned {unowned}"
        assert self._owners[NO_BLOCK] == 0 and min(self._owners) >= 0
        if held is not None:
            counted = [0] * len(self._owners)
            for block in held:
                counted[block] += 1
            assert counted == self._owners, f"held {counted}, owners {self._owners}"
