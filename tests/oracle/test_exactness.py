"""The product's promise, on a real model: how a token is computed changes no bit of its logits."""

import random
from dataclasses import replace

import pytest

from shoal.actors.engine.build import LoadedModel
from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, SamplingParams
from shoal.kernels.cpu import CpuBackend
from tests.oracle.recording import Recording, Setup, greedy, serve

PROMPT_TOKENS, OUTPUT_TOKENS = 310, 12
FIRST = SequenceId(1)


def tokens(seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, 49_000) for _ in range(length)]


REQUEST = greedy("it", tokens(0, PROMPT_TOKENS), OUTPUT_TOKENS)


def neighbours(count: int) -> list[EngineRequest]:
    """Other requests of all lengths, some longer than a block, some of one token; they leave one by one."""
    lengths = [1 + (37 * i) % 150 for i in range(count)]
    lengths[-1] = 260  # into its second segment of attention, too
    return [greedy(f"neighbour {i}", tokens(i + 1, length), 2 + i) for i, length in enumerate(lengths)]


def served_alone(model: LoadedModel) -> Recording:
    recording = serve(model, Setup(backend=CpuBackend(2)), [REQUEST])
    assert len(recording.digests[FIRST]) == PROMPT_TOKENS + OUTPUT_TOKENS - 1
    return recording


@pytest.fixture(scope="module")
def alone(smol: LoadedModel) -> Recording:
    """By itself: the prompt at once, then one token a step."""
    return served_alone(smol)


@pytest.fixture(scope="module")
def shallow_alone(shallow: LoadedModel) -> Recording:
    return served_alone(shallow)


def test_in_many_chunks(shallow: LoadedModel, shallow_alone: Recording) -> None:
    setup = Setup(backend=CpuBackend(2), max_num_batched_tokens=7, max_num_seqs=1)
    assert_same(serve(shallow, setup, [REQUEST]), shallow_alone)


def test_one_token_a_step(shallow: LoadedModel, shallow_alone: Recording) -> None:
    setup = Setup(backend=CpuBackend(2), max_num_batched_tokens=1, max_num_seqs=1)
    assert_begins_as(serve(shallow, setup, [beginning(140)]), shallow_alone, 140)


@pytest.mark.parametrize("chunk", [128, 300])
def test_in_chunks(smol: LoadedModel, alone: Recording, chunk: int) -> None:
    setup = Setup(backend=CpuBackend(2), max_num_batched_tokens=chunk, max_num_seqs=1)
    assert_same(serve(smol, setup, [REQUEST]), alone)


def test_with_one_thread(shallow: LoadedModel, shallow_alone: Recording) -> None:
    assert_same(serve(shallow, Setup(backend=CpuBackend(1)), [REQUEST]), shallow_alone)


def test_with_more_threads_than_cores(shallow: LoadedModel, shallow_alone: Recording) -> None:
    assert_same(serve(shallow, Setup(backend=CpuBackend(5)), [REQUEST]), shallow_alone)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_with_another_instruction_set(shallow: LoadedModel, shallow_alone: Recording, isa: str) -> None:
    try:
        backend = CpuBackend(2, isa=isa)
    except ValueError as error:
        pytest.skip(str(error))
    assert_begins_as(serve(shallow, Setup(backend=backend), [beginning(12)]), shallow_alone, 12)


def test_with_smaller_blocks(shallow: LoadedModel, shallow_alone: Recording) -> None:
    assert_same(serve(shallow, Setup(backend=CpuBackend(2), block_size=16), [REQUEST]), shallow_alone)


def test_beside_fifteen_others(shallow: LoadedModel, shallow_alone: Recording) -> None:
    requests = [REQUEST, *neighbours(15)]
    setup = Setup(backend=CpuBackend(2), max_num_batched_tokens=256)
    together = serve(shallow, setup, requests, watch=(1, 6))
    assert_same(together, shallow_alone)
    fifth = serve(shallow, Setup(backend=CpuBackend(2)), [requests[5]])
    assert together.digests[SequenceId(6)] == fifth.digests[FIRST], "its neighbours are exact too"


