import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.actors.ingress.body import RequestT, parse_body
from shoal.actors.ingress.choices import Asked
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.generation_config import GenerationDefaults
from shoal.actors.ingress.intake import Intake, Intent, output_budget, prefix_keys
from shoal.actors.ingress.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard, SamplingParams
from shoal.kvstore.block_hash import extend_keys, root_key
from tests.ingress.checkpoints import adding_bos, byte_level_tokenizer, save_checkpoint, text_of, tokens_of

BOS, EOS = 0, 1
MAX_MODEL_LEN = 128
SALT = "salt"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(
        save_checkpoint(tmp_path_factory.mktemp("tiny"), adding_bos(byte_level_tokenizer()))
    )


def card(*, fingerprint: bytes = b"tiny") -> ModelCard:
    return ModelCard(
        name="tiny", checkpoint="", max_model_len=MAX_MODEL_LEN, block_size=4, fingerprint=fingerprint
    )


@pytest.fixture(scope="module")
def intake(codec: TextCodec) -> Intake:
    return Intake(card(), codec, GenerationDefaults())


def completion(intake: Intake, **fields: Any) -> Asked:
    [asked] = completions(intake, {"prompt": "the fox", **fields}).choices
    return asked


def parsed(body: Mapping[str, Any], body_type: type[RequestT]) -> RequestT:
    return parse_body(json.dumps(body).encode(), body_type)[0]


def completions(intake: Intake, body: Mapping[str, Any]) -> Intent:
    return intake.completion(parsed(body, CompletionRequest), SALT)


def chat(intake: Intake, **fields: Any) -> Asked:
    messages = [{"role": "user", "content": "Hello"}]
    [asked] = chats(intake, {"messages": messages, **fields}).choices
    return asked


def chats(intake: Intake, body: Mapping[str, Any]) -> Intent:
    return intake.chat(parsed(body, ChatCompletionRequest), SALT)


def tokenize(intake: Intake, body: Mapping[str, Any]) -> TokenizeResponse:
    return intake.tokenize(parsed(body, TokenizeRequest))


def test_each_field_goes_where_the_engine_reads_it(intake: Intake) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "seed": -7,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": -100, "319": 0.5},
        "min_tokens": 3,
    }
    request = completion(intake, **fields, max_tokens=9, priority=-2).request
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.25,
        seed=-7,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((7, -100.0), (319, 0.5)),
        min_tokens=3,
    )
    assert (request.max_tokens, request.cache_salt, request.priority) == (9, SALT, -2)


def test_the_checkpoints_defaults_hold_where_a_request_says_nothing(codec: TextCodec) -> None:
    defaults = GenerationDefaults(temperature=0.25, top_k=20, repetition_penalty=1.5)
    intake = Intake(card(), codec, defaults)
    sampling = completion(intake, temperature=0, seed=1).request.sampling
    assert sampling == SamplingParams(temperature=0.0, top_k=20, repetition_penalty=1.5, seed=1)


def test_the_seed_is_fixed_on_arrival(intake: Intake) -> None:
    seeds = {completion(intake).request.sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("fields", "stop_token_ids"),
    [
        ({}, {EOS}),
        ({"stop_token_ids": [7, 9]}, {EOS, 7, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [7]}, {7}),
    ],
)
def test_what_ends_an_answer(intake: Intake, fields: Mapping[str, Any], stop_token_ids: set[int]) -> None:
    assert completion(intake, **fields).request.stop_token_ids == stop_token_ids


def test_token_ids_are_taken_as_they_are(intake: Intake) -> None:
    assert completion(intake, prompt=[5, 0, 7]).request.prompt_token_ids == (5, 0, 7)


def test_case_73_each_prompt_is_a_choice(intake: Intake) -> None:
    intent = completions(intake, {"prompt": ["the", "fox"], "seed": 5})
    assert [text_of(asked.request.prompt_token_ids) for asked in intent.choices] == ["<s>the", "<s>fox"]
    assert [asked.request.request_id for asked in intent.choices] == [
        f"{intent.answer_id}-0",
        f"{intent.answer_id}-1",
    ]
    assert [asked.request.sampling.seed for asked in intent.choices] == [5, 5]


