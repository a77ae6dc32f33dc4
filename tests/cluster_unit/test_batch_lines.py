"""What a line of a batch asks, and where it stands among the others."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.batch.lines import (
    MAX_LINE_BYTES,
    PIECE_CHARS,
    Problem,
    Question,
    Reply,
    answer_line,
    prefix_path,
    read_line,
)
from tests.cluster_unit.batches import CHAT, COMPLETIONS, line


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
