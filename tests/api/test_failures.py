"""What a client sees of a cluster that fails, before and after an answer has begun."""

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from shoal.actors.messages import ErrorKind, RequestError
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

SECRET = "cuda:3 of node 10.0.0.7 fell over"
STATUSES = {
    ErrorKind.INVALID: 400,
    ErrorKind.NEVER_FITS: 400,
    ErrorKind.INTERNAL: 500,
    ErrorKind.ENGINE_LOST: 503,
    ErrorKind.NO_ENGINE: 503,
    ErrorKind.OVERLOADED: 503,
}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the fox", **fields}


def events(response: httpx.Response) -> list[str]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    return [line.removeprefix("data: ") for line in lines]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ErrorKind)
def test_case_63_an_error_before_the_first_token_is_a_status(
    http: httpx.Client, dispatcher: FakeDispatcher, kind: ErrorKind, stream: bool
) -> None:
    dispatcher.script = Script(error=RequestError(kind=kind, message=SECRET))
    response = http.post("/v1/completions", json=body(stream=stream))
    assert response.status_code == STATUSES[kind]
    error = response.json()["error"]
    assert error["code"] == kind
    assert (SECRET in error["message"]) == (response.status_code == 400)
    assert response.headers.get("retry-after") == ("1" if response.status_code == 503 else None)


def test_case_63_an_error_in_a_whole_answer_is_a_status(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = Script(
        token_ids=tokens_of("alpha"), error=RequestError(kind=ErrorKind.ENGINE_LOST, message=SECRET)
    )
    assert http.post("/v1/completions", json=body()).status_code == 503


def test_case_63_an_error_in_a_stream_is_its_last_event(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = Script(
        token_ids=tokens_of("alpha"), error=RequestError(kind=ErrorKind.ENGINE_LOST, message=SECRET)
    )
    *chunks, last = events(http.post("/v1/completions", json=body(stream=True)))
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "alpha"
    assert json.loads(last)["error"]["code"] == "engine_lost"


def test_the_client_raises_on_an_error_in_a_stream(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(
        token_ids=tokens_of("alpha"), error=RequestError(kind=ErrorKind.INTERNAL, message=SECRET)
    )
    with (
        client.completions.create(model="org/tiny", prompt="", stream=True) as stream,
        pytest.raises(openai.APIError, match="failed to process"),
    ):
        list(stream)


@pytest.mark.parametrize(("stream", "begun"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_bug_of_ours_is_logged_once_and_tells_nothing(
    http: httpx.Client,
    dispatcher: FakeDispatcher,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    begun: bool,
) -> None:
    dispatcher.script = Script(token_ids=tokens_of("al") if begun else (), raises=LookupError(SECRET))
    response = http.post("/v1/completions", json=body(stream=stream), headers={"x-request-id": "mine"})
    error = json.loads(events(response)[-1]) if stream and begun else response.json()
    assert response.status_code == (200 if stream and begun else 500)
    assert error["error"]["message"] == "The server failed to process this request."
    assert response.headers["x-request-id"] == "mine"
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == "request mine failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is LookupError


def test_an_engines_own_words_are_in_the_log_and_the_prompt_is_not(
    http: httpx.Client, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="shoal")
    dispatcher.script = Script(error=RequestError(kind=ErrorKind.INTERNAL, message=SECRET))
    http.post("/v1/completions", json=body(prompt="my diary"))
    assert SECRET in caplog.text
    assert "diary" not in caplog.text
