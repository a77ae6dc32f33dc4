from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.ingress.detokenizer import Detokenizer, TokenBytes
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.generation import TextDelta, Transcript, first_attempt, output_budget
from shoal.actors.ingress.protocol import CompletionRequest, Usage
from shoal.actors.ingress.stop_strings import StopStrings
from shoal.actors.messages import EngineRequest, ErrorKind, FinishReason, RequestError, RequestId, TokenChunk
from tests.ingress.checkpoints import byte_level_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
TOKEN_BYTES = TokenBytes(TOKENIZER)
EOS = token_id(TOKENIZER, "</s>")
REQUEST = EngineRequest(
    request_id=RequestId("cmpl-1"),
    attempt=1,
    prompt_token_ids=(0, 70, 71),
    max_tokens=100,
    stop_token_ids=frozenset({EOS}),
)


def transcript(*stops: str) -> Transcript:
    return Transcript(REQUEST, Detokenizer(TOKEN_BYTES, REQUEST.prompt_token_ids), StopStrings(stops))


def chunk(
    tokens: str | Sequence[int] = (),
    finish_reason: FinishReason | None = None,
    error: RequestError | None = None,
) -> TokenChunk:
    token_ids = TOKENIZER.encode(tokens).ids if isinstance(tokens, str) else tokens
    return TokenChunk(
        request_id=REQUEST.request_id,
        attempt=REQUEST.attempt,
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        error=error,
    )


def test_tokens_become_text_and_are_counted() -> None:
    said = transcript()
    assert said.feed(chunk("alpha")) == TextDelta(text="alpha")
    assert said.feed(chunk(" beta", FinishReason.LENGTH)) == TextDelta(text=" beta", finish_reason="length")
    assert said.usage == Usage(prompt_tokens=3, completion_tokens=5, total_tokens=8)


def test_the_stop_token_is_counted_and_not_shown() -> None:
    said = transcript()
    visible = token_id(TOKENIZER, "t")  # any token may be a stop token, also one with text
    delta = said.feed(chunk([visible, visible], FinishReason.STOP))
    assert delta == TextDelta(text="t", finish_reason="stop")
    assert said.usage.completion_tokens == 2


def test_case_64_the_answer_ends_with_the_token_that_completes_the_stop_string() -> None:
    said = transcript("beta gamma")
    tokens = TOKENIZER.encode("alpha beta gamma delta").ids  # al pha _b et a _gam ma _ de l ta
    assert said.feed(chunk(tokens[:4])) == TextDelta(text="alpha ")
    assert said.feed(chunk(tokens[4:])) == TextDelta(text="", finish_reason="stop")
    assert said.usage.completion_tokens == 7


def test_a_beginning_of_a_stop_string_is_shown_when_the_stream_ends() -> None:
    said = transcript("beta gamma")
    assert said.feed(chunk("alpha beta")).text == "alpha "
    assert said.feed(chunk([EOS], FinishReason.STOP)) == TextDelta(text="beta", finish_reason="stop")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.NEVER_FITS, 400),
        (ErrorKind.INTERNAL, 500),
        (ErrorKind.ENGINE_LOST, 503),
        (ErrorKind.NO_ENGINE, 503),
    ],
)
def test_case_63_an_engines_error_has_its_status(kind: ErrorKind, status: int) -> None:
    error = RequestError(kind=kind, message="node 10.0.0.7")
    with pytest.raises(ApiError) as raised:
        transcript().feed(chunk(finish_reason=FinishReason.ERROR, error=error))
    assert raised.value.status == status
    assert ("10.0.0.7" in str(raised.value)) == (kind is ErrorKind.NEVER_FITS)


def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(ApiError) as raised:
        transcript().feed(chunk(finish_reason=FinishReason.ABORT))
    assert raised.value.status == 503


@given(
    token_ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 1), max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text(alphabet="abet ", min_size=1, max_size=3), max_size=4),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_text_and_usage_do_not_depend_on_the_chunks(
    token_ids: list[int], cuts: list[int], stops: list[str], end: FinishReason
) -> None:
    def told(bounds: list[int]) -> tuple[str, str | None, Usage]:
        said = transcript(*stops)
        text = ""
        for start, stop in zip([0, *bounds], [*bounds, len(token_ids)], strict=True):
            is_last = stop == len(token_ids)
            delta = said.feed(chunk(token_ids[start:stop], end if is_last else None))
            text += delta.text
            if delta.finish_reason is not None:
                break
        return text, delta.finish_reason, said.usage

    assert told(sorted(cut for cut in cuts if cut < len(token_ids))) == told([])


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
    assert raised.value.body["error"]["code"] == "context_length_exceeded"


def test_the_seed_is_fixed_on_arrival() -> None:
    def seed(**fields: int) -> int:
        return first_attempt(
            CompletionRequest.model_validate({"prompt": "", **fields}),
            request_id=RequestId("cmpl-1"),
            prompt_token_ids=(0,),
            max_tokens=1,
            stop_token_ids=frozenset(),
        ).sampling.seed

    assert seed(seed=-5) == -5
    assert 0 <= seed() < 2**63
    assert seed() != seed()