def test_what_all_prompts_share_is_made_once(intake: Intake) -> None:
    body = {"prompt": ["the", "fox"], "logit_bias": {"7": 1}, "stop": "end"}
    one, two = completions(intake, body).choices
    assert one.stop is two.stop
    assert one.request.stop_token_ids is two.request.stop_token_ids
    assert one.request.sampling.logit_bias is two.request.sampling.logit_bias
    assert one.request.sampling.seed != two.request.sampling.seed


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 3}, 3, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"echo": True}, None, None),
    ],
)
def test_logprobs_of_a_completion(
    intake: Intake, fields: Mapping[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    request = completion(intake, **fields).request
    assert (request.logprobs, request.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_logprobs_of_a_chat(intake: Intake) -> None:
    assert chat(intake).request.logprobs is None
    assert chat(intake, logprobs=True).request.logprobs == 0
    assert chat(intake, logprobs=True, top_logprobs=20).request.logprobs == 20


def test_a_prompt_that_is_only_scored_costs_one_token_that_is_not_shown(intake: Intake) -> None:
    asked = completion(intake, echo=True, max_tokens=0)
    assert (asked.request.max_tokens, asked.is_silent, asked.echo) == (1, True, "the fox")


def test_token_ids_are_echoed_as_what_they_were_made_from(intake: Intake) -> None:
    text = "<s>naïve<|im_end|>"
    assert completion(intake, prompt=list(tokens_of(text)), echo=True).echo == text


def test_half_a_character_at_the_end_of_an_echo_is_left_to_the_answer(intake: Intake) -> None:
    whole = list(tokens_of("the 日"))
    assert completion(intake, prompt=whole, echo=True).echo == "the 日"
    assert completion(intake, prompt=whole[:-1], echo=True).echo == "the "


def test_keys_name_the_complete_blocks_of_a_prompt(codec: TextCodec, intake: Intake) -> None:
    prompt = tuple(range(5, 14))
    asked = completion(intake, prompt=list(prompt))
    assert asked.block_keys == tuple(extend_keys(root_key(b"tiny", SALT), prompt, 4))
    assert len(asked.block_keys) == 2


def test_there_are_no_keys_where_nothing_could_be_hit(intake: Intake) -> None:
    assert prefix_keys(card(fingerprint=b""), "", tuple(range(9))) == ()


def test_block_keys_are_known_once_the_engines_have_said_what_names_them(codec: TextCodec) -> None:
    intake, prompt = Intake(card(fingerprint=b""), codec, GenerationDefaults()), list(range(5, 14))
    assert completion(intake, prompt=prompt).block_keys == ()
    intake.learn_fingerprint(b"tiny")
    assert completion(intake, prompt=prompt).block_keys == prefix_keys(card(), SALT, prompt) != ()


def budget(num_prompt_tokens: int, wanted: int | None, default: int | None = 16) -> int:
    return output_budget(num_prompt_tokens, wanted=wanted, default=default, max_model_len=128, param="prompt")


def test_case_74_only_a_length_that_nobody_asked_for_is_clamped() -> None:
    assert budget(100, wanted=28) == 28
    assert budget(100, wanted=None) == 16
    assert budget(120, wanted=None) == 8
    assert budget(100, wanted=None, default=None) == 28
    with pytest.raises(ApiError, match=r"128 tokens, but 200 were requested: 100 in the prompt and 100 for"):
        budget(100, wanted=100)


@pytest.mark.parametrize("num_prompt_tokens", [128, 129])
def test_case_43_a_prompt_that_leaves_no_room_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ApiError, match=rf"128 tokens, but the prompt has {num_prompt_tokens}") as raised:
        budget(num_prompt_tokens, wanted=None)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("ask", "body", "param"),
    [
        (completions, {"prompt": ["the", "the " * 1000]}, "prompt"),
        (chats, {"messages": [{"role": "user", "content": "the " * 1000}]}, "messages"),
        (tokenize, {"prompt": "the " * 1000}, "prompt"),
        (tokenize, {"prompt": "the " * 1000, "add_special_tokens": False}, "prompt"),
        (tokenize, {"messages": [{"role": "user", "content": "the " * 1000}]}, "messages"),
    ],
)
def test_case_43_a_text_that_cannot_fit_is_not_tokenized(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, ask: Any, body: Mapping[str, Any], param: str
) -> None:
    intake, encode = Intake(card(), codec, GenerationDefaults()), codec.encode_plainly
    encoded: list[str] = []

    def recorded(text: str, add_special_tokens: bool) -> tuple[int, ...]:
        encoded.append(text)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(codec, "encode_plainly", recorded)
    message = r"128 tokens, but a prompt of 40\d\d bytes counts as at least 33\d"
    with pytest.raises(ApiError, match=message) as raised:
        ask(intake, body)
    assert (raised.value.code, raised.value.body["error"]["param"]) == ("context_length_exceeded", param)
    assert all(len(text) < 1000 for text in encoded)


def test_the_vocabulary_is_the_models(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, byte_level_tokenizer(), configs={"config.json": {"vocab_size": 512}})
    intake = Intake(card(), TextCodec.load(folder), GenerationDefaults())
    assert completion(intake, prompt=[511]).request.prompt_token_ids == (511,)
    with pytest.raises(ApiError, match="512 is not in the vocabulary, which ends at 511"):
        completion(intake, prompt=[512])
