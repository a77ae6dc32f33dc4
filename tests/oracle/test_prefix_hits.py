"""A hit changes no bit: logits computed on cached blocks are those of a machine that has never seen them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.step import SequenceId
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import tiny_mistral, tiny_qwen3
from tests.oracle.recording import Recording, Served, Setup, greedy, serve

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {"qwen3": tiny_qwen3, "windowed mistral": tiny_mistral}

BLOCK_SIZE, PROMPT_TOKENS = 16, 10 * 16 + 5
COLD, CACHED = (
    Setup(backend=CpuBackend(2), block_size=BLOCK_SIZE, prefix_cache=cache, num_blocks=40)
    for cache in ("naive", "radix")
)


@pytest.fixture(scope="module", params=["smollm2", *CHECKPOINTS])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    if request.param == "smollm2":
        shallow: LoadedModel = request.getfixturevalue("shallow")
        return shallow
    checkpoint = CHECKPOINTS[request.param](tmp_path_factory.mktemp("checkpoint"))
    return load_model(checkpoint, CpuBackend(2), max_model_len=512)


@pytest.fixture(scope="module")
def prompt(loaded: LoadedModel) -> list[int]:
    return tokens(loaded, seed=0, length=PROMPT_TOKENS)


def tokens(loaded: LoadedModel, seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, loaded.config.vocab_size) for _ in range(length)]


def used(loaded: LoadedModel, *, watch: Sequence[int]) -> Served:
    """An engine all of whose blocks hold what finished requests, sequences 1 to 4, have left there."""
    served = Served(loaded, CACHED, watch=watch)
    served.serve([greedy(f"before {i}", tokens(loaded, 100 + i, 200), 2) for i in range(4)])
    assert served.engine.prefix_keys()
    return served


def bits(recording: Recording, sequence: int) -> dict[int, bytes]:
    return recording.digests[SequenceId(sequence)]


def test_a_hit_of_every_length(loaded: LoadedModel, prompt: list[int]) -> None:
    """Beginnings of one cached prompt, as prompts: each hits all the complete blocks that it may."""
    cold = bits(serve(loaded, COLD, [greedy("it", prompt, 1)]), 1)
    lengths = range(1, PROMPT_TOKENS + 1, 5)  # every hit there can be, and every distance from its end
    sequences = range(6, 6 + len(lengths))
    served = used(loaded, watch=sequences)
    served.serve([greedy("it", prompt, 1)])
    recording = served.serve([greedy(str(length), prompt[:length], 1) for length in lengths])
    for length, sequence in zip(lengths, sequences, strict=True):
        hit = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert recording.num_cached_tokens[str(length)] == hit
        assert bits(recording, sequence) == {p: cold[p] for p in range(hit, length)}, f"{length} tokens"
    assert {recording.num_cached_tokens[str(length)] for length in lengths} == set(range(0, 161, 16))


def test_generated_tokens_are_hits_of_the_next_turn(loaded: LoadedModel, prompt: list[int]) -> None:
    served = used(loaded, watch=[6])
    first = served.serve([greedy("turn 1", prompt, 20)]).tokens["turn 1"]
    longer = [*prompt, *first, *tokens(loaded, seed=7, length=30)]
    cold = serve(loaded, COLD, [greedy("turn 2", longer, 5)])
    recording = served.serve([greedy("turn 2", longer, 5)])
    hit = (PROMPT_TOKENS + 20 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert recording.num_cached_tokens["turn 2"] == hit > PROMPT_TOKENS
    assert bits(recording, 6) == {p: digest for p, digest in bits(cold, 1).items() if p >= hit}
    assert recording.tokens["turn 2"] == cold.tokens["turn 2"]


def test_computed_twice_at_once_and_then_shared(loaded: LoadedModel, prompt: list[int]) -> None:
    """The other needs every row. Whoever completes a block second goes on with the first's."""
    cold = serve(loaded, COLD, [greedy("it", prompt, 20)])
    other = replace(greedy("other", prompt, 20), prompt_logprobs=0)
    recording = used(loaded, watch=[5, 6]).serve([greedy("one", prompt, 20), other])
    assert recording.num_cached_tokens["one"] == recording.num_cached_tokens["other"] == 0
    for name, sequence in {"one": 5, "other": 6}.items():
        assert bits(recording, sequence) == bits(cold, 1)
        assert recording.tokens[name] == cold.tokens["it"]


def test_what_arrives_together_is_computed_once(loaded: LoadedModel, prompt: list[int]) -> None:
    cold = serve(loaded, COLD, [greedy("it", prompt, 20)])
    recording = used(loaded, watch=[5, 6]).serve([greedy(name, prompt, 20) for name in ("one", "other")])
    hit = recording.num_cached_tokens["other"]
    assert recording.num_cached_tokens["one"] == 0 < hit
    assert bits(recording, 5) == bits(cold, 1)
    assert bits(recording, 6) == {p: digest for p, digest in bits(cold, 1).items() if p >= hit}
    assert recording.tokens["one"] == recording.tokens["other"] == cold.tokens["it"]


def test_preempted_and_resumed_from_the_cache(loaded: LoadedModel, prompt: list[int]) -> None:
    """The elder, of 27 blocks, leaves it 11 of 39, and takes another one."""
    cold = serve(loaded, COLD, [greedy("it", prompt, 20)])
    elder = greedy("elder", tokens(loaded, seed=9, length=430), 16)
    recording = used(loaded, watch=[6]).serve([elder, greedy("it", prompt, 20)])
    assert recording.num_preemptions == 1
    assert bits(recording, 6) == bits(cold, 1)
    assert recording.tokens["it"] == cold.tokens["it"]
