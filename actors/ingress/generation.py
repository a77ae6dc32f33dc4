"""One request's way from tokens to text: what the engine is asked, and what is made of its answer."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from shoal.actors.ingress.detokenizer import Detokenizer
from shoal.actors.ingress.dispatch import Dispatcher
from shoal.actors.ingress.errors import context_length_exceeded, engine_error, internal_error
from shoal.actors.ingress.protocol import Finish, GenerationRequest, Usage
from shoal.actors.ingress.stop_strings import StopStrings
from shoal.actors.messages import (
    EngineRequest,
    ErrorKind,
    FinishReason,
    RequestError,
    RequestId,
    SamplingParams,
    TokenChunk,
)

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has, so a larger one means the same."""


def first_attempt(
    body: GenerationRequest,
    *,
    request_id: RequestId,
    prompt_token_ids: tuple[int, ...],
    max_tokens: int,
    stop_token_ids: frozenset[int],
) -> EngineRequest:
    """The seed is chosen here and once, so that an engine that takes over draws the same tokens."""
    return EngineRequest(
        request_id=request_id,
        attempt=1,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        sampling=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=min(max(0, body.top_k or 0), MAX_TOP_K),
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
        ),
    )


def output_budget(
    num_prompt_tokens: int, *, wanted: int | None, default: int | None, max_model_len: int, param: str
) -> int:
    """How many tokens the answer may have. Only a length that nobody asked for is shortened to fit."""
    room = max_model_len - num_prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise context_length_exceeded(num_prompt_tokens, wanted, max_model_len, param=param)
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    text: str
    """Often empty: half a character, or the possible beginning of a stop string."""
    finish_reason: Finish | None = None


class Transcript:
    """What one request has said so far, counted in tokens and passed on as text."""

    def __init__(self, request: EngineRequest, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_completion_tokens = 0

    @property
    def usage(self) -> Usage:
        """Ends with the token that completes a stop string: what the engine ran on to is not counted."""
        return Usage.of(len(self._request.prompt_token_ids), self._num_completion_tokens)

    def feed(self, chunk: TokenChunk) -> TextDelta:
        text = "".join(self._shown(chunk))
        if self._stops.found:
            return TextDelta(text=text, finish_reason="stop")
        match chunk.finish_reason:
            case None:
                return TextDelta(text=text)
            case FinishReason.STOP:
                return TextDelta(text=text + self._stops.flush(), finish_reason="stop")
            case FinishReason.LENGTH:
                return TextDelta(text=text + self._stops.flush(), finish_reason="length")
            case FinishReason.ERROR | FinishReason.ABORT:
                raise engine_error(chunk.error or _UNASKED_ABORT)

    def _shown(self, chunk: TokenChunk) -> list[str]:
        stop_token_at = len(chunk.token_ids) - 1 if chunk.finish_reason is FinishReason.STOP else None
        texts = []
        for index, token_id in enumerate(chunk.token_ids):
            self._num_completion_tokens += 1
            if index == stop_token_at:
                break
            texts.append(self._stops.push(self._detokenizer.push(token_id)))
            if self._stops.found:
                break
        return texts


_UNASKED_ABORT = RequestError(kind=ErrorKind.ENGINE_LOST, message="the engine aborted the request by itself")


async def text_deltas(
    dispatcher: Dispatcher, request: EngineRequest, transcript: Transcript
) -> AsyncGenerator[TextDelta, None]:
    """One delta for each chunk, the last with the reason to finish. Raises ApiError.

    The dispatcher's context is left before the last delta is handed on: a slow client must not keep an engine
    busy with an answer that a stop string has ended. Close the generator to abort the request.
    """
    async with dispatcher.open(request) as chunks:
        async for chunk in chunks:
            if chunk.attempt != request.attempt:
                continue  # an engine that was given up for dead speaks again
            delta = transcript.feed(chunk)
            if delta.finish_reason is not None:
                break
            yield delta
        else:
            raise internal_error(detail="the token stream ended without a reason to finish")
    yield delta


async def whole_text(deltas: AsyncGenerator[TextDelta, None]) -> tuple[str, Finish]:
    texts = []
    async with aclosing(deltas):
        async for delta in deltas:
            texts.append(delta.text)
            if delta.finish_reason is not None:
                return "".join(texts), delta.finish_reason
    raise AssertionError("text_deltas ended without a finish_reason")
