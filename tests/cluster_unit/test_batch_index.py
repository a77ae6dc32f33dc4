"""Where an input's lines are, which are in the way of each other, and in which order they are asked."""

import json
import os
from pathlib import Path

import pytest

from shoal.cluster.batch.index import Answer, BatchError, Index
from shoal.cluster.batch.lines import MAX_LINE_BYTES, Problem
from tests.cluster_unit.batches import line, write_input


def code(index: Index, number: int) -> str | None:
    (place,) = [place for place in index.unanswered() if place.number == number]
    content = index.read(place).content
    return content.code if isinstance(content, Problem) else None


def test_lines_are_found_again_by_their_number(tmp_path: Path) -> None:
    text = "\n".join(["", json.dumps(line("a")), "   ", "nonsense", json.dumps(line("ü", "b")) + "\r", ""])
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with Index.of(path) as index:
        assert index.num_lines == 3
        places = {place.number: place for place in index.unanswered()}
        assert sorted(places) == [2, 4, 5]
        assert index.read(places[2]).custom_id == "a"
        assert index.read(places[5]).custom_id == "ü"
        assert code(index, 4) == "invalid_json_line"


def test_a_last_line_needs_no_break(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line("a")))
    with Index.of(path) as index:
        (place,) = index.unanswered()
        assert index.read(place).custom_id == "a"


def test_the_second_of_an_id_is_a_duplicate_of_the_first_wherever_it_is_asked(tmp_path: Path) -> None:
    lines = [line("a", "z"), line("b"), line("a", "c"), line("a", "b"), line("c") | {"url": "x"}, line("c")]
    with Index.of(write_input(tmp_path / "in.jsonl", lines)) as index:
        assert list(index.duplicates()) == [(3, 1), (4, 1), (6, 5)]
        codes = [code(index, number) for number in range(1, 7)]
        twice = "duplicate_custom_id"
        assert codes == [None, None, twice, twice, "invalid_url", twice]
        place = next(place for place in index.unanswered() if place.number == 4)
        assert index.read(place).custom_id is None  # it is written once


def test_what_has_an_answer_is_not_asked_and_the_others_beside_whom_they_share_with(tmp_path: Path) -> None:
    lines = [line(str(i), f"{'group ' * 40}{i % 3}" + " and so on" * 40 + str(i)) for i in range(12)]
    with Index.of(write_input(tmp_path / "in.jsonl", lines)) as index:
        index.set_answers(Answer(number=number, start=0, size=1) for number in (1, 2, 3))
        assert index.num_answers == 3
        numbers = [place.number for place in index.unanswered()]
        assert sorted(numbers) == list(range(4, 13))
        groups = [number % 3 for number in numbers]
        leaders, others = groups[:3], groups[3:]
        assert sorted(leaders) == [0, 1, 2]
        assert others == [leaders[0]] * 2 + [leaders[1]] * 2 + [leaders[2]] * 2
        index.set_answers([])
        assert index.num_answers == 0


def test_two_answers_to_one_line_are_refused(tmp_path: Path) -> None:
    with Index.of(write_input(tmp_path / "in.jsonl", [line("a")])) as index:
        answer = Answer(number=1, start=0, size=1)
        with pytest.raises(BatchError, match="two answers to one line"):
            index.set_answers([answer, answer])


def test_a_line_without_an_end_is_passed_over_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b"x" * (2 * MAX_LINE_BYTES + 10) + b"\n" + json.dumps(line("a")).encode() + b"\n")
    told = 0

    def advance(num_bytes: int) -> None:
        nonlocal told
        told += num_bytes

    with Index.of(path, advance=advance) as index:
        assert code(index, 1) == "line_too_long"
        assert code(index, 2) is None
        assert told == 2 * MAX_LINE_BYTES + 11


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.jsonl", [line("a"), line("b")])
    with Index.of(path) as index:
        (first, _) = index.unanswered()
        index.read(first)
        os.utime(path, ns=(1, 1))
        with pytest.raises(BatchError, match="has changed while it was read"):
            index.read(first)


def test_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"cannot read .*: No such file"), Index.of(tmp_path / "none"):
        pass


def test_the_digest_is_of_every_byte(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        path = tmp_path / "in.jsonl"
        path.write_text(text)
        with Index.of(path) as index:
            return index.digest

    assert digest("a\n") == digest("a\n") != digest("a\n\n")
