"""What a client may send wrongly, and the one shape of what it gets back."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import text_of, tokens_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(autouse=True)
def an_engine_that_answers(dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=tokens_of("the"))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    [(name, error)] = response.json().items()
    assert name == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["x-request-id"]
    result: dict[str, Any] = error
    return result


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


@pytest.mark.parametrize(
    "body",
    [
        b"{bad",
        b"",
        b"null",
        b"17",
        b'"text"',
        b"[{}]",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\udc00": 1}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 40_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b'{"prompt": "x"} trailing',
        '{"prompt": "x"}'.encode("utf-16"),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_case_62_a_body_that_is_no_json_object(http: httpx.Client, body: bytes) -> None:
    error = error_of(http.post(COMPLETIONS, content=body), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 2**70}, "n"),
        ({"n": [2]}, "n"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": False}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": "a" * 1025}, "stop[0]"),
        ({"stop": 7}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"logit_bias": {"3": 1, "03": 2}}, "logit_bias"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": list(range(320))}, "min_tokens"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 257}, "cache_salt"),
        ({"priority": 0.5}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1.0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_62_wrong_types_and_ranges(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(path, json=chat(prompt="x", **fields)), 400)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        ([None], "messages[0]"),
        ([{"content": "Hello"}], "messages[0].role"),
        ([{"role": "robot", "content": "Hello"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": {"text": "Hello"}}], "messages[0].content"),
        ([{"role": "user", "content": ["Hello"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ],
    ids=str,
)
def test_case_72_messages_that_are_none(http: httpx.Client, messages: Any, param: str) -> None:
    assert error_of(http.post(CHAT, json={"messages": messages}), 400)["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [[1], []],
        ["one", 2],
        ["one", [2]],
        [1, True],
        [1.0],
        [[1, None]],
        [-1],
        [320],
        [[1], [320]],
        [2**80],
        ["the"] * 257,
        None,
        7,
    ],
    ids=lambda prompt: str(prompt)[:20],
)
def test_cases_72_and_73_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    assert error_of(http.post(COMPLETIONS, json={"prompt": prompt}), 400)["param"] == "prompt"


def test_a_token_outside_the_vocabulary_is_named(http: httpx.Client) -> None:
    error = error_of(http.post(COMPLETIONS, json={"prompt": [1, 777, 2]}), 400)
    assert error["message"] == "prompt: the token id 777 is not in the vocabulary, which ends at 319."


def test_case_72_an_empty_prompt_is_a_text_about_to_begin(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    assert http.post(COMPLETIONS, json={"prompt": ""}).json()["choices"][0]["text"] == "the"
    assert text_of(dispatcher.opened[0].prompt_token_ids) == "<s>"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"top_logprobs": 3}, "top_logprobs"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"functions": [{}]}, "functions"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(path, json=chat(prompt="x", **fields)), 400)
    assert error["param"] == param
    assert error["message"] == f"{param}: this value is not supported."


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (COMPLETIONS, {"echo": False, "max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_case_69_logprobs_and_echo_are_honoured_or_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    assert error_of(http.post(path, json=chat(prompt="x", **fields)), 400)["param"] == param


HARMLESS: dict[str, Any] = {
    "n": 1,
    "best_of": None,
    "logprobs": False,
    "tools": [],
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "response_format": {"type": "text"},
    "temperature": None,
    "stop": None,
    "stream": None,
    "stream_options": None,
    "user": "someone",
    "metadata": {"unheard": ["of"]},
}
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "x"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_changes_nothing_is_accepted(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={**PROMPTS[path], **HARMLESS})
    assert response.status_code == 200
    assert "x-shoal-warning" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields_are_ignored_with_a_warning(
    http: httpx.Client, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"temprature_{len(path)}_{stream}"
    body = {**PROMPTS[path], name: 0.5, "caf\u00e9\n": None, "stream": stream}
    for _ in range(2):
        response = http.post(path, json=body)
        assert response.status_code == 200
        assert response.headers["x-shoal-warning"] == f"ignored unknown fields: caf??, {name}"
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_a_field_without_a_name_is_named_too(http: httpx.Client) -> None:
    """Else the header would end with a blank, which h11 refuses to send."""
    response = http.post(COMPLETIONS, json={**PROMPTS[COMPLETIONS], "": 1})
    assert (response.status_code, response.headers["x-shoal-warning"]) == (200, 'ignored unknown fields: ""')


def test_text_parts_are_lines(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}).status_code == 200
    assert "user\none\ntwo<|im_end|>" in text_of(dispatcher.opened[0].prompt_token_ids)


def test_a_template_that_refuses(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={"messages": [USER, USER]}), 400)
    assert "Conversation roles must alternate" in error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_json_under_another_name_is_json(http: httpx.Client, content_type: str) -> None:
    response = http.post(CHAT, content=json.dumps(chat()), headers={"content-type": content_type})
    assert response.status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    assert error_of(http.post(f"{CHAT}/", json=chat()), 404)
    assert error_of(http.get("/nothing", headers={"host": "["}), 404)
    response = http.get(CHAT)
    assert error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/org/tiny"])
def test_what_can_be_got_has_a_head(http: httpx.Client, dispatcher: FakeDispatcher, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    dispatcher.is_ready = False
    assert http.head(path).status_code == http.get(path).status_code


def test_a_body_has_a_limit_declared_or_not(http: httpx.Client) -> None:
    body = b" " * (2**20 + 1)

    def in_parts() -> Iterator[bytes]:
        yield body

    assert error_of(http.post(CHAT, content=body), 413)["code"] == "request_too_large"
    assert error_of(http.post(CHAT, content=in_parts()), 413)["code"] == "request_too_large"


@pytest.mark.parametrize("sent", ["abc-123", "a b", "~" * 128])
def test_a_sane_request_id_comes_back(http: httpx.Client, sent: str) -> None:
    assert http.get("/health", headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [b"", b"x" * 129, b"caf\xe9"])
def test_any_other_is_replaced(http: httpx.Client, sent: bytes) -> None:
    given = http.get("/health", headers=[(b"x-request-id", sent)]).headers["x-request-id"]
    assert given.startswith("req-")


def test_ready_says_whether_a_request_could_be_placed(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    assert http.get("/ready").status_code == 200
    dispatcher.is_ready = False
    response = http.get("/ready")
    assert error_of(response, 503)["code"] == "no_engine"
    assert response.headers["retry-after"] == "1"
    assert http.get("/health").status_code == 200
