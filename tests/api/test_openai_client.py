"""The official client against a real server: what it parses is what we meant."""

import asyncio
from dataclasses import replace

import openai
import pytest

from shoal.actors.messages import FinishReason
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import text_of, tokens_of

ANSWER = "naïve café 日本語 😀, alpha beta gamma"
EOS = 1
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def an_answer(dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=(*tokens_of(ANSWER), EOS), finish_reason=FinishReason.STOP)


def test_a_chat(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    answer = client.chat.completions.create(model="org/tiny", messages=HELLO)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    [request] = dispatcher.opened
    assert answer.id == request.request_id
    assert text_of(request.prompt_token_ids) == "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant"
    assert request.max_tokens == 128 - len(request.prompt_token_ids)
    assert request.stop_token_ids == {EOS}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(tokens_of(ANSWER)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="org/tiny", messages=HELLO, stream=True) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert "\ufffd" not in [delta.content for delta in deltas]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert deltas[-1].content is None
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_of_sixteen_tokens(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=tokens_of("alpha" * 20))
    answer = client.completions.create(model="org/tiny", prompt="the fox")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("alpha" * 8, "length")
    assert text_of(dispatcher.opened[0].prompt_token_ids) == "<s>the fox"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_streamed_completion_with_usage(client: openai.OpenAI) -> None:
    with client.completions.create(
        model="org/tiny",
        prompt="the fox",
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokens_of(ANSWER)) + 1


def test_sampling_parameters_reach_the_engine(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    client.chat.completions.create(
        model="org/tiny",
        messages=HELLO,
        temperature=0,
        top_p=0.5,
        seed=-(2**63),
        max_completion_tokens=7,
        extra_body={"top_k": -1},
        user="someone",
    )
    [request] = dispatcher.opened
    assert request.max_tokens == 7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 0, -(2**63))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_case_64_a_stop_string_shows_in_no_stream(
    client: openai.OpenAI, dispatcher: FakeDispatcher, chunk_size: int
) -> None:
    dispatcher.script = Script(token_ids=tokens_of("alpha beta gamma" * 5), chunk_size=chunk_size, hangs=True)
    whole = client.completions.create(model="org/tiny", prompt="", stop=["beta gamma"], max_tokens=30)
    with client.completions.create(
        model="org/tiny",
        prompt="",
        stop="beta gamma",
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == "alpha "
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.usage == last.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(tokens_of("alpha beta gamma"))
    assert dispatcher.aborted == dispatcher.opened


def test_many_streams_at_once_through_the_asynchronous_client(url: str, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = replace(dispatcher.script, pause_s=0.001)

    async def chat(client: openai.AsyncOpenAI, streamed: bool) -> str | None:
        if not streamed:
            answer = await client.chat.completions.create(model="org/tiny", messages=HELLO)
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(model="org/tiny", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def chats() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(chat(client, streamed=number % 2 == 0) for number in range(24)))

    assert asyncio.run(chats()) == [ANSWER] * 24
    assert len({request.request_id for request in dispatcher.opened}) == 24
    assert len({request.sampling.seed for request in dispatcher.opened}) == 24
    assert dispatcher.aborted == []


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("org/tiny", "model", "shoal")
    assert client.models.retrieve("org/tiny") == model


def test_case_75_an_unknown_model_is_not_found(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    for ask in (
        lambda: client.models.retrieve("org/other"),
        lambda: client.chat.completions.create(model="org/other", messages=HELLO),
        lambda: client.completions.create(model="org/other", prompt="", stream=True),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert raised.value.code == "model_not_found"
    assert dispatcher.opened == []


def test_case_74_more_tokens_than_there_is_room_for(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"128 .* 129 were requested: 28 .* and 101") as raised:
        client.completions.create(model="org/tiny", prompt="the" * 27, max_tokens=101)
    assert raised.value.code == "context_length_exceeded"
    client.completions.create(model="org/tiny", prompt="the" * 120)
    assert dispatcher.opened[-1].max_tokens == 7


def test_case_43_a_prompt_too_long_and_then_a_normal_one(client: openai.OpenAI) -> None:
    for num_prompt_tokens in (128, 129):
        with pytest.raises(openai.BadRequestError, match=f"128 .* prompt has {num_prompt_tokens}"):
            client.completions.create(model="org/tiny", prompt="the" * (num_prompt_tokens - 1))
    assert client.completions.create(model="org/tiny", prompt="the" * 126).usage
