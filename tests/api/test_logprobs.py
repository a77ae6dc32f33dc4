"""Logprobs in the shapes that OpenAI's client knows, whole and streamed."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from shoal.actors.messages import FinishReason
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import text_of, tokens_of

EOS = 1
ANSWER = "the café 日"
TOKENS = (*tokens_of(ANSWER), EOS)
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def an_answer(dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=TOKENS, chunk_size=2, finish_reason=FinishReason.STOP)


def check_content(content: list[ChatCompletionTokenLogprob] | None, num_top: int) -> None:
    assert content is not None
    assert [token.logprob for token in content] == [-token_id / 64 for token_id in TOKENS]
    assert b"".join(bytes(token.bytes or ()) for token in content) == ANSWER.encode() + b"</s>"
    for token in content:
        if not token.token.startswith("bytes:"):
            assert token.token.encode() == bytes(token.bytes or ())
        assert [one.logprob for one in token.top_logprobs] == [-(rank + 1) / 8 for rank in range(num_top)]
        assert [one.token for one in token.top_logprobs] == [text_of([70 + rank]) for rank in range(num_top)]


@pytest.mark.parametrize("num_top", [None, 0, 3, 20])
def test_of_a_chat(client: openai.OpenAI, num_top: int | None) -> None:
    answer = client.chat.completions.create(
        model="org/tiny", messages=HELLO, logprobs=True, top_logprobs=num_top
    )
    [choice] = answer.choices
    assert choice.message.content == ANSWER
    assert choice.logprobs is not None
    assert choice.logprobs.refusal is None
    check_content(choice.logprobs.content, num_top or 0)


def test_of_a_streamed_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="org/tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    check_content(
        [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()], 2
    )


def test_parts_of_characters_have_bytes_and_no_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="org/tiny", messages=HELLO, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.content or []
    assert [token.token for token in tokens][-3:-1] == ["bytes:\\xe6\\x97", "bytes:\\xa5"]
    assert [token.bytes for token in tokens][-3:-1] == [[0xE6, 0x97], [0xA5]]


def test_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="org/tiny", prompt="the", logprobs=2)
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-token_id / 64 for token_id in TOKENS]
    assert logprobs.tokens is not None
    assert logprobs.tokens[-1] == "</s>"
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {
        text_of([70]): -1 / 8,
        text_of([71]): -2 / 8,
        text_of(TOKENS[:1]): -TOKENS[0] / 64,
    }
    for token, offset in zip(logprobs.tokens, logprobs.text_offset or (), strict=True):
        assert token.startswith(("bytes:", "</s>")) or choice.text[offset:].startswith(token)


def test_of_a_streamed_completion(http: httpx.Client, client: openai.OpenAI) -> None:
    whole = client.completions.create(model="org/tiny", prompt="the", logprobs=2).choices[0].logprobs
    with client.completions.create(model="org/tiny", prompt="the", logprobs=2, stream=True) as stream:
        pieces = [piece for chunk in stream if (piece := chunk.choices[0].logprobs)]
    assert whole is not None
    for name, column in whole.model_dump().items():
        assert [value for piece in pieces for value in getattr(piece, name)] == column


def test_tokens_behind_a_stop_string_are_not_told(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=tokens_of("alpha beta gamma alpha"), chunk_size=100)
    answer = client.completions.create(
        model="org/tiny", prompt="the", logprobs=0, stop="gamma", max_tokens=99
    )
    assert answer.choices[0].text == "alpha beta "
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    tokens = answer.choices[0].logprobs.tokens or []
    assert "".join(tokens) == "alpha beta gamma"
    assert len(tokens) == answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["correct horse battery staple", list(tokens_of("<s>correct horse"))])
def test_case_67_echo_with_logprobs(http: httpx.Client, prompt: str | list[int], stream: bool) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "stream": stream}
    chunks = completion_chunks(http, {**body, "stream_options": {"include_usage": True}})
    usage = chunks[-1]["usage"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    scores = [score for columns in logprobs for score in columns["token_logprobs"]]
    assert scores[0] is None
    assert None not in scores[1:]
    assert len(scores) == usage["prompt_tokens"] + usage["completion_tokens"]
    text = "".join(choice["text"] for choice in choices)
    assert text == (prompt if isinstance(prompt, str) else "<s>correct horse") + ANSWER
    top = [row for columns in logprobs for row in columns["top_logprobs"]]
    assert top[0] is None
    assert all(1 <= len(row) <= 2 for row in top[1:])
    for columns in logprobs:
        for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
            assert token.startswith(("bytes:", "<")) or text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_and_nothing_is_said(
    http: httpx.Client, dispatcher: FakeDispatcher, stream: bool
) -> None:
    body = {"prompt": "the fox", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    chunks = completion_chunks(http, {**body, "stream_options": {"include_usage": True}})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "the fox"
    assert choices[-1]["finish_reason"] == "length"
    num_scores = sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])
    assert num_scores == chunks[-1]["usage"]["total_tokens"] == len(dispatcher.opened[0].prompt_token_ids)
    assert dispatcher.opened[0].max_tokens == 1


def completion_chunks(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole answer as the only chunk of a stream."""
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return [response.json()]
    *events, done = response.text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [httpx.Response(200, text=event.removeprefix("data: ")).json() for event in events]


def test_through_the_asynchronous_client(url: str, dispatcher: FakeDispatcher) -> None:
    async def scored() -> list[ChatCompletionTokenLogprob]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="org/tiny", messages=HELLO, logprobs=True, top_logprobs=1, stream=True
            )
            choices = [chunk.choices[0] async for chunk in stream]
        return [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]

    check_content(asyncio.run(scored()), 1)
