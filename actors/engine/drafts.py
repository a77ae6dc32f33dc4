"""Guesses of next tokens: which are worth the rows that verify them, and a wait for the token before them."""

from collections.abc import Iterable
from itertools import islice
from typing import Literal, Protocol
from weakref import ref

from shoal.actors.engine.prompt_lookup import PromptLookup
from shoal.actors.engine.sequence import Sequence

Speculative = Literal["ngram"]
"""Where drafts come from: "ngram" is prompt lookup."""

FIXED_ROWS = 3.5
"""What a step takes beside its rows, in rows. Few are careful: fewer drafts seem worth their rows."""
WAIT_ALONE = 0.1
"""Tokens that a sequence gives away if its next step is not planned ahead, and nobody else is computed."""


class Drafts(Protocol):
    """Guesses of what sequences will draw. Any guess is safe: what is wrong is not accepted."""

    def wait(self, sequence: Sequence, *, num_running: int) -> bool:
        """Whether one whose next token is in flight had better wait for it, for the sake of drafts."""
        ...

    def propose(self, sequence: Sequence, *, num_running: int, most: int) -> tuple[int, ...]:
        """Its next tokens, at most so many; all before them are known."""
        ...


class PromptLookupDrafts:
    """Drafts what a sequence's own tokens suggest, as long as that pays for all.

    A step of n rows takes as long as n + FIXED_ROWS rows would. So a row more is worth it if it brings more
    than n / (n + FIXED_ROWS) tokens, or all together get fewer tokens a second. And who drafts is in every
    other step, because it is known too late how far it has come, while the others run on: it gives away a
    token, and saves its row.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        self._num_draft_tokens = num_draft_tokens
        self._newest: ref[PromptLookup] | None = None
        """The one that was made last, if its sequence has not ended: those that are forked from one another
        need not all look through their prompt."""

    def wait(self, sequence: Sequence, *, num_running: int) -> bool:
        chances = self._lookup(sequence).chances()
        next(chances, None)  # of the token in flight, which all others stand behind
        return self._num_worth(chances, num_running, self._num_draft_tokens) > 0

    def propose(self, sequence: Sequence, *, num_running: int, most: int) -> tuple[int, ...]:
        lookup = self._lookup(sequence)
        num = self._num_worth(lookup.chances(), num_running, min(most, self._num_draft_tokens))
        return tuple(lookup.guess(num))

    def _lookup(self, sequence: Sequence) -> PromptLookup:
        if sequence.lookup is None:
            request = sequence.request
            longest = len(request.prompt_token_ids) + request.max_tokens
            newest = self._newest() if self._newest else None
            same = newest.copy_for(sequence.tokens, longest) if newest else None
            sequence.lookup = same or PromptLookup(sequence.tokens, longest)
            self._newest = ref(sequence.lookup)
        sequence.lookup.catch_up()
        return sequence.lookup

    @staticmethod
    def _num_worth(chances: Iterable[float], num_running: int, most: int) -> int:
        row = num_running / (num_running + FIXED_ROWS)
        wait = 1 - row if num_running > 1 else WAIT_ALONE
        num, gained = 0, -wait
        for chance in islice(chances, max(0, most)):
            if chance <= row:
                break
            num += 1
            gained += chance - row
        return num if gained > 0 else 0
