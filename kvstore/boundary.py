"""Where a cached prefix can be taken up: the rule that engines, stores and the router share."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Rows before `boundary` are in blocks; computing goes on at `start`, from the state that was there.

    Both in blocks. `start` lies before `boundary` where layers are not stored: the rows of paged layers
    between the two are read and not written again. BoundaryRule.first_token says at which token.
    """

    boundary: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryRule:
    """What must be at hand beside blocks. Without sliding layers nothing is, and every boundary will do."""

    num_segments: int = 0
    """State at a boundary is in the segments of so many blocks before it, or of all if there are fewer."""
    num_recomputed: int = 0
    """Blocks before a boundary that must be computed again, because the last sliding layers are not stored:
    ⌈m(W − 1) / B⌉ for m layers of window W. Each such layer lacks W − 1 positions, and what it lacks is felt
    by the one above."""
    num_rewound: int = 0
    """Tokens before a start, fewer than a block, that are computed again: of them state is made that segments
    do not have. Their own rows in blocks are read and not written again; segments reach so much further."""

    def furthest(self, num_blocks: int, has_segment: Callable[[int], bool]) -> Resume:
        """The resume that leaves the least to compute, of a prefix whose first `num_blocks` blocks are there.

        has_segment: whether the segment of block i is there too; asked once of each, the last ones first.
        """
        last = num_blocks - self.num_recomputed
        if not self.num_segments:
            return self._resume_at(max(0, last))
        found = 0
        for i in reversed(range(last)):
            found = found + 1 if has_segment(i) else 0
            if found == self.num_segments or (found and i == 0):
                return self._resume_at(i + found)
        return Resume()

    def segments_at(self, start: int) -> range:
        """The blocks whose segments hold the state at the end of block start - 1."""
        return range(max(0, start - self.num_segments), start)

    def first_token(self, resume: Resume, block_size: int) -> int:
        """The first that is computed."""
        return max(0, resume.start * block_size - self.num_rewound)

    def recomputed_tokens(self, block_size: int) -> int:
        """Before a boundary, after a hit there."""
        return self.num_recomputed * block_size + self.num_rewound

    def _resume_at(self, start: int) -> Resume:
        return Resume(boundary=start + self.num_recomputed, start=start) if start else Resume()
