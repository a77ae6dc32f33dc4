"""The bytes of a stream, event by event."""

import json
from typing import Any

import httpx
import pytest

from shoal.actors.messages import FinishReason
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

EOS = 1
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


@pytest.fixture(autouse=True)
def an_answer(dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(
        token_ids=(*tokens_of("alpha"), EOS),
        finish_reason=FinishReason.STOP,
        num_cached_tokens=15,
        num_fetched_tokens=5,
    )


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        assert chunk.pop("id").startswith(("chatcmpl-", "cmpl-"))
        assert isinstance(chunk.pop("created"), int)
        assert chunk.pop("model") == "org/tiny"
    return chunks


def test_a_chat_stream(http: httpx.Client) -> None:
    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    assert chunks_of(http.post("/v1/chat/completions", json=CHAT)) == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "al"}),
        chunk({"content": "pha"}),
        chunk({}, "stop"),
    ]


def test_case_70_usage_comes_last_and_is_null_before(http: httpx.Client) -> None:
    *chunks, last = chunks_of(
        http.post("/v1/chat/completions", json={**CHAT, "stream_options": {"include_usage": True}})
    )
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 22,
        "completion_tokens": 3,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 20},
        "cached_tokens_by_place": {"device": 15, "own_store": 5, "other_store": 0},
    }


def test_a_completion_stream(http: httpx.Client) -> None:
    def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {"object": "text_completion", "choices": [choice]}

    response = http.post("/v1/completions", json={"prompt": "", "stream": True})
    assert chunks_of(response) == [chunk("al"), chunk("pha"), chunk("", "stop")]
    assert response.headers["cache-control"] == "no-cache"


def test_a_whole_chat(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, "stream": False}).json()
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "alpha", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_the_description_names_what_is_served(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    assert described["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert {"messages", "temperature"} <= described["components"]["schemas"]["ChatCompletionRequest"][
        "properties"
    ].keys()
