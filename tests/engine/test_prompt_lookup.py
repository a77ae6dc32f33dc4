"""What a sequence's own tokens say of its next ones, and how much that is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.engine.prompt_lookup import LONGEST_MATCH, MAX_PLACES, PromptLookup

ROOMY = 1 << 16
"""So many hashes that no two pairs of small numbers share one."""


@dataclass
class Followed:
    """A sequence and its lookup."""

    tokens: list[int]
    capacity: int = ROOMY
    lookup: PromptLookup = field(init=False)

    def __post_init__(self) -> None:
        self.lookup = PromptLookup(self.tokens, self.capacity)
        self.lookup.catch_up()

    def hear(self, *tokens: int) -> None:
        self.tokens += tokens
        self.lookup.catch_up()

    def guess(self, num_tokens: int = 4) -> list[int]:
        return self.lookup.guess(num_tokens) if self.chances(1) else []

    def chances(self, num: int) -> list[float]:
        return list(islice(self.lookup.chances(), num))


def test_what_came_behind_the_same_two_tokens_is_guessed() -> None:
    assert Followed([1, 2, 3, 4, 5, 9, 1, 2]).guess() == [3, 4, 5, 9]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 1], [1, 2, 3, 2]])
def test_nothing_is_guessed_behind_a_pair_that_is_new(tokens: list[int]) -> None:
    assert Followed(tokens).guess() == []


def test_of_several_places_the_one_with_most_in_common_counts_and_the_latest_of_equals() -> None:
    assert Followed([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]).guess(1) == [3], "7 1 2 came before 3"
    assert Followed([8, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]).guess(1) == [4]


def test_what_repeats_is_guessed_to_go_on() -> None:
    assert Followed([5, 5, 5]).guess() == [5, 5, 5, 5]
    assert Followed([1, 2, 3, 1, 2]).guess(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_place_is_kept_while_what_came_there_comes_again() -> None:
    it = Followed([1, 2, 3, 4, 5, 6, 1, 2])
    it.hear(3, 4)
    assert it.guess(2) == [5, 6]
    it.hear(9)
    assert it.guess() == []
    it.hear(2, 3)
    assert it.guess(2) == [4, 9], "where 2 3 came last"


def test_the_more_is_in_common_the_likelier() -> None:
    it = Followed([*range(20), 0, 1])
    short = it.chances(3)
    it.hear(*range(2, 12))
    long = it.chances(3)
    assert all(0 < chance < 1 for chance in [*short, *long])
    assert short == sorted(short, reverse=True) and long == sorted(long, reverse=True)
    assert all(less < more for less, more in zip(short, long, strict=True))


def test_chances_follow_what_comes_though_nobody_computes_with_the_guesses() -> None:
    right, wrong = Followed([*range(4), 50]), Followed([*range(4), 50])
    first = Followed([*range(4), 50, 0, 1]).chances(1)[0]
    for other in range(60, 90):
        right.hear(0, 1, 2, other)
        wrong.hear(0, 1, other)
        wrong.hear(0, other)  # so that the latest place says 2 no longer
    right.hear(0, 1)
    assert right.chances(1)[0] > first
    wrong.hear(0, 1)
    assert wrong.chances(1)[0] < first / 2


def test_however_it_is_caught_up_with_it_is_the_same() -> None:
    tokens = [n * n % 7 for n in range(200)]
    at_once, by_one = Followed([*tokens[:50]]), Followed([*tokens[:50]])
    at_once.hear(*tokens[50:])
    for token in tokens[50:]:
        by_one.hear(token)
    assert at_once.guess() == by_one.guess() != []
    assert at_once.chances(5) == by_one.chances(5)


def test_a_copy_is_what_its_sequence_would_have_had_and_goes_its_own_way() -> None:
    tokens = [n * n % 7 for n in range(50)]
    parent, fork = Followed([*tokens]), Followed([*tokens])
    made = parent.lookup.copy_for(fork.tokens, ROOMY)
    assert made is not None
    alone, fork.lookup = Followed([*tokens]), made
    parent.hear(9, 9, 9)
    for token in (1, 4, 2, 2, 4, 1):
        fork.hear(token)
        alone.hear(token)
        assert fork.guess() == alone.guess() and fork.chances(5) == alone.chances(5)
    assert parent.guess() == [9, 9, 9, 9]


def test_there_is_no_copy_for_other_tokens_or_another_length() -> None:
    it = Followed([1, 2, 3])
    assert it.lookup.copy_for([1, 2, 4], ROOMY) is None
    assert it.lookup.copy_for([1, 2, 3], 2 * ROOMY) is None


def test_its_memory_is_known_beforehand() -> None:
    for capacity in (1, 2, 100, 8192):
        it = Followed([n % 5 for n in range(capacity)], capacity)
        used = (len(it.lookup._latest) + len(it.lookup._before)) * 4
        assert used <= PromptLookup.num_bytes(capacity) + 8


class Naive:
    """The same by looking at every place."""

    def __init__(self) -> None:
        self.place: int | None = None
        self.num_common = 0

    def hear(self, tokens: Sequence[int]) -> None:
        """The last of these has come."""
        if self.place is not None and tokens[self.place] == tokens[-1]:
            self.place, self.num_common = self.place + 1, self.num_common + 1
        else:
            self.look(tokens)

    def look(self, tokens: Sequence[int]) -> None:
        end = len(tokens)
        places = [p for p in range(end - 1, 1, -1) if tokens[p - 2 : p] == tokens[end - 2 :]][:MAX_PLACES]
        common = {place: self.common(tokens, place) for place in places}
        self.num_common = max(common.values(), default=0)
        self.place = next((p for p in places if common[p] == self.num_common), None)

    @staticmethod
    def common(tokens: Sequence[int], place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
        same = [a == b for a, b in pairs][:LONGEST_MATCH]
        return same.index(False) if False in same else len(same)

    def guess(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        if self.place is None:
            return []
        going_on = list(tokens)
        for i in range(num_tokens):
            going_on.append(going_on[self.place + i])
        return going_on[len(tokens) :]


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=20),
)
def test_it_guesses_what_a_search_of_all_places_does(prompt: list[int], pieces: list[list[int]]) -> None:
    it, naive = Followed(prompt), Naive()
    naive.look(it.tokens)
    assert it.guess() == naive.guess(it.tokens, 4)
    for piece in pieces:
        for n in range(1, len(piece) + 1):
            naive.hear([*it.tokens, *piece[:n]])
        it.hear(*piece)
        assert it.guess() == naive.guess(it.tokens, 4)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 200_000) | st.integers(0, 3), min_size=1, max_size=60))
def test_pairs_that_share_a_hash_are_told_apart(tokens: list[int]) -> None:
    it = Followed(tokens[:1], capacity=len(tokens))
    for token in tokens[1:]:
        it.hear(token)
        if guess := it.guess(1):
            last = it.tokens[-2:]
            assert any(it.tokens[p - 2 : p + 1] == [*last, *guess] for p in range(2, len(it.tokens)))
