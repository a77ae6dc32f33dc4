"""Who holds what: worked examples, then any sequence of operations against a dict of sets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import TOGETHER, Directory


def keys(text: str) -> list[BlockKey]:
    return [BlockKey(letter.encode()) for letter in text]


def test_a_prefix_is_matched_as_far_as_each_holder_has_it() -> None:
    directory: Directory[str] = Directory()
    directory.add("east", keys("abcd"))
    directory.add("west", keys("ab"))
    directory.add("north", keys("x"))
    assert directory.match(keys("abcz")) == {"east": 3, "west": 2}
    assert directory.match([]) == {}


def test_a_gap_ends_a_match() -> None:
    directory: Directory[str] = Directory()
    directory.add("east", keys("abd"))
    assert directory.match(keys("abcd")) == {"east": 2}


def test_a_holder_that_is_forgotten_leaves_nothing() -> None:
    directory: Directory[str] = Directory()
    directory.add("east", keys("ab"))
    directory.add("west", keys("bc"))
    directory.forget("east")
    assert len(directory) == 2
    assert directory.match(keys("ab")) == {}
    directory.add("south", keys("a"))
    assert directory.match(keys("ab")) == {"south": 1}, "its bit serves another, clean"


def test_11_absent_keys_do_not_keep_the_others() -> None:
    directory: Directory[str] = Directory()
    directory.add("east", keys("ab"))
    directory.discard("east", keys("zb"))
    directory.discard("east", keys("zb"))
    directory.discard("never heard of", keys("a"))
    assert directory.keys_of("east") == {BlockKey(b"a")}


def path(name: str, first: int, end: int) -> list[BlockKey]:
    """Blocks of a path; all paths begin with the same few, and backwards it is how they are evicted."""
    step = 1 if first <= end else -1
    return [BlockKey(f"{name if i > 2 else ''}{i}".encode()) for i in range(first, end, step)]


def test_a_path_is_found_however_its_keys_came_to_stand() -> None:
    """Told in two parts, one of them into places that were free; with a gap; and with an end of its own."""
    whole = path("p", 0, 4 * TOGETHER)
    directory: Directory[str] = Directory()
    directory.add("east", path("q", 0, 2 * TOGETHER))
    directory.discard("east", path("q", 2 * TOGETHER, 5))
    directory.add("east", whole[: TOGETHER + 3])
    directory.add("east", whole[TOGETHER + 3 :])
    directory.add("west", whole[: 3 * TOGETHER])
    directory.discard("west", [whole[TOGETHER + 1]])
    directory.check()
    assert directory.match(whole) == {"east": len(whole), "west": TOGETHER + 1}
    assert directory.match(whole[:5] + path("r", 5, 40)) == {"east": 5, "west": 5}


HOLDERS = st.sampled_from("ABCDE")
NUMBERS = st.integers(0, 3 * TOGETHER)
KEYS = st.lists(st.sampled_from(keys("abcdefgh")), max_size=6) | st.builds(
    path, st.sampled_from("pq"), NUMBERS, NUMBERS
)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "discard", "forget"]), HOLDERS, KEYS), max_size=40)


@settings(deadline=None)
@given(OPERATIONS, KEYS)
def test_any_history_leaves_what_a_dict_of_sets_would_hold(
    operations: list[tuple[str, str, list[BlockKey]]], wanted: list[BlockKey]
) -> None:
    directory: Directory[str] = Directory()
    model: dict[str, set[BlockKey]] = {}
    for name, holder, named in operations:
        match name:
            case "add":
                directory.add(holder, named)
                model.setdefault(holder, set()).update(named)
            case "discard":
                directory.discard(holder, named)
                model.setdefault(holder, set()).difference_update(named)
            case _:
                directory.forget(holder)
                model.pop(holder, None)
        directory.check()
    for holder in "ABCDE":
        held = model.get(holder, set())
        assert directory.keys_of(holder) == held
        leading = next((i for i, key in enumerate(wanted) if key not in held), len(wanted))
        assert directory.match(wanted).get(holder, 0) == leading


def test_beyond_its_bound_whoever_has_most_loses_what_it_said_last() -> None:
    directory: Directory[str] = Directory(max_entries=6)
    directory.add("east", keys("abcd"))
    directory.add("west", keys("xy"))
    directory.add("south", keys("m"))
    assert directory.match(keys("abcd"))["east"] == 3, "the end of its path is gone, the head is not"
    directory.add("east", keys("e"))
    assert directory.keys_of("east") == set(keys("abc"))
    assert (directory.size.num_entries, directory.size.num_dropped) == (6, 2)
    assert directory.take_cut() == set(), "no room yet"
    directory.discard("west", keys("x"))
    assert directory.take_cut() == {"east"}
    assert directory.take_cut() == set(), "once"


@settings(deadline=None)
@given(OPERATIONS, st.integers(1, 12))
def test_whatever_is_said_the_bound_holds_and_nothing_is_made_up(
    operations: list[tuple[str, str, list[BlockKey]]], max_entries: int
) -> None:
    directory: Directory[str] = Directory(max_entries)
    model: dict[str, set[BlockKey]] = {}
    for name, holder, named in operations:
        match name:
            case "add":
                directory.add(holder, named)
                model.setdefault(holder, set()).update(named)
            case "discard":
                directory.discard(holder, named)
                model.setdefault(holder, set()).difference_update(named)
            case _:
                directory.forget(holder)
                model.pop(holder, None)
        directory.check()
        assert all(directory.keys_of(holder) <= model.get(holder, set()) for holder in "ABCDE")
        whole = directory.size.num_entries == sum(map(len, model.values()))
        assert whole or directory.size.num_dropped
