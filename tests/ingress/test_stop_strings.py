from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.ingress.stop_strings import StopString, StopStrings


def stop_strings(stops: list[str]) -> StopStrings:
    return StopStrings([StopString(stop) for stop in stops])


def test_text_passes_until_the_stop_string() -> None:
    stops = stop_strings(["END"])
    assert stops.push("so it goes. END of") == "so it goes. "
    assert stops.found
    assert stops.push(" story") == ""
    assert stops.flush() == ""


def test_case_64_a_stop_string_over_many_pieces_never_shows() -> None:
    stops = stop_strings(["beta gamma"])
    shown = [stops.push(piece) for piece in ["alpha be", "ta", " ga", "m", "ma", " delta"]]
    assert shown == ["alpha ", "", "", "", "", ""]
    assert stops.found


def test_only_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    stops = stop_strings(["\n\n"])
    assert stops.push("one\n") == "one"
    assert stops.push("two\n") == "\ntwo"
    assert stops.flush() == "\n"
    assert not stops.found


def test_a_failed_beginning_may_contain_the_real_one() -> None:
    stops = stop_strings(["aab"])
    assert stops.push("aaa") == "a"
    assert stops.push("b") == ""
    assert stops.found


def test_the_stop_string_that_is_complete_first_wins_then_the_longest() -> None:
    assert stop_strings(["abcd", "bc"]).push("abcd") == "a"
    assert stop_strings(["cd", "bcd"]).push("abcd") == "a"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert stop_strings([]).push("anything") == "anything"


texts = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def naively_shown(text: str, stops: list[str]) -> tuple[str, bool]:
    """All that may be shown once text has arrived, from the definition."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    held = max(
        (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
        default=0,
    )
    return text[: len(text) - held], False


@given(st.lists(texts, max_size=8), stop_lists)
def test_each_push_shows_exactly_what_the_definition_allows(pieces: list[str], stops: list[str]) -> None:
    stream = stop_strings(stops)
    shown = ""
    for index, piece in enumerate(pieces):
        shown += stream.push(piece)
        assert (shown, stream.found) == naively_shown("".join(pieces[: index + 1]), stops)
    if not stream.found:
        assert shown + stream.flush() == "".join(pieces)