def test_preempted_and_computed_again(shallow: LoadedModel, shallow_alone: Recording) -> None:
    """Too few blocks for both: ours is the younger, gives way in the middle of its output, and resumes."""
    elder = greedy("elder", tokens(9, 303), 14)  # 19 blocks of 16 tokens, and soon a 20th
    setup = Setup(
        backend=CpuBackend(2), num_blocks=1 + 19 + 20 + 1, block_size=16, max_num_batched_tokens=640
    )
    recording = serve(shallow, setup, [elder, REQUEST], watch=(2,))
    assert recording.num_preemptions == 1
    assert recording.digests[SequenceId(2)] == shallow_alone.digests[FIRST]
    assert recording.tokens["it"] == shallow_alone.tokens["it"]


def test_output_fed_back_as_a_prompt(smol: LoadedModel, alone: Recording) -> None:
    """What was computed token by token in decode, computed in one prefill."""
    longer = [*REQUEST.prompt_token_ids, *alone.tokens["it"][:-1]]
    recording = serve(smol, Setup(backend=CpuBackend(2)), [greedy("it", longer, 1)])
    assert recording.digests[FIRST] == alone.digests[FIRST]
    assert recording.tokens["it"] == alone.tokens["it"][-1:]


@pytest.mark.parametrize("num_received", [1, 6, OUTPUT_TOKENS - 1])
def test_gone_on_with_where_another_engine_died(
    shallow: LoadedModel, shallow_alone: Recording, num_received: int
) -> None:
    received = tuple(shallow_alone.tokens["it"][:num_received])
    request = replace(REQUEST, attempt=2, output_token_ids=received)
    recording = serve(shallow, Setup(backend=CpuBackend(2)), [request])
    assert recording.digests[FIRST] == shallow_alone.digests[FIRST]
    assert recording.tokens["it"] == shallow_alone.tokens["it"][num_received:]


def test_gone_on_with_it_draws_what_the_first_engine_would_have_drawn(shallow: LoadedModel) -> None:
    """Seeds, penalties and min_tokens count from the prompt's end, wherever that was computed."""
    sampling = SamplingParams(
        temperature=1.3,
        top_p=0.9,
        seed=7,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        min_tokens=9,
    )
    often = frozenset(range(0, 49_000, 3))
    request = replace(beginning(140), max_tokens=30, sampling=sampling, stop_token_ids=often)
    setup = Setup(backend=CpuBackend(2))
    whole = serve(shallow, setup, [request]).tokens["it"]
    assert 9 <= len(whole) - 1 < 30 and whole[-1] in often
    assert not often.intersection(whole[:9])
    for num_received in range(1, len(whole)):
        continued = replace(request, attempt=2, output_token_ids=tuple(whole[:num_received]))
        assert serve(shallow, setup, [continued]).tokens["it"] == whole[num_received:]


def test_bfloat16_keys_and_values_are_as_exact(shallow: LoadedModel) -> None:
    at_once = Setup(backend=CpuBackend(2), kv_cache_dtype="bfloat16")
    chunked = Setup(
        backend=CpuBackend(1), kv_cache_dtype="bfloat16", max_num_batched_tokens=50, max_num_seqs=1
    )
    short = beginning(140)
    assert_same(serve(shallow, chunked, [short]), serve(shallow, at_once, [short]))


def beginning(num_tokens: int) -> EngineRequest:
    """Our request with a shorter prompt: every position it computes is one of ours."""
    return greedy("it", REQUEST.prompt_token_ids[:num_tokens], 2)


def assert_same(recording: Recording, expected: Recording) -> None:
    assert recording.digests[FIRST] == expected.digests[FIRST]
    assert recording.tokens["it"] == expected.tokens["it"]


def assert_begins_as(recording: Recording, expected: Recording, num_tokens: int) -> None:
    for position in range(num_tokens):
        assert recording.digests[FIRST][position] == expected.digests[FIRST][position], position
