import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from shoal.actors.ingress.detokenizer import Detokenizer, TokenBytes
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.generation import TextDelta, Transcript, text_deltas
from shoal.actors.ingress.stop_strings import StopStrings
from shoal.actors.messages import EngineRequest, FinishReason, RequestId, TokenChunk
from tests.ingress.checkpoints import the_byte_level_tokenizer, tokens_of

REQUEST = EngineRequest(
    request_id=RequestId("cmpl-1"),
    attempt=2,
    prompt_token_ids=(0,),
    max_tokens=9,
    stop_token_ids=frozenset(),
)


def chunk(text: str, finish_reason: FinishReason | None = None, attempt: int = 2) -> TokenChunk:
    return TokenChunk(
        request_id=REQUEST.request_id,
        attempt=attempt,
        token_ids=tokens_of(text),
        finish_reason=finish_reason,
    )


class Recorded:
    """A dispatcher with these chunks, and whether its context is still open."""

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self.chunks = chunks
        self.is_open = False

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        self.is_open = True
        try:
            yield self._speak()
        finally:
            self.is_open = False

    async def _speak(self) -> AsyncIterator[TokenChunk]:
        for one in self.chunks:
            yield one

    def ready(self) -> bool:
        return True


def told(dispatcher: Recorded, *stops: str, at_most: int = 9) -> list[tuple[TextDelta, bool]]:
    """Each delta, and whether the request was still open on its engine then."""

    async def tell() -> list[tuple[TextDelta, bool]]:
        table = TokenBytes(the_byte_level_tokenizer())
        transcript = Transcript(REQUEST, Detokenizer(table, REQUEST.prompt_token_ids), StopStrings(stops))
        seen: list[tuple[TextDelta, bool]] = []
        async with aclosing(text_deltas(dispatcher, REQUEST, transcript)) as deltas:
            async for delta in deltas:
                seen.append((delta, dispatcher.is_open))
                if len(seen) == at_most:
                    break
        return seen

    return asyncio.run(tell())


def test_the_request_is_closed_before_its_last_words_are_passed_on() -> None:
    dispatcher = Recorded([chunk("alpha"), chunk(" beta gamma delta")])
    assert told(dispatcher, "gamma") == [
        (TextDelta(text="alpha"), True),
        (TextDelta(text=" beta ", finish_reason="stop"), False),
    ]


def test_a_reader_that_stops_early_closes_the_request() -> None:
    dispatcher = Recorded([chunk("alpha"), chunk(" beta")])
    assert told(dispatcher, at_most=1) == [(TextDelta(text="alpha"), True)]
    assert not dispatcher.is_open


def test_another_attempt_is_not_heard() -> None:
    dispatcher = Recorded([chunk("old", FinishReason.LENGTH, attempt=1), chunk("the", FinishReason.LENGTH)])
    assert told(dispatcher) == [(TextDelta(text="the", finish_reason="length"), False)]


def test_a_stream_must_say_why_it_ends() -> None:
    dispatcher = Recorded([chunk("alpha")])
    with pytest.raises(ApiError) as raised:
        told(dispatcher)
    assert raised.value.status == 500
    assert not dispatcher.is_open
