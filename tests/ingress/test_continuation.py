"""An answer that outlives its engine: what the next one is told, and what the client hears."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError

from shoal.actors.ingress.attempts import MAX_LOSSES, RESUME_DEADLINE_S, RETRY_S
from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.links import CALL_DEADLINE_S, HUNG_AFTER_S
from shoal.actors.ingress.stores import FIND_DEADLINE_S
from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import (
    EngineId,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    PrefixSource,
    RequestId,
    StoreId,
    TokenBatch,
    TokenChunk,
    TokenLogprob,
)
from shoal.kvstore.block_hash import extend_keys, root_key
from shoal.kvstore.messages import Found
from tests.fake_runner import generate
from tests.ingress.fake_actors import (
    DrawingEngine,
    FakeEngine,
    FakeRouter,
    FakeStore,
    Method,
    Never,
    Ref,
    Unanswered,
)
from tests.ingress.test_streams import (
    BLOCK_SIZE,
    REQUEST,
    A,
    B,
    all_chunks,
    nobody_cares,
    not_yet,
    only_error,
    run,
)

PROMPT = REQUEST.prompt_token_ids
ROOT = root_key(b"f", "")


def some_streams() -> EngineStreams:
    return EngineStreams(IngressId("i"), BLOCK_SIZE)


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def _an_engine_dies(lives_for: int) -> list[EngineRequest]:
    """What its successor was asked for."""
    first, second, router = DrawingEngine(lives_for=lives_for), DrawingEngine(), FakeRouter(A, B)
    streams = some_streams()
    await streams.introduce(router, {A: first, B: second}, {}, b"f")
    keys = tuple(extend_keys(ROOT, PROMPT, BLOCK_SIZE))
    chunks = await all_chunks(streams, REQUEST, keys)
    assert tokens_of(chunks) == generate(PROMPT, 9)
    assert [chunk.finish_reason for chunk in chunks][-1] is FinishReason.LENGTH
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    asked = router.asked[-1]
    received = second.submitted[0].output_token_ids
    assert (asked.attempt, asked.exclude) == (2, frozenset({A}))
    assert asked.num_prompt_tokens == len(PROMPT) + len(received)
    assert asked.block_keys == tuple(extend_keys(ROOT, [*PROMPT, *received], BLOCK_SIZE))
    return second.submitted


async def _case_54() -> None:
    for lives_for in range(1, 9):
        received = tuple(generate(PROMPT, lives_for))
        continued = replace(REQUEST, attempt=2, output_token_ids=received)
        assert await _an_engine_dies(lives_for) == [continued]


def test_case_54_the_next_engine_goes_on_behind_what_was_received() -> None:
    run(_case_54())


@settings(max_examples=50, deadline=None)
@given(
    lives=st.lists(st.integers(1, 12), max_size=8),
    max_tokens=st.integers(1, 30),
    stops_at=st.none() | st.integers(0, 30),
)
def test_whenever_engines_die_each_token_is_heard_once(
    lives: list[int], max_tokens: int, stops_at: int | None
) -> None:
    whole = generate(PROMPT, max_tokens)
    stops = frozenset[int]() if stops_at is None or stops_at >= max_tokens else frozenset({whole[stops_at]})
    ends = [i + 1 for i, token in enumerate(whole) if token in stops]
    expected = whole[: min(ends, default=max_tokens)]

    async def served() -> None:
        engines = [DrawingEngine(lives_for=life) for life in lives] + [DrawingEngine()]
        actors = {EngineId(f"engine-{i}"): engine for i, engine in enumerate(engines)}
        streams = some_streams()
        await streams.introduce(FakeRouter(*actors), actors, {})
        request = replace(REQUEST, max_tokens=max_tokens, stop_token_ids=stops, logprobs=0)
        chunks = await all_chunks(streams, request, ())
        assert tokens_of(chunks) == expected
        assert [said.logprob for chunk in chunks for said in chunk.logprobs] == [-t for t in expected]
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [
            FinishReason.STOP if stops else FinishReason.LENGTH
        ]
        attempts = [request for engine in engines for request in engine.submitted]
        assert [request.attempt for request in attempts] == list(range(1, len(attempts) + 1))

    run(served())


async def _an_engine_that_revives() -> None:
    """Its stream broke, it lives, and it says on under its old attempt while its successor speaks."""
    hung, next_one = FakeEngine(), FakeEngine()
    streams = some_streams()
    await streams.introduce(FakeRouter(A, B), {A: hung, B: next_one}, {})
    hung.say(5)
    hung.answer.append(ActorUnavailableError("a blip of the network", None))
    next_one.say(6, attempt=2)
    (opened,) = streams.open([REQUEST], (), nobody_cares, not_yet)
    async with opened as chunks:
        assert (await anext(chunks)).token_ids == (5,)
        assert (await anext(chunks)).token_ids == (6,)
        await streams.introduce(FakeRouter(A, B), {A: hung, B: next_one}, {})
        for engine, token, attempt in ((hung, 66, 1), (next_one, 7, 2)):
            engine.answer.clear()
            engine.say(token, attempt=attempt)
            engine.outbox.put_nowait(engine.answer[0])
            await asyncio.sleep(0.01)
        assert (await anext(chunks)).token_ids == (7,)
    assert [aborted[:2] for aborted in hung.aborted] == [("r", 1)]


def test_an_engine_that_was_given_up_is_not_heard_again() -> None:
    run(_an_engine_that_revives())


async def _a_scored_prompt() -> None:
    first, second = FakeEngine(), FakeEngine()
    streams = some_streams()
    await streams.introduce(FakeRouter(A, B), {A: first, B: second}, {})
    said = TokenChunk(request_id=RequestId("r"), attempt=1, prompt_logprobs=(TokenLogprob(logprob=-1.0),))
    first.answer.append(TokenBatch(chunks=(said,)))
    first.die()
    second.say(5, end=FinishReason.LENGTH, attempt=2)
    request = replace(REQUEST, prompt_logprobs=0)
    chunks = await all_chunks(streams, request, ())
    assert [chunk.prompt_logprobs for chunk in chunks] == [said.prompt_logprobs, ()]
    assert second.submitted == [replace(request, attempt=2, num_prompt_logprobs=1)]


def test_a_prompts_logprobs_are_not_asked_for_twice() -> None:
    run(_a_scored_prompt())


async def _waits_for_an_engine() -> None:
    first, second = DrawingEngine(lives_for=4), DrawingEngine()
    streams, router = some_streams(), FakeRouter(A)
    await streams.introduce(router, {A: first}, {})
    answer = asyncio.ensure_future(all_chunks(streams, REQUEST, ()))
    await asyncio.sleep(RESUME_DEADLINE_S / 2)
    assert not answer.done()
    router.engines = (B,)
    await streams.introduce(router, {B: second}, {})
    assert tokens_of(await answer) == generate(PROMPT, 9)


def test_an_answer_that_has_begun_waits_for_the_next_engine() -> None:
    run(_waits_for_an_engine())


async def _another_choice_has_begun() -> None:
    streams, router = some_streams(), FakeRouter(A)
    await streams.introduce(router, {A: DrawingEngine(lives_for=0)}, {})
    answer = asyncio.ensure_future(all_chunks(streams, REQUEST, (), nobody_cares, lambda: True))
    await asyncio.sleep(RESUME_DEADLINE_S / 2)
    assert not answer.done()
    router.engines = (B,)
    await streams.introduce(router, {B: DrawingEngine()}, {})
    assert tokens_of(await answer) == generate(PROMPT, 9)


def test_a_choice_that_has_not_begun_waits_too_where_its_answer_has() -> None:
    run(_another_choice_has_begun())


async def _nobody_comes() -> None:
    engine, streams = DrawingEngine(lives_for=4), some_streams()
    await streams.introduce(FakeRouter(A), {A: engine}, {})
    started = asyncio.get_running_loop().time()
    chunks = await all_chunks(streams, REQUEST, ())
    assert tokens_of(chunks) == generate(PROMPT, 4)
    assert only_error(chunks[2:]) is ErrorKind.ENGINE_LOST
    assert asyncio.get_running_loop().time() - started >= RESUME_DEADLINE_S


def test_but_not_for_ever() -> None:
    run(_nobody_comes())


async def _every_engine_dies_of_it(lives_for: int) -> int:
    """How many engines it took."""
    actors = {EngineId(f"engine-{i}"): DrawingEngine(lives_for=lives_for) for i in range(20)}
    streams = some_streams()
    await streams.introduce(FakeRouter(*actors), actors, {})
    chunks = await all_chunks(streams, REQUEST, ())
    num_dead = sum(len(engine.submitted) for engine in actors.values())
    if lives_for:
        assert tokens_of(chunks) == generate(PROMPT, 9)
    else:
        assert only_error(chunks) is ErrorKind.ENGINE_LOST
    return num_dead


async def _bounded_losses() -> None:
    assert await _every_engine_dies_of_it(0) == MAX_LOSSES
    assert await _every_engine_dies_of_it(1) == 9, "each of them has said something"


def test_a_request_that_kills_engines_is_given_up() -> None:
    run(_bounded_losses())


async def _cannot_be_reached_for_a_while() -> None:
    engine, streams, router = DrawingEngine(lives_for=4), some_streams(), FakeRouter(A)
    await streams.introduce(router, {A: engine}, {})
    answer = asyncio.ensure_future(all_chunks(streams, REQUEST, ()))
    await asyncio.sleep(0.1)
    submit, engine.submit = engine.submit, Method(lambda *_: Ref(ActorUnavailableError("a blip", None)))
    for _ in range(2 * MAX_LOSSES):
        await streams.introduce(router, {A: engine}, {})
        await asyncio.sleep(RESUME_DEADLINE_S / 4 / MAX_LOSSES)
    assert not answer.done()
    engine.submit, engine.lives_for = submit, None
    assert tokens_of(await answer) == generate(PROMPT, 9)


def test_an_engine_that_is_lost_again_was_not_killed_by_its_request() -> None:
    run(_cannot_be_reached_for_a_while())


async def _the_others_are_full() -> None:
    first, full, streams, router = DrawingEngine(lives_for=4), FakeEngine(), some_streams(), FakeRouter(A, B)
    await streams.introduce(router, {A: first, B: full}, {})
    for attempt in range(2, 100):
        full.fail(ErrorKind.OVERLOADED, attempt=attempt)
    answer = asyncio.ensure_future(all_chunks(streams, REQUEST, ()))
    await asyncio.sleep(RESUME_DEADLINE_S / 4)
    assert not answer.done() and len(full.submitted) > MAX_LOSSES, "it asks on: being full is no loss"
    full.answer.clear()
    for i, token in enumerate(generate(PROMPT, 9)[4:]):
        attempt = full.submitted[-1].attempt + 1
        full.say(token, attempt=attempt, end=FinishReason.LENGTH if i == 4 else None)
    assert tokens_of(await answer) == generate(PROMPT, 9)


def test_an_answer_that_has_begun_waits_where_everybody_is_full() -> None:
    run(_the_others_are_full())


async def _the_last_word_is_lost(stop_token_ids: frozenset[int], end: FinishReason) -> None:
    engine, other = FakeEngine(), FakeEngine()
    streams = some_streams()
    await streams.introduce(FakeRouter(A, B), {A: engine, B: other}, {})
    engine.say(5, 6)
    engine.die()
    request = replace(REQUEST, max_tokens=2, stop_token_ids=stop_token_ids)
    first, last = await all_chunks(streams, request, ())
    assert first.token_ids == (5, 6)
    assert (last.token_ids, last.finish_reason) == ((), end)
    assert other.submitted == []


@pytest.mark.parametrize(
    ("stop_token_ids", "end"),
    [(frozenset(), FinishReason.LENGTH), (frozenset({6}), FinishReason.STOP)],
)
def test_an_answer_of_which_only_the_end_was_not_heard_is_complete(
    stop_token_ids: frozenset[int], end: FinishReason
) -> None:
    run(_the_last_word_is_lost(stop_token_ids, end))


async def _each_attempt_says_how_it_was_placed() -> None:
    streams, router = some_streams(), FakeRouter(A, B)
    await streams.introduce(router, {A: DrawingEngine(lives_for=4), B: DrawingEngine()}, {})
    placed: list[PlacedBy] = []

    def note(by: PlacedBy) -> None:
        placed.append(by)
        router.says = {"hit_tokens": 2}

    await all_chunks(streams, REQUEST, (), note)
    assert placed == [PlacedBy.NO_KEYS, PlacedBy.PREFIX]


def test_each_attempt_says_how_it_was_placed() -> None:
    run(_each_attempt_says_how_it_was_placed())


SOURCES = (PrefixSource(store_id=StoreId("far"), first=0, end=1),)
"""What the router names."""


async def _what_its_store_has(
    store: FakeStore, expected: tuple[PrefixSource, ...], *, takes_s: float = 0.0
) -> None:
    first, second = DrawingEngine(lives_for=4, store_id=NEAR), DrawingEngine()
    streams, router = some_streams(), FakeRouter(A, B)
    router.sources = SOURCES
    await streams.introduce(router, {A: first, B: second}, {NEAR: store, StoreId("far"): FakeStore()}, b"f")
    began = asyncio.get_running_loop().time()
    chunks = await all_chunks(streams, REQUEST, tuple(extend_keys(ROOT, PROMPT, BLOCK_SIZE)))
    assert tokens_of(chunks) == generate(PROMPT, 9)
    assert asyncio.get_running_loop().time() - began == pytest.approx(takes_s, abs=0.01)
    (asked,) = store.asked
    assert asked == tuple(extend_keys(ROOT, [*PROMPT, *generate(PROMPT, 4)], BLOCK_SIZE))
    assert [request.sources for request in (*first.submitted, *second.submitted)] == [SOURCES, expected]


NEAR = StoreId("near")


@pytest.mark.parametrize(
    ("found", "expected", "takes_s"),
    [
        (Found(blocks=(0, 1), segments=()), (PrefixSource(store_id=NEAR, first=0, end=2),), 0.0),
        (
            Found(blocks=(0, 2), segments=(1, 2)),
            (
                PrefixSource(store_id=NEAR, first=0, end=1),
                PrefixSource(store_id=NEAR, first=2, end=3),
                PrefixSource(store_id=NEAR, first=0, end=0, segments=(1, 2)),
            ),
            0.0,
        ),
        (Found(blocks=(), segments=()), (), 0.0),
        (ActorDiedError(), (), 0.0),
        (Never(), (), FIND_DEADLINE_S),
    ],
    ids=["all of it", "in pieces", "nothing", "dead", "hung"],
)
def test_the_next_engine_is_told_what_the_last_ones_store_has_beside_what_the_router_knows(
    found: Found | Exception | Never, expected: tuple[PrefixSource, ...], takes_s: float
) -> None:
    run(_what_its_store_has(FakeStore(found=found), (*expected, *SOURCES), takes_s=takes_s))


async def _two_that_saved_in_different_stores() -> None:
    here, there = StoreId("here"), StoreId("there")
    engines = [DrawingEngine(lives_for=life, store_id=s) for life, s in ((4, here), (2, there), (9, None))]
    actors = {EngineId(f"engine-{i}"): engine for i, engine in enumerate(engines)}
    stores = {s: FakeStore(found=Found(blocks=(i,), segments=())) for i, s in enumerate((here, there))}
    streams = some_streams()
    await streams.introduce(FakeRouter(*actors), actors, stores, b"f")
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)
    assert [engine.submitted[0].sources for engine in engines] == [
        (),
        (PrefixSource(store_id=here, first=0, end=1),),
        (PrefixSource(store_id=here, first=0, end=1), PrefixSource(store_id=there, first=1, end=2)),
    ]


def test_an_answer_is_gathered_from_wherever_its_engines_saved_it() -> None:
    run(_two_that_saved_in_different_stores())


async def _a_store_that_is_gone() -> None:
    streams, second = some_streams(), DrawingEngine()
    engines = {A: DrawingEngine(lives_for=4, store_id=NEAR), B: second}
    await streams.introduce(FakeRouter(A, B), engines, {}, b"f")
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)
    assert second.submitted[0].sources == ()


def test_a_store_that_is_no_longer_named_is_not_asked() -> None:
    run(_a_store_that_is_gone())


async def _streams_break_but_engines_live() -> None:
    engines = [DrawingEngine(lives_for=4)] + [FakeEngine() for _ in range(2 * MAX_LOSSES)]
    for engine in engines[1:]:
        engine.answer.append(ActorUnavailableError("a blip of the network", None))
    actors = {EngineId(f"engine-{i:02}"): engine for i, engine in enumerate([*engines, DrawingEngine()])}
    streams = some_streams()
    await streams.introduce(FakeRouter(*actors), actors, {})
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)


def test_engines_whose_streams_merely_break_are_not_counted_as_killed() -> None:
    run(_streams_break_but_engines_live())


async def _a_hung_engine() -> None:
    """It has taken requests before, and its stream is open, but it answers no submit any more."""
    hung, idle, router = FakeEngine(), DrawingEngine(), FakeRouter(A, B)
    streams, now = some_streams(), asyncio.get_running_loop().time
    await streams.introduce(router, {A: hung, B: idle}, {})
    await asyncio.sleep(0.1)
    answers, answer = hung.submit, Unanswered()
    hung.submit = Method(lambda _, request: answers.call(_, request) and answer)
    began = now()
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)
    assert now() - began == pytest.approx(HUNG_AFTER_S, abs=0.01)
    assert [aborted[:2] for aborted in hung.aborted] == [("r", 1)]
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)
    assert len(hung.submitted) == 1 and A in router.asked[-1].exclude, "nobody else waits for it"
    answer.settle()
    await asyncio.sleep(0.01)
    hung.submit = answers
    hung.say(7, end=FinishReason.LENGTH)
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == [7]


def test_a_hung_engine_costs_its_first_request_some_seconds_and_the_next_ones_nothing() -> None:
    run(_a_hung_engine())


async def _the_only_one_that_takes_what_is_new_is_slow() -> None:
    """What drains is no better place: neither for who waits for that one, nor for who comes meanwhile."""
    slow = FakeEngine()
    answer = Unanswered()
    answers, slow.submit = slow.submit, Method(lambda *_: answer)
    streams = some_streams()
    await streams.introduce(FakeRouter(A, B), {A: DrawingEngine(), B: slow}, {}, b"f", draining={A})
    slow.say(7, end=FinishReason.LENGTH)
    asked = asyncio.ensure_future(all_chunks(streams, REQUEST, ()))
    await asyncio.sleep(HUNG_AFTER_S + CALL_DEADLINE_S / 2)
    answer.settle()
    slow.outbox.put_nowait(slow.answer[0])
    assert tokens_of(await asked) == [7]
    slow.submit = Method(lambda *_: Unanswered())
    assert only_error(await all_chunks(streams, REQUEST, ())) is ErrorKind.ENGINE_LOST
    slow.submit = answers
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == [7], "it is silent, and there is no other"


def test_the_only_one_that_takes_what_is_new_is_waited_for() -> None:
    run(_the_only_one_that_takes_what_is_new_is_slow())


async def _everybody_is_slow() -> None:
    """As where a machine stands still for a while: whoever is last is given the time that it takes."""
    engines = {A: FakeEngine(), B: FakeEngine()}
    answer = Unanswered()
    for engine in engines.values():
        engine.submit = Method(lambda *_: answer)
    streams = some_streams()
    await streams.introduce(FakeRouter(A, B), engines, {})
    asked = asyncio.ensure_future(all_chunks(streams, REQUEST, ()))
    await asyncio.sleep(HUNG_AFTER_S + CALL_DEADLINE_S / 2)
    answer.settle()
    for token, attempt in ((66, 1), (7, 2)):
        engines[B].answer.clear()
        engines[B].say(token, attempt=attempt, end=FinishReason.LENGTH)
        engines[B].outbox.put_nowait(engines[B].answer[0])
    assert tokens_of(await asked) == [7], "and who was given up is not heard"


def test_where_all_are_late_the_last_is_waited_for() -> None:
    run(_everybody_is_slow())


def two_deployments() -> tuple[EngineStreams, EngineStreams]:
    """Of one model."""
    both: list[EngineStreams] = []
    for other in (1, 0):
        both.append(EngineStreams(IngressId("i"), BLOCK_SIZE, siblings=lambda i=other: [both[i]]))  # type: ignore[misc]
    return both[0], both[1]


async def _the_last_engine_of_one_that_goes(fingerprint: bytes) -> tuple[list[TokenChunk], float]:
    going, coming = two_deployments()
    await going.introduce(FakeRouter(A), {A: DrawingEngine(lives_for=4)}, {}, b"f")
    await coming.introduce(FakeRouter(B), {B: DrawingEngine()}, {}, fingerprint)
    answer = asyncio.ensure_future(all_chunks(going, REQUEST, ()))
    await asyncio.sleep(1.0)
    closed_at = asyncio.get_running_loop().time()
    await going.close()
    return await answer, asyncio.get_running_loop().time() - closed_at


async def _goes_on_with_the_same_bits() -> None:
    chunks, _ = await _the_last_engine_of_one_that_goes(b"f")
    assert tokens_of(chunks) == generate(PROMPT, 9)


async def _ends_early_with_others() -> None:
    for fingerprint in (b"g", b""):
        chunks, waited_s = await _the_last_engine_of_one_that_goes(fingerprint)
        assert tokens_of(chunks) == generate(PROMPT, 4)
        assert only_error(chunks[2:]) is ErrorKind.ENGINE_LOST
        assert waited_s <= RETRY_S, "nobody can come"


async def _whose_successor_is_not_there_yet() -> None:
    """Its engine has died too, and is started again."""
    going, coming = two_deployments()
    await going.introduce(FakeRouter(A), {A: DrawingEngine(lives_for=4)}, {}, b"f")
    await coming.introduce(FakeRouter(), {}, {}, b"f")
    answer = asyncio.ensure_future(all_chunks(going, REQUEST, ()))
    await asyncio.sleep(1.0)
    await going.close()
    await asyncio.sleep(RESUME_DEADLINE_S / 2)
    assert not answer.done()
    await coming.introduce(FakeRouter(B), {B: DrawingEngine()}, {}, b"f")
    assert tokens_of(await answer) == generate(PROMPT, 9)


async def _before_a_word_was_said() -> None:
    going, coming = two_deployments()
    await going.introduce(FakeRouter(A), {A: DrawingEngine(lives_for=0)}, {}, b"f")
    await coming.introduce(FakeRouter(B), {B: DrawingEngine()}, {}, b"f")
    assert tokens_of(await all_chunks(going, REQUEST, ())) == generate(PROMPT, 9)


async def _only_one_that_drains_is_left() -> None:
    streams = some_streams()
    actors = {A: DrawingEngine(lives_for=4), B: DrawingEngine()}
    await streams.introduce(FakeRouter(A), actors, {}, b"f", draining={B})
    assert tokens_of(await all_chunks(streams, REQUEST, ())) == generate(PROMPT, 9)
    actors[A].lives_for = 0
    await streams.introduce(FakeRouter(A), actors, {}, b"f", draining={B})
    chunks = await all_chunks(streams, REQUEST, ())
    assert only_error(chunks) is ErrorKind.ENGINE_LOST, "what has not begun is new to it"


@pytest.mark.parametrize(
    "scenario",
    [
        _goes_on_with_the_same_bits,
        _ends_early_with_others,
        _whose_successor_is_not_there_yet,
        _before_a_word_was_said,
        _only_one_that_drains_is_left,
    ],
)
def test_the_last_engine_of_a_deployment_that_goes_is_lost(
    scenario: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    run(scenario())
