"""A step is a plan, then a result: the scheduler decides with integers, the runner obeys."""

from dataclasses import dataclass
from typing import NewType

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.messages import SamplingParams

SequenceId = NewType("SequenceId", int)
"""Unique within one engine process, in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """Compute the K/V rows of `token_ids` at positions `start`, `start + 1`, ..."""

    sequence_id: SequenceId
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[BlockId, ...]
    slot: BlockId = NO_BLOCK
    draw: SamplingParams | None = None
    """Draw the token that follows the last one; None inside a prompt."""

    @property
    def end(self) -> int:
        """The position of the token that follows."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    step_id: int
    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step_id: int
    tokens: dict[SequenceId, int]
    """The drawn token of every sequence whose plan said `draw`."""
