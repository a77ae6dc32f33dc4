"""Several answers to one prompt, and the best of several."""

from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from shoal.actors.messages import FinishReason
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["the fox", "quick", "brown and lazy"]
BOS = 0


def say(dispatcher: FakeDispatcher, *texts: str, **more: Any) -> None:
    """To the next that are opened."""
    dispatcher.next_scripts = [Script(token_ids=tokens_of(text), **more) for text in texts]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_chat_of_three_choices(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    say(dispatcher, *TEXTS, num_cached_tokens=4)
    chat = client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "Hello"}], n=3, seed=7, max_tokens=99
    )
    assert [(choice.index, choice.message.content) for choice in chat.choices] == list(enumerate(TEXTS))
    first, *others = dispatcher.opened
    assert [request.request_id for request in dispatcher.opened] == [f"{chat.id}-{i}" for i in range(3)]
    assert {request.group for request in dispatcher.opened} == {chat.id}
    assert {request.prompt_token_ids for request in others} == {first.prompt_token_ids}
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens == len(first.prompt_token_ids), "once"
    assert chat.usage.prompt_tokens_details.cached_tokens == 4, "the first's"
    assert chat.usage.completion_tokens == sum(len(tokens_of(text)) for text in TEXTS)


def seeds(http: httpx.Client, dispatcher: FakeDispatcher, **body: Any) -> list[int]:
    dispatcher.forget()
    assert http.post(COMPLETIONS, json={"prompt": "the", **body}).status_code == 200
    return [request.sampling.seed for request in dispatcher.opened]


def test_seeds_differ_and_are_the_same_again(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    eight = seeds(http, dispatcher, n=8, seed=7)
    assert len(set(eight)) == 8
    assert eight == seeds(http, dispatcher, n=8, seed=7)
    assert eight[:3] == seeds(http, dispatcher, n=3, seed=7), "however many there are"
    assert eight[:1] == seeds(http, dispatcher, seed=7) == [7], "the first is what it is alone"
    assert eight == seeds(http, dispatcher, n=1, best_of=8, seed=7)
    assert not set(eight) & set(seeds(http, dispatcher, n=8, seed=8))
    unsaid = seeds(http, dispatcher, n=8)
    assert len(set(unsaid)) == 8 and unsaid != seeds(http, dispatcher, n=8)
    assert all(-(2**63) <= seed < 2**63 for seed in eight)


def test_choices_of_several_prompts_are_in_the_prompts_order(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    say(dispatcher, "the", "fox", "quick", "brown")
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 99, "seed": 3}
    answer = http.post(COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["the", "fox", "quick", "brown"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    one, two = {request.prompt_token_ids for request in dispatcher.opened}
    assert answer["usage"]["prompt_tokens"] == len(one) + len(two)
    first, _, third, _ = dispatcher.opened
    assert first.group != third.group and first.sampling.seed == third.sampling.seed
    assert len({request.request_id for request in dispatcher.opened}) == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_of_two_choices(http: httpx.Client, dispatcher: FakeDispatcher, path: str) -> None:
    say(dispatcher, *TEXTS[:2], num_cached_tokens=3)
    asked = {"prompt": "the"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**asked, "n": 2, "max_tokens": 99, "stream": True, "stream_options": {"include_usage": True}}
    texts: dict[int, str] = defaultdict(str)
    usage: dict[str, Any] = {}
    for line in http.post(path, json=body).text.split("\n\n"):
        if line.startswith("data: {"):
            event = httpx.Response(200, text=line.removeprefix("data: ")).json()
            usage = event["usage"] or usage
            for choice in event["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert texts == dict(enumerate(TEXTS[:2]))
    assert usage["prompt_tokens"] == len(dispatcher.opened[0].prompt_token_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_every_choice_echoes_the_prompt_with_its_logprobs(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    say(dispatcher, " fox", " quick")
    body = {"prompt": "the", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 99}
    one, two = http.post(COMPLETIONS, json=body).json()["choices"]
    assert (one["text"], two["text"]) == ("the fox", "the quick")
    num_prompt = 1 + len(tokens_of("the"))
    assert one["logprobs"]["tokens"][:num_prompt] == two["logprobs"]["tokens"][:num_prompt]


def test_69_the_best_of_three_are_the_likeliest_by_token(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    """A token's logprob is here its id, negative: the length of an answer is not to count."""
    answers = [(200, 80), (90,), (90, 95, 85, 88)]
    dispatcher.next_scripts = [Script(token_ids=token_ids, num_cached_tokens=2) for token_ids in answers]
    body = {"prompt": "the", "n": 2, "best_of": 3, "max_tokens": 99}
    answer = http.post(COMPLETIONS, json=body).json()
    dispatcher.next_scripts = [Script(token_ids=token_ids) for token_ids in answers]
    alone = [http.post(COMPLETIONS, json={"prompt": "the", "max_tokens": 99}).json() for _ in answers]
    texts = [one["choices"][0]["text"] for one in alone]
    assert [choice["text"] for choice in answer["choices"]] == [texts[2], texts[1]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "nobody asked for them"
    assert answer["usage"]["completion_tokens"] == 7, "of all candidates"
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert [request.logprobs for request in dispatcher.opened[:3]] == [0, 0, 0]
    assert {request.prompt_logprobs for request in dispatcher.opened} == {None}


def test_69_the_best_of_each_prompt_with_its_logprobs_and_without_its_stop_string(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    likely, unlikely = (80, 81), (200, 201)
    dispatcher.next_scripts = [
        Script(token_ids=token_ids, finish_reason=FinishReason.LENGTH)
        for token_ids in (unlikely, likely, likely, unlikely)
    ]
    body = {"prompt": ["one", "two"], "best_of": 2, "logprobs": 0, "max_tokens": 99}
    choices = http.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-80 / 64, -81 / 64]] * 2


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "2 answers are fewer than the 3"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"best_of": 0}, "best_of", "greater than or equal to 1"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"best_of": True}, "best_of", "integer"),
        ({"best_of": -(2**70)}, "best_of", "best_of"),
        ({"best_of": "all"}, "best_of", "integer"),
        ({"prompt": ["a"] * 100, "n": 3}, "n", "3 answers to each of 100 prompts are more than 256"),
        ({"prompt": ["a"] * 100, "best_of": 3}, "best_of", "more than 256"),
    ],
    ids=str,
)
def test_69_what_cannot_be_had_is_refused(
    http: httpx.Client, dispatcher: FakeDispatcher, fields: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(http.post(COMPLETIONS, json={"prompt": "the", **fields}))
    assert error["param"] == param and says in error["message"]
    assert dispatcher.opened == []


def test_as_many_candidates_as_answers_can_be_streamed(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    body = {"prompt": "the", "n": 2, "best_of": 2, "stream": True}
    assert http.post(COMPLETIONS, json=body).text.endswith("data: [DONE]\n\n")
    assert len(dispatcher.opened) == 2
