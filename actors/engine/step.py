"""A step is a plan, then a result: the scheduler decides with integers, the runner obeys."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.messages import SamplingParams, TokenLogprob

SequenceId = NewType("SequenceId", int)
"""Unique within one engine process, in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How to draw the token that follows a sequence's last one."""

    sampling: SamplingParams
    num_prompt_tokens: int
    """Tokens from this position on are output: penalties tell them apart."""
    stop_token_ids: frozenset[int] = frozenset()
    """What must not be drawn while the output is shorter than sampling.min_tokens."""
    logprobs: int | None = None


Copy = tuple[BlockId, BlockId]
"""(source, copy), of blocks or of slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Another sequence of the same tokens begins where a step's rows end: its first token is drawn from the
    same row of logits, and what it will write is copied for it when the step has been computed."""

    sequence_id: SequenceId
    row: int
    """Of the token pool; the tokens up to there are those of the step's row."""
    draw: Draw
    blocks: tuple[Copy, ...] = ()
    """The last one, unless it is full: complete blocks are shared."""
    slot: Copy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """Compute the K/V rows of the tokens at positions start, start + 1, ..., end - 1.

    The tokens themselves are in the runner's token pool, at `row`: the scheduler may plan a step before the
    token that it computes has been drawn.
    """

    sequence_id: SequenceId
    row: int
    """Of the token pool; one for each running sequence."""
    start: int
    end: int
    block_table: tuple[BlockId, ...]
    slot: BlockId = NO_BLOCK
    known_tokens: tuple[int, ...] = ()
    """All the sequence's tokens from position 0, in its first step since it was admitted: they go to the
    pool, and so does every token drawn, at position `end` of its step."""
    draw: Draw | None = None
    """Draw the token at position `end`; None inside a prompt."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens at the last so many of the positions start, ..., end - 1, none of which is
    `start`. Then a token is drawn at each of their places too: those count up to the first that differs from
    its draft."""
    prompt_logprobs: int | None = None
    """Report the logprobs of the prompt's tokens at positions start + 1, ..., end (as far as there are)."""
    restore: tuple[BlockId, ...] = ()
    """Segments to copy into the slot's rings before anything is computed: those of the blocks that end at
    `start`, oldest first. Only in a sequence's first step."""
    captures: tuple[tuple[int, BlockId], ...] = ()
    """(boundary, segment), start < boundary <= end: as the step computes the rows before `boundary`, copy
    those of the block that ends there to the segment. Rows before `start` come from the ring."""
    valid_from: int = 0
    """Layers that are not stored have no rows before this position: nobody may look there."""
    store_from: int = 0
    """Rows of paged layers before this position lie in their blocks already, shared: they are not written."""
    forks: tuple[Fork, ...] = ()
    """Only of a step that draws, and has no drafts."""

    @property
    def drawn_positions(self) -> range:
        """Of the tokens that it draws, if it draws."""
        return range(self.end - len(self.drafts), self.end + 1)

    def accepted(self, drawn: Sequence["Drawn"]) -> tuple["Drawn", ...]:
        """Of the tokens drawn at the drafts' places and at `end`, those that were drawn behind right ones."""
        pairs = zip(self.drafts, drawn, strict=False)
        num_right = next((i for i, (draft, d) in enumerate(pairs) if draft != d.token_id), len(self.drafts))
        return tuple(drawn[: num_right + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    step_id: int
    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.end - sequence.start for sequence in self.sequences)

    @property
    def num_drafts(self) -> int:
        return sum(len(sequence.drafts) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step_id: int
    drawn: dict[SequenceId, tuple[Drawn, ...]]
    """Of every sequence whose plan said `draw`, and of every fork: its next tokens, one more than drafts were
    right."""
    prompt_logprobs: dict[SequenceId, tuple[TokenLogprob, ...]] = field(default_factory=dict)
