"""Several prompts in one request, and many requests at once."""

import asyncio
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from shoal.actors.messages import ErrorKind, FinishReason, RequestError
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

PROMPTS = ["the", "fox", "quick"]
BOS = 0


def answers(dispatcher: FakeDispatcher) -> None:
    """Every prompt gets another answer, the first one the longest."""
    dispatcher.scripts = {
        (BOS, *tokens_of(prompt)): Script(
            token_ids=tokens_of(f"{prompt} and" * (3 - index)), num_cached_tokens=index
        )
        for index, prompt in enumerate(PROMPTS)
    }


def text(index: int) -> str:
    return f"{PROMPTS[index]} and" * (3 - index)


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token ids"])
def test_case_73_one_choice_a_prompt_in_order(
    client: openai.OpenAI, dispatcher: FakeDispatcher, as_ids: bool
) -> None:
    answers(dispatcher)
    prompt: Any = [[BOS, *tokens_of(one)] for one in PROMPTS] if as_ids else PROMPTS
    answer = client.completions.create(model="org/tiny", prompt=prompt, max_tokens=99)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, text(i)) for i in range(3)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(1 + len(tokens_of(prompt)) for prompt in PROMPTS)
    assert answer.usage.completion_tokens == sum(len(tokens_of(text(i))) for i in range(3))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 + 1 + 2
    assert len({request.request_id for request in dispatcher.opened}) == 3


def test_case_73_a_stream_of_several_prompts(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    answers(dispatcher)
    with client.completions.create(
        model="org/tiny", prompt=PROMPTS, max_tokens=99, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        [choice] = chunk.choices
        assert not reasons[choice.index], "a choice went on after its end"
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == {i: text(i) for i in range(3)}
    assert reasons == {i: ["length"] for i in range(3)}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == sum(len(tokens_of(text(i))) for i in range(3))


@pytest.mark.parametrize("stream", [False, True])
def test_case_73_one_failure_ends_all_of_them(
    http: httpx.Client, dispatcher: FakeDispatcher, stream: bool
) -> None:
    dispatcher.script = Script(hangs=True)
    error = RequestError(kind=ErrorKind.ENGINE_LOST, message="gone")
    dispatcher.scripts = {(BOS, *tokens_of("fox")): Script(error=error)}
    response = http.post("/v1/completions", json={"prompt": PROMPTS, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_lost"
    assert len(dispatcher.opened) == 3
    assert len(dispatcher.aborted) == 2


def test_case_58_a_hundred_and_fifty_streams_make_progress_together(
    url: str, dispatcher: FakeDispatcher
) -> None:
    num_streams, tokens = 150, tokens_of("the quick brown fox")
    dispatcher.script = Script(token_ids=tokens, waits_for=num_streams, finish_reason=FinishReason.LENGTH)
    unlimited = httpx.Limits(max_connections=None)

    async def read_all() -> list[str]:
        async with httpx.AsyncClient(base_url=url, limits=unlimited, timeout=30, trust_env=False) as client:
            posts = [
                client.post("/v1/completions", json={"prompt": "", "stream": True})
                for _ in range(num_streams)
            ]
            return [response.text for response in await asyncio.gather(*posts)]

    texts = asyncio.run(read_all())
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert {text.count('"finish_reason":null') for text in texts} == {len(tokens)}
    assert len(dispatcher.finished) == num_streams
