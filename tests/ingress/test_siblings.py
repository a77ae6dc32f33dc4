"""The choices of one prompt: together as far as an engine, and from then on each by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import (
    EngineRequest,
    ErrorKind,
    FinishReason,
    RequestId,
    SamplingParams,
    TokenBatch,
    TokenChunk,
)
from tests.fake_runner import generate
from tests.ingress.fake_actors import DrawingEngine, FakeEngine, FakeRouter, Never
from tests.ingress.test_continuation import PROMPT, some_streams, tokens_of
from tests.ingress.test_streams import KEYS, REQUEST, A, B, nobody_cares, not_yet, only_error, run

NUM_CHOICES = 3
REQUESTS = [
    replace(REQUEST, request_id=RequestId(f"r-{i}"), group=RequestId("r"), sampling=SamplingParams(seed=i))
    for i in range(NUM_CHOICES)
]
ANSWERS = [generate(PROMPT, REQUEST.max_tokens, seed=i) for i in range(NUM_CHOICES)]

Opened = AbstractAsyncContextManager[AsyncIterator[TokenChunk]]


async def chunks_of(opened: Opened) -> list[TokenChunk]:
    async with opened as chunks:
        return [chunk async for chunk in chunks]


async def all_chunks(
    streams: EngineStreams, requests: Sequence[EngineRequest] = REQUESTS
) -> list[list[TokenChunk]]:
    opened = streams.open(requests, KEYS, nobody_cares, not_yet)
    return list(await asyncio.gather(*map(chunks_of, opened)))


async def _placed_once_and_submitted_in_one_call() -> None:
    engine, router, streams = DrawingEngine(), FakeRouter(A, B), some_streams()
    await streams.introduce(router, {A: engine, B: DrawingEngine()}, {})
    placed: list[PlacedBy] = []
    opened = streams.open(REQUESTS, KEYS, placed.append, not_yet)
    heard = await asyncio.gather(*map(chunks_of, opened))
    assert list(map(tokens_of, heard)) == ANSWERS
    assert engine.submitted == REQUESTS and engine.num_submits == 1
    (asked,) = router.asked
    assert (asked.num_prompt_tokens, asked.block_keys) == (len(PROMPT), KEYS)
    assert len(placed) == 1


async def _each_goes_on_by_itself() -> None:
    """The first has two tokens of nine when the engine dies, and the others none."""
    dying, other, streams = DrawingEngine(lives_for=2), DrawingEngine(), some_streams()
    await streams.introduce(FakeRouter(A, B), {A: dying, B: other}, {})
    assert list(map(tokens_of, await all_chunks(streams))) == ANSWERS
    assert dying.num_submits == 1
    assert [len(request.output_token_ids) for request in other.submitted] == [2, 0, 0]
    assert [request.attempt for request in other.submitted] == [2, 2, 2]
    assert {request.group for request in other.submitted} == {"r"}, (
        "where they meet they are still one prompt's"
    )


async def _a_submit_that_fails() -> None:
    away = FakeEngine(submit_error=ActorUnavailableError("away", None))
    other, streams = DrawingEngine(), some_streams()
    await streams.introduce(FakeRouter(A, B), {A: away, B: other}, {})
    assert list(map(tokens_of, await all_chunks(streams))) == ANSWERS
    assert len(away.aborted) == NUM_CHOICES


async def _no_engine() -> None:
    streams = some_streams()
    await streams.introduce(FakeRouter(), {}, {})
    assert [only_error(chunks) for chunks in await all_chunks(streams)] == [ErrorKind.NO_ENGINE] * 3


async def _who_leaves_before_the_call_is_not_in_it() -> None:
    engine, streams = DrawingEngine(opens=False), some_streams()
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    opened = streams.open(REQUESTS, KEYS, nobody_cares, not_yet)
    listening = [asyncio.create_task(chunks_of(one)) for one in opened]
    await asyncio.sleep(0.1)
    listening[0].cancel()
    await asyncio.sleep(0.1)
    engine.outbox.put_nowait(TokenBatch(chunks=()))
    assert [tokens_of(await one) for one in listening[1:]] == ANSWERS[1:]
    assert engine.submitted == REQUESTS[1:] and engine.aborted == []


async def _when_all_leave_nothing_is_submitted() -> None:
    engine, router, streams = DrawingEngine(), FakeRouter(A), some_streams()
    router.error = Never()
    await streams.introduce(router, {A: engine}, {})
    opened = streams.open(REQUESTS, KEYS, nobody_cares, not_yet)
    listening = [asyncio.create_task(chunks_of(one)) for one in opened]
    await asyncio.sleep(0.1)
    before = asyncio.all_tasks()
    for one in listening:
        one.cancel()
    await asyncio.sleep(100.0)
    assert engine.submitted == [] and len(router.asked) == 1
    assert len(before - asyncio.all_tasks()) == NUM_CHOICES + 1, "the listeners, and who placed for them"


async def _leaving_aborts_only_whom_it_is_about() -> None:
    engine, streams = FakeEngine(), some_streams()
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    first, *others = streams.open(REQUESTS, KEYS, nobody_cares, not_yet)
    listening = [asyncio.create_task(chunks_of(one)) for one in others]
    leaving = asyncio.create_task(chunks_of(first))
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.sleep(0.1)
    assert [aborted[:2] for aborted in engine.aborted] == [("r-0", 1)]
    for request in REQUESTS[1:]:
        last = TokenChunk(
            request_id=request.request_id, attempt=1, token_ids=(7,), finish_reason=FinishReason.LENGTH
        )
        engine.outbox.put_nowait(TokenBatch(chunks=(last,)))
    assert [tokens_of(await one) for one in listening] == [[7], [7]]


async def _who_comes_late_is_sent_by_itself() -> None:
    engine, streams = DrawingEngine(), some_streams()
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    late, *others = streams.open(REQUESTS, KEYS, nobody_cares, not_yet)
    heard = await asyncio.gather(*map(chunks_of, others))
    assert list(map(tokens_of, [await chunks_of(late), *heard])) == ANSWERS
    assert engine.num_submits == 2


@pytest.mark.parametrize(
    "test",
    [
        _placed_once_and_submitted_in_one_call,
        _each_goes_on_by_itself,
        _a_submit_that_fails,
        _no_engine,
        _who_leaves_before_the_call_is_not_in_it,
        _when_all_leave_nothing_is_submitted,
        _leaving_aborts_only_whom_it_is_about,
        _who_comes_late_is_sent_by_itself,
    ],
)
def test_siblings(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(test())
