"""What may come next in a sequence: what came when it last said the same (prompt lookup decoding)."""

from array import array
from collections.abc import Iterator
from copy import copy
from itertools import count

LONGEST_MATCH = 16
"""Tokens that a place is asked to have in common with the end; more make it no likelier."""
MAX_PLACES = 8
"""That are asked, the latest first. There are more only of pairs that are everywhere."""

_NOWHERE = 0
_MIX = 0x9E3779B1  # 2**32 by the golden ratio (Knuth, section 6.4); odd, so that it maps no two tokens to one
_WEIGHT = 0.15  # of the latest guess in a running rate
_FIRST_CHANCES = (0.35, 0.6, 0.9)


class PromptLookup:
    """Follows a sequence, and says what may come next and how likely that is.

    It knows where each pair of tokens occurred: by the pair's hash where it last did, and from there where it
    did before that, as in the window of zlib's deflate. Of the latest places where the sequence's last pair
    occurred it takes the one that has most tokens before it in common with the end. As long as what came
    there comes again, it goes along.

    Each guess is held against what comes, whether somebody computes with it or not. So it is known what
    guesses are worth in this sequence before any is paid for: a running rate, by how much was in common.
    """

    def __init__(self, tokens: list[int], capacity: int) -> None:
        """tokens: the sequence's own list, which grows. capacity: how long it may come to be."""
        self._tokens = tokens
        self._latest = array("i", bytes(4 * _num_hashes(capacity)))
        """By a pair's hash, the place behind it."""
        self._before = array("i", (_NOWHERE, _NOWHERE))
        """By place: the one before it, of the same hash. There is no pair before places 0 and 1."""
        self._chances = list(_FIRST_CHANCES)
        self._place = _NOWHERE
        """Of the token that may come next."""
        self._num_common = 0

    def copy_for(self, tokens: list[int], capacity: int) -> "PromptLookup | None":
        """For another sequence, if it has the same tokens and may come to be as long."""
        if tokens != self._tokens or len(self._latest) != _num_hashes(capacity):
            return None
        other = copy(self)
        other._tokens = tokens
        other._latest, other._before = self._latest[:], self._before[:]
        other._chances = list(self._chances)
        return other

    @staticmethod
    def num_bytes(capacity: int) -> int:
        return 4 * (_num_hashes(capacity) + capacity)

    def catch_up(self) -> None:
        """Take in what the sequence has come to have."""
        first, end = len(self._before), len(self._tokens)
        if first == len((_NOWHERE, _NOWHERE)):  # all of it is new, and most of it is the prompt
            self._link(first, end)
            first = max(first, end)
        for place in range(first, end + 1):
            self._hear(self._tokens[place - 1])
            earlier = self._link(place, place + 1)
            if self._place == _NOWHERE:
                self._look(place, earlier)

    def chances(self) -> Iterator[float]:
        """That the next token is as guessed, that the next two are, and so on; nothing if none is guessed."""
        if self._place == _NOWHERE:
            return
        chance = 1.0
        for num_common in count(self._num_common):
            chance *= self._chances[_class(num_common)]
            yield chance

    def guess(self, num_tokens: int) -> list[int]:
        """The next tokens, if `chances` has any. What came at the place may itself be a part of the guess:
        so something that repeats is guessed to go on."""
        place, end = self._place, len(self._tokens)
        guessed = self._tokens[place : place + num_tokens]
        while len(guessed) < num_tokens:
            guessed.append(guessed[len(guessed) + place - end])
        return guessed

    def _link(self, first: int, end: int) -> int:
        """Take in the places first, ..., end - 1; the one before the last of them."""
        tokens, latest, before = self._tokens, self._latest, self._before
        mask = len(latest) - 1
        earlier = _NOWHERE
        for place in range(first, end):
            pair = (tokens[place - 2] * _MIX + tokens[place - 1]) & mask
            earlier = latest[pair]
            before.append(earlier)
            latest[pair] = place
        return earlier

    def _hear(self, token: int) -> None:
        """The next token has come."""
        if self._place == _NOWHERE:
            return
        is_right = self._tokens[self._place] == token
        at = _class(self._num_common)
        self._chances[at] += _WEIGHT * (is_right - self._chances[at])
        if is_right:
            self._place += 1
            self._num_common += 1
        else:
            self._place = _NOWHERE

    def _look(self, end: int, place: int) -> None:
        """Take the best of the places up to this one."""
        self._num_common = 1
        for _ in range(MAX_PLACES):
            if place == _NOWHERE or self._num_common == LONGEST_MATCH:
                return
            num_common = self._common(place, end)
            if num_common > self._num_common:
                self._place, self._num_common = place, num_common
            place = self._before[place]

    def _common(self, place: int, end: int) -> int:
        """Tokens before both that are the same."""
        tokens = self._tokens
        for i in range(1, min(place, LONGEST_MATCH) + 1):
            if tokens[place - i] != tokens[end - i]:
                return i - 1
        return min(place, LONGEST_MATCH)


def _num_hashes(capacity: int) -> int:
    return 1 << max(1, capacity - 1).bit_length()


def _class(num_common: int) -> int:
    """2 or 3, 4 to 7, 8 and more."""
    return min(num_common, 8).bit_length() - 2
