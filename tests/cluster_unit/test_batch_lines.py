"""What a line of a batch asks, and where it stands among the others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.batch.lines import (
    MAX_LINE_BYTES,
    Problem,
    Question,
    Reply,
    answer_line,
    read_line,
)
from tests.cluster_unit.batches import COMPLETIONS, line


def test_a_line_that_asks() -> None:
    read = read_line(json.dumps(line("a", "hi")).encode())
    assert read.custom_id == "a"
    assert read.content == Question(url=COMPLETIONS, body={"prompt": "hi", "max_tokens": 4})


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"{", "invalid_json_line", "not JSON"),
        (b"[]", "invalid_json_line", "object"),
        (b"\xff\xfe", "invalid_json_line", "not JSON"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", "not JSON"),
        (b"[" * 5000, "invalid_json_line", "not JSON"),
        (b'{"custom_id": NaN}', "invalid_json_line", "not JSON"),
        (b"{}", "invalid_custom_id", "custom_id"),
        (b'{"custom_id": 7}', "invalid_custom_id", "custom_id"),
        (b'{"custom_id": ""}', "invalid_custom_id", "custom_id"),
        (b" " * (MAX_LINE_BYTES + 1), "line_too_long", "33 MiB"),
    ],
)
def test_a_line_whose_id_cannot_be_told(data: bytes, code: str, word: str) -> None:
    read = read_line(data)
    assert read.custom_id is None
    assert isinstance(read.content, Problem)
    assert read.content.code == code and word in read.content.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": ["/v1/completions"]}, "invalid_url"),
        ({"body": "hello"}, "invalid_body"),
        ({"body": {"prompt": "hello", "stream": True}}, "invalid_body"),
    ],
)
def test_a_line_that_cannot_be_asked_keeps_its_id(change: dict[str, Any], code: str) -> None:
    read = read_line(json.dumps(line("a") | change).encode())
    assert read.custom_id == "a"
    assert isinstance(read.content, Problem) and read.content.code == code


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_there_is_an_outcome(data: bytes) -> None:
    assert isinstance(read_line(data).content, Problem | Question)


def test_an_answer_and_a_problem_in_openais_form() -> None:
    reply = Reply(status=400, request_id="r", body={"error": {"message": "no\nway"}})
    assert json.loads(answer_line("i", "a", reply)) == {
        "id": "i",
        "custom_id": "a",
        "response": {"status_code": 400, "request_id": "r", "body": {"error": {"message": "no\nway"}}},
        "error": None,
    }
    problem = answer_line("i", None, Problem(code="c", message="m"))
    assert json.loads(problem) == {
        "id": "i",
        "custom_id": None,
        "response": None,
        "error": {"code": "c", "message": "m"},
    }
    assert problem.count(b"\n") == answer_line("i", "a", reply).count(b"\n") == 1
