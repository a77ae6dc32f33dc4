"""Lines that share prefixes are asked together, and whoever computes a prefix is ahead of them."""

from array import array
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.batch.lines import Question
from shoal.cluster.batch.order import (
    LEAST_PIECES,
    MOST_AHEAD,
    MOST_PIECES_AHEAD,
    PIECE_CHARS,
    leaders_first,
    prefix_path,
)
from tests.cluster_unit.batches import CHAT, COMPLETIONS
from tests.engine.bench import Bench, a_request


def path(prompt: Any, **more: Any) -> bytes:
    return prefix_path(Question(url=COMPLETIONS, body={"prompt": prompt, **more}))


def test_prompts_that_begin_alike_have_paths_that_do() -> None:
    system = "x" * 5 * PIECE_CHARS
    a, b, c = path(system + "a"), path(system + "b"), path("y" * 500)
    assert a[: 4 * 5] == b[: 4 * 5]
    assert a[:8] != c[:8]
    assert a != b


def test_what_may_not_share_is_apart_and_the_rest_of_a_body_says_nothing() -> None:
    assert path("hello", cache_salt="a")[:4] != path("hello", cache_salt="b")[:4]
    assert path("hello", model="a")[:4] != path("hello", model="b")[:4]
    assert path("hello", temperature=0) == path("hello", seed=7)


def test_a_message_is_its_role_and_content_in_whichever_order() -> None:
    def chat(*messages: Any) -> bytes:
        return prefix_path(Question(url=CHAT, body={"messages": list(messages)}))

    assert chat({"role": "user", "content": "a"}) == chat({"content": "a", "role": "user", "name": "n"})
    assert chat({"role": "user", "content": "a"}) != chat({"role": "system", "content": "a"})
    assert chat("nonsense", 7)  # the server will say what is wrong


def test_of_several_prompts_the_first_counts_and_of_ids_all() -> None:
    assert path(["one", "two"]) == path("one")
    assert path([[1, 2], [3]]) == path([1, 2])
    assert path([1, 2]) != path([1, 3])
    assert path([]) and path(None) and path({"odd": 1})


@given(st.permutations([(group, i) for group in range(6) for i in range(4)]))
def test_sorted_by_path_those_that_share_are_neighbours(order: list[tuple[int, int]]) -> None:
    prompts = [f"{'preamble ' * 10}{f'document {group} ' * 30}question {i}" for group, i in order]
    in_order = [prompt[: len("preamble ") * 10 + 12] for prompt in sorted(prompts, key=path)]
    changes = sum(a != b for a, b in pairwise(in_order))
    assert changes == 5


def numbered(sizes: list[int], pieces: int = 4) -> list[tuple[bytes, tuple[int, int]]]:
    """Lines i of groups g that share `pieces` behind the root, as (path, (g, i))."""
    return [
        (array("I", [1, *[g + 2] * pieces, i + 1]).tobytes(), (g, i))
        for g, size in enumerate(sizes)
        for i in range(size)
    ]


def test_the_first_of_a_group_goes_ahead_of_the_groups_before_it() -> None:
    order = list(leaders_first(numbered([3, 3, 3])))
    assert order[:3] == [(0, 0), (1, 0), (2, 0)]
    assert order[3:] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_only_some_are_ahead() -> None:
    order = list(leaders_first(numbered([2] * 40)))
    position = {line: i for i, line in enumerate(order)}
    for group in range(40):
        ahead = sum(position[other, 0] < position[group, 1] for other in range(group + 1, 40))
        assert ahead == min(MOST_AHEAD, 39 - group)


def test_long_ones_are_fewer_ahead_and_one_at_least_is() -> None:
    order = list(leaders_first(numbered([2] * 8, pieces=MOST_PIECES_AHEAD)))
    assert order[:5] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]


def test_who_shares_with_nobody_leads_nobody_and_waits_for_few() -> None:
    alone = numbered([1] * 3000)
    assert list(leaders_first(alone)) == [line for _, line in alone]
    lines = [*numbered([2]), *alone]
    assert next(leaders_first(lines)) == (0, 0)


def test_what_is_shared_by_chance_makes_no_leader() -> None:
    assert list(leaders_first(numbered([2, 2], pieces=LEAST_PIECES - 2))) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_groups_within_a_group_have_leaders_of_their_own() -> None:
    """All share a system prompt, some of them a document behind it: the first of all computes both."""
    paths = sorted(
        (path("system " * 40 + f"document {document} " * 40 + f"question {i}"), (document, i))
        for document in range(3)
        for i in range(3)
    )
    order = list(leaders_first(paths))
    assert sorted({document for document, _ in order[:3]}) == [0, 1, 2]
    assert [document for document, _ in order[3:]] == sorted(
        (document for document, _ in order[3:]), key=[document for document, _ in order[:3]].index
    )


@given(st.lists(st.integers(1, 6), max_size=60), st.integers(0, 60))
def test_every_line_is_asked_once_and_behind_who_computes_its_prefix(sizes: list[int], pieces: int) -> None:
    lines = numbered(sizes, pieces)
    order = list(leaders_first(lines))
    assert sorted(order) == sorted(line for _, line in lines)
    position = {line: i for i, line in enumerate(order)}
    assert all(position[group, 0] <= position[group, i] for group, i in order)


def test_an_engine_takes_fewer_steps_and_computes_each_prefix_once() -> None:
    """Here 32 instead of 83, where answers have two tokens: a step begins several groups."""
    lines = numbered([4] * 40)
    steps, hits = played(list(leaders_first(lines)))
    plainly, hits_plainly = played([line for _, line in lines])
    assert hits == hits_plainly == 40 * 3 * 32
    assert steps < plainly / 2


def played(order: list[tuple[int, int]]) -> tuple[int, int]:
    """(steps, hit tokens) of an engine that is asked 20 at once: 32 tokens of a group, 4 of its own."""
    bench = Bench(num_blocks=500, max_num_seqs=16, max_num_batched_tokens=256)
    steps = num_asked = 0
    while len(bench.finished) < len(order):
        for group, i in order[num_asked : len(bench.finished) + 20]:
            bench.submit(a_request(f"{group}-{i}", [group + 1] * 32 + [i + 1] * 4, max_tokens=2))
            num_asked += 1
        bench.step()
        steps += 1
    return steps, sum(bench.cached.values())
