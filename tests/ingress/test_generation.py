import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from shoal.actors.ingress.choices import Asked
from shoal.actors.ingress.detokenizer import TokenBytes
from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.generation import KEEP_ALIVE_S, Deadline, text_deltas
from shoal.actors.ingress.metrics import Metrics
from shoal.actors.ingress.stop_strings import StopString
from shoal.actors.ingress.transcript import TextDelta, Transcript
from shoal.actors.messages import (
    CachedTokens,
    EngineId,
    EngineLoad,
    EngineRequest,
    FinishReason,
    RequestId,
    TokenChunk,
    TokenLogprob,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.outstanding import Outstanding
from tests.ingress.checkpoints import the_byte_level_tokenizer, tokens_of
from tests.ingress.virtual_time import run_in_virtual_time
from tests.one_by_one import OneByOne

REQUEST = EngineRequest(
    request_id=RequestId("cmpl-1"),
    attempt=2,
    prompt_token_ids=(0,),
    max_tokens=9,
    stop_token_ids=frozenset(),
)
TABLE = TokenBytes(the_byte_level_tokenizer())


def chunk(text: str, finish_reason: FinishReason | None = None, attempt: int = 2) -> TokenChunk:
    return TokenChunk(
        request_id=REQUEST.request_id,
        attempt=attempt,
        token_ids=tokens_of(text),
        finish_reason=finish_reason,
    )


Item = TokenChunk | float
"""A chunk, or seconds of silence."""


class Recorded(OneByOne):
    """A dispatcher that says of each prompt what is written here, and the prompts it still works for."""

    def __init__(self, *speeches: Sequence[Item]) -> None:
        self.speeches = speeches
        self.open_prompts: set[int] = set()
        self.begun: list[bool] = []
        """What it was told before each chunk."""

    @asynccontextmanager
    async def _open(
        self,
        request: EngineRequest,
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        [prompt] = request.prompt_token_ids
        self.open_prompts.add(prompt)
        try:
            yield self._speak(self.speeches[prompt], has_begun)
        finally:
            self.open_prompts.remove(prompt)

    async def _speak(
        self, speech: Sequence[Item], has_begun: Callable[[], bool]
    ) -> AsyncIterator[TokenChunk]:
        for item in speech:
            if isinstance(item, TokenChunk):
                self.begun.append(has_begun())
                yield item
            await asyncio.sleep(item if isinstance(item, float) else 0.001)

    def ready(self) -> bool:
        return True

    async def reset_prefix_cache(self) -> bool:
        return True

    async def loads(self) -> dict[EngineId, EngineLoad]:
        return {}

    async def outstanding(self) -> dict[str, Outstanding | None]:
        return {}


Heard = list[tuple[int, TextDelta] | None]


class Listening:
    """What was heard of a dispatcher, when, and which prompts were being computed then."""

    def __init__(self, dispatcher: Recorded, *stops: str) -> None:
        self.dispatcher = dispatcher
        self.stops = tuple(map(StopString, stops))
        self.heard: Heard = []
        self.open_prompts: list[set[int]] = []
        self.times: list[float] = []
        self.counted = Metrics()
        self.metrics = self.counted.of("tiny")

    def listen(self, *, at_most: int = 99, timeout_s: float = 600.0) -> "Listening":
        run_in_virtual_time(self._listen(at_most, timeout_s))
        assert self.dispatcher.open_prompts == set()
        return self

    async def _listen(self, at_most: int, timeout_s: float) -> None:
        now = asyncio.get_running_loop().time
        deadline = Deadline(arrived=now(), timeout_s=timeout_s)
        choices = [
            Transcript(
                Asked(
                    request=replace(REQUEST, request_id=RequestId(f"cmpl-{i}"), prompt_token_ids=(i,)),
                    stop=self.stops,
                ),
                TABLE,
            )
            for i in range(len(self.dispatcher.speeches))
        ]
        deltas = text_deltas(self.dispatcher, choices, deadline, self.metrics, lambda _: None)
        async with aclosing(deltas):
            async for delta in deltas:
                self.heard.append(delta)
                self.open_prompts.append(set(self.dispatcher.open_prompts))
                self.times.append(round(now() - deadline.arrived, 2))
                if len(self.heard) == at_most:
                    return


def test_an_answer_has_begun_when_one_of_its_choices_has() -> None:
    scored = replace(chunk(""), prompt_logprobs=(TokenLogprob(logprob=-1.0),))
    dispatcher = Recorded([1.0, scored, 3.0, chunk("alpha")], [2.0, chunk("beta"), 3.0, chunk("gamma")])
    listening = Listening(dispatcher).listen(at_most=3)
    assert listening.dispatcher.begun == [False, True, True], "be it only with its prompt's logprobs"


def test_the_request_is_closed_before_its_last_words_are_passed_on() -> None:
    dispatcher = Recorded([chunk("alpha"), chunk(" beta gamma delta"), 1e9])
    listening = Listening(dispatcher, "gamma").listen()
    assert listening.heard == [
        (0, TextDelta(text="alpha")),
        (0, TextDelta(text=" beta ", finish_reason="stop")),
    ]
    assert listening.open_prompts == [{0}, set()]


def test_a_reader_that_stops_early_closes_the_request() -> None:
    dispatcher = Recorded([chunk("alpha"), chunk(" beta")])
    assert Listening(dispatcher).listen(at_most=1).heard == [(0, TextDelta(text="alpha"))]


def test_an_answer_that_went_on_elsewhere_is_counted_with_what_was_computed_again() -> None:
    def begins(text: str, cached: int, attempt: int) -> TokenChunk:
        return replace(chunk(text, attempt=attempt), cached_tokens=CachedTokens(device=cached))

    first, second = begins("alpha", 0, 1), begins(" beta", 2, 3)
    listening = Listening(Recorded([first, second, chunk("", FinishReason.LENGTH)])).listen()
    exposition = listening.counted.exposition({}).decode()
    assert 'shoal_continuations_total{model_name="tiny"} 1.0' in exposition
    computed = 1 + len(first.token_ids) - 2
    assert f'shoal_recomputed_tokens_total{{model_name="tiny"}} {float(computed)}' in exposition


def test_a_stream_must_say_why_it_ends() -> None:
    listening = Listening(Recorded([chunk("alpha")]))
    with pytest.raises(ApiError) as raised:
        listening.listen()
    assert raised.value.status == 500
    assert listening.dispatcher.open_prompts == set()


def test_case_73_prompts_are_answered_side_by_side() -> None:
    dispatcher = Recorded(
        [chunk("alpha"), 5.0, chunk(" beta", FinishReason.LENGTH)],
        [2.0, chunk("the", FinishReason.LENGTH)],
    )
    assert Listening(dispatcher).listen().heard == [
        (0, TextDelta(text="alpha")),
        (1, TextDelta(text="the", finish_reason="length")),
        (0, TextDelta(text=" beta", finish_reason="length")),
    ]


def test_case_73_one_that_fails_ends_the_others() -> None:
    listening = Listening(Recorded([chunk("alpha"), 1e9], [1.0, chunk("", FinishReason.ABORT)]))
    with pytest.raises(ApiError) as raised:
        listening.listen()
    assert raised.value.code == "engine_lost"
    assert listening.heard == [(0, TextDelta(text="alpha"))]
    assert listening.dispatcher.open_prompts == set()


def test_silence_is_reported_again_and_again() -> None:
    listening = Listening(Recorded([40.0, chunk("alpha"), 20.0, chunk("", FinishReason.LENGTH)])).listen()
    assert [delta and delta[1].text for delta in listening.heard] == [None, None, "alpha", None, ""]
    assert listening.times == [KEEP_ALIVE_S, 2 * KEEP_ALIVE_S, 40.0, 40.0 + KEEP_ALIVE_S, 60.0]


@pytest.mark.parametrize("speech", [[1e9], [chunk("the"), 10.0] * 10], ids=["silent", "slow"])
def test_at_the_deadline_the_request_is_closed(speech: list[Item]) -> None:
    listening = Listening(Recorded(speech, [1.0, chunk("the", FinishReason.LENGTH)]))
    with pytest.raises(ApiError, match="within 25 seconds") as raised:
        listening.listen(timeout_s=25.0)
    assert (raised.value.status, raised.value.code) == (504, "timeout")
    assert listening.times[-1] <= 25.0
    assert listening.dispatcher.open_prompts == set()
