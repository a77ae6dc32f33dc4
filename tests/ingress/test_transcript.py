from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.ingress.choices import Asked
from shoal.actors.ingress.detokenizer import TokenBytes
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.protocol import Usage
from shoal.actors.ingress.stop_strings import StopString
from shoal.actors.ingress.transcript import TextDelta, Transcript
from shoal.actors.messages import (
    CachedTokens,
    EngineRequest,
    ErrorKind,
    FinishReason,
    RequestError,
    RequestId,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from tests.ingress.checkpoints import byte_level_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
TOKEN_BYTES = TokenBytes(TOKENIZER)
BOS, EOS = token_id(TOKENIZER, "<s>"), token_id(TOKENIZER, "</s>")
REQUEST = EngineRequest(
    request_id=RequestId("cmpl-1"),
    attempt=1,
    prompt_token_ids=(0, 70, 71),
    max_tokens=100,
    stop_token_ids=frozenset({EOS}),
)


def transcript(*stops: str) -> Transcript:
    return Transcript(Asked(request=REQUEST, stop=tuple(map(StopString, stops))), TOKEN_BYTES)


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
    assert said.usage == Usage.of(prompt_tokens=3, completion_tokens=5, cached=CachedTokens())


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


def scored_transcript(*stops: str, min_tokens: int = 0) -> Transcript:
    request = replace(REQUEST, logprobs=1, sampling=SamplingParams(min_tokens=min_tokens))
    return Transcript(Asked(request=request, stop=tuple(map(StopString, stops))), TOKEN_BYTES)


def scored_chunk(token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TokenChunk:
    logprobs = tuple(TokenLogprob(logprob=-one / 64, top=((one, -0.5), (EOS, -2.0))) for one in token_ids)
    return replace(chunk(token_ids, finish_reason), logprobs=logprobs)


def test_every_counted_token_is_scored_where_its_text_begins() -> None:
    said = scored_transcript()
    tokens = TOKENIZER.encode("é the").ids
    delta = said.feed(scored_chunk([*tokens, EOS], FinishReason.STOP))
    assert b"".join(token.written for token in delta.tokens) == "é the</s>".encode()
    for index, token in enumerate(delta.tokens):
        before = b"".join(one.written for one in delta.tokens[:index])
        assert token.offset == len(before.decode(errors="ignore"))
    assert [token.logprob for token in delta.tokens] == [-one / 64 for one in (*tokens, EOS)]
    assert delta.tokens[0].top == ((delta.tokens[0].written, -0.5), (b"</s>", -2.0))
    assert len(delta.tokens) == said.usage.completion_tokens


def test_tokens_behind_a_stop_string_are_not_scored() -> None:
    said = scored_transcript("beta gamma")
    tokens = TOKENIZER.encode("alpha beta gamma delta").ids  # al pha _b et a _gam ma _ de l ta
    assert said.feed(scored_chunk(tokens[:4])).text == "alpha "
    delta = said.feed(scored_chunk(tokens[4:]))
    assert [token.written for token in delta.tokens] == [b"a", b" gam", b"ma"]


def test_a_stop_string_does_not_end_an_answer_that_is_too_short() -> None:
    said = scored_transcript("a", min_tokens=3)
    tokens = TOKENIZER.encode("alpha alpha").ids  # al pha _al pha
    assert said.feed(scored_chunk(tokens)).text == "alpha alph"


def test_cached_tokens_are_in_the_usage() -> None:
    said = transcript()
    place = CachedTokens(device=1, other_store=1)
    said.feed(replace(chunk("alpha"), cached_tokens=place))
    said.feed(chunk("alpha", FinishReason.LENGTH))
    assert said.usage == Usage.of(prompt_tokens=3, completion_tokens=4, cached=place)


def test_cached_tokens_are_those_that_the_first_engine_found() -> None:
    said = transcript()
    said.feed(replace(chunk("alpha"), cached_tokens=CachedTokens(device=1)))
    said.feed(replace(chunk("alpha", FinishReason.LENGTH), cached_tokens=CachedTokens(device=3)))
    assert said.usage == Usage.of(prompt_tokens=3, completion_tokens=4, cached=CachedTokens(device=1))


def echoing(
    text: str, prompt: Sequence[int], *, logprobs: int | None = 0, silent: bool = False
) -> Transcript:
    request = replace(REQUEST, prompt_token_ids=tuple(prompt), logprobs=logprobs, prompt_logprobs=logprobs)
    return Transcript(Asked(request=request, echo=text, is_silent=silent), TOKEN_BYTES)


def prompt_chunk(token_ids: Sequence[int]) -> TokenChunk:
    logprobs = tuple(TokenLogprob(logprob=-one / 64) for one in token_ids)
    return replace(chunk(), prompt_logprobs=logprobs)


def test_an_echo_is_said_at_once_and_scored_piece_by_piece() -> None:
    prompt = [BOS, *TOKENIZER.encode("the fox").ids]
    said = echoing("the fox", prompt)
    first, second, third = (
        said.feed(prompt_chunk(prompt[1:3])),
        said.feed(prompt_chunk(prompt[3:])),
        said.feed(scored_chunk(TOKENIZER.encode(" a").ids, FinishReason.LENGTH)),
    )
    assert [first.text, second.text, third.text] == ["the fox", "", " a"]
    tokens = (*first.tokens, *second.tokens, *third.tokens)
    assert [token.logprob for token in tokens][:3] == [None, -prompt[1] / 64, -prompt[2] / 64]
    assert b"".join(token.written for token in tokens) == b"<s>the fox a"
    assert [token.offset for token in tokens] == [0, 0, *accumulate(len(t.written) for t in tokens[1:-1])]
    assert len(tokens) == said.usage.total_tokens


def test_special_tokens_that_were_written_have_their_width() -> None:
    text = "the<|im_end|>the"
    prompt = [BOS, *TOKENIZER.encode(text).ids]
    delta = echoing(text, prompt).feed(prompt_chunk(prompt[1:]))
    assert [text[token.offset :].encode().startswith(token.written) for token in delta.tokens[1:]] == [
        True
    ] * len(prompt[1:])


def test_an_echo_alone_says_nothing_else() -> None:
    said = echoing("t", [BOS, token_id(TOKENIZER, "t")], silent=True)
    delta = said.feed(scored_chunk([EOS], FinishReason.STOP))
    assert (delta.text, delta.finish_reason) == ("t", "length")
    assert said.usage == Usage.of(prompt_tokens=2, completion_tokens=0, cached=CachedTokens())


def test_an_echo_without_logprobs_is_only_text() -> None:
    said = echoing("t", [BOS, token_id(TOKENIZER, "t")], logprobs=None)
    assert said.feed(chunk("a")) == TextDelta(text="ta")


def test_a_character_between_prompt_and_answer_stands_where_it_begins() -> None:
    *prompt, last = TOKENIZER.encode("the日").ids
    said = echoing("the", [BOS, *prompt])
    first, second = said.feed(prompt_chunk(prompt)), said.feed(scored_chunk([last], FinishReason.LENGTH))
    assert first.text + second.text == "the日"
    begun = [token.offset for token in (*first.tokens, *second.tokens)][-2:]
    assert begun == [3, 3]
