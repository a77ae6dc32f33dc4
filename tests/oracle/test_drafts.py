"""Drafts change no bit, of what is said or of what is kept of it, whatever part of them is right."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.drafts import PromptLookupDrafts
from shoal.actors.engine.model_layout import ModelLayout
from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, PrefixSource, RequestId, SamplingParams
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_mistral
from tests.fake_drafts import FakeDrafts
from tests.fake_store import OWN, Stores
from tests.oracle.recording import Recording, Served, Setup, greedy, serve

BLOCK_SIZE, MOST = 32, 5
PROMPT_TOKENS, OUTPUT_TOKENS, AFTER = 40, 5 * BLOCK_SIZE, 12
PLAIN = Setup(backend=CpuBackend(2), block_size=BLOCK_SIZE, max_model_len=512, num_blocks=60)


def small_windowed_mistral(directory: Path) -> Path:
    return tiny_mistral(directory, sliding_window=8, num_hidden_layers=4)


def windowed_mistral(directory: Path) -> Path:
    return tiny_mistral(directory, sliding_window=50, num_hidden_layers=4)


def gpt_oss(directory: Path) -> Path:
    return tiny_gpt_oss(directory, num_hidden_layers=6)


@pytest.fixture(
    scope="module",
    params=[tiny_llama, small_windowed_mistral, windowed_mistral, tiny_gemma3, gpt_oss],
    ids=lambda write: write.__name__,
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    write: Callable[[Path], Path] = request.param
    return load_model(write(tmp_path_factory.mktemp("checkpoint")), CpuBackend(2), max_model_len=512)


def tokens(seed: int, length: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, 500) for _ in range(length)]


def layout(loaded: LoadedModel, num_dropped: int = 0) -> ModelLayout:
    return loaded.config.layout(
        block_size=BLOCK_SIZE, dtype="float32", max_model_len=512, num_dropped_layers=num_dropped
    )


def sampled(name: str, prompt: Sequence[int], stops: frozenset[int], **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=1,
        prompt_token_ids=tuple(prompt),
        max_tokens=OUTPUT_TOKENS // 2,
        stop_token_ids=stops,
        sampling=SamplingParams(**params),
        logprobs=2,
    )


def all_kinds(vocabulary: int) -> list[EngineRequest]:
    """Of each temperature one with all that looks at the tokens before, and one without. A third of the
    vocabulary ends an answer that is long enough."""
    stops = frozenset(range(0, vocabulary, 3))
    requests = []
    for i, temperature in enumerate((0.0, 0.7, 1.3)):
        prompt = tokens(i, PROMPT_TOKENS + 7 * i)
        requests += [
            replace(
                sampled(f"plain at {temperature}", prompt, frozenset(), temperature=temperature, seed=i),
                prompt_logprobs=1,
            ),
            sampled(
                f"adjusted at {temperature}",
                prompt,
                stops,
                temperature=temperature,
                seed=i,
                top_p=0.95,
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                presence_penalty=0.3,
                logit_bias=((7, 2.0), (9, -3.0)),
                min_tokens=20 + 10 * i,
            ),
        ]
    return requests


def of_what_is_said(recording: Recording, requests: Sequence[EngineRequest]) -> list[dict[int, bytes]]:
    """Digests of the logits that each token was drawn from. Whether a row is computed behind a stop token
    depends on what is in flight."""
    said = []
    for i, request in enumerate(requests, start=1):
        first = len(request.prompt_token_ids) - 1
        digests = recording.digests[SequenceId(i)]
        said.append({p: digests[p] for p in range(first + len(recording.tokens[request.request_id]))})
    return said


def known(requests: Sequence[EngineRequest], recording: Recording, **how: Any) -> FakeDrafts:
    """Drafts of what these requests are answered without any."""
    wholes = [
        (request.sampling.seed, [*request.prompt_token_ids, *recording.tokens[request.request_id]])
        for request in requests
    ]

    def going_on(history: list[int], num_tokens: int, seed: int) -> list[int]:
        whole = next((w for s, w in wholes if s == seed and w[: len(history)] == history), [])
        return whole[len(history) : len(history) + num_tokens]

    return FakeDrafts(MOST, going_on=going_on, **how)


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Recording:
    """Of all kinds together, without drafts."""
    requests = all_kinds(loaded.config.vocab_size)
    return serve(loaded, PLAIN, requests, watch=range(1, 1 + len(requests)))


LONG = greedy("it", tokens(0, PROMPT_TOKENS), OUTPUT_TOKENS)


@pytest.fixture(scope="module")
def cold(loaded: LoadedModel) -> Recording:
    """Of the long one, alone and without drafts."""
    return serve(loaded, PLAIN, [LONG])


@pytest.mark.parametrize("right", [0.0, 0.6, 0.95])
def test_answers_of_all_kinds_beside_each_other(loaded: LoadedModel, plain: Recording, right: float) -> None:
    requests = all_kinds(loaded.config.vocab_size)
    watch = range(1, 1 + len(requests))
    setup = replace(PLAIN, drafts=known(requests, plain, right=right, waits=0.8), num_draft_tokens=MOST)
    drafted = serve(loaded, setup, requests, watch=watch)
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == plain.logprobs
    assert of_what_is_said(drafted, requests) == of_what_is_said(plain, requests)
    assert drafted.drafts.num_tokens > 100
    assert (drafted.drafts.num_accepted > 50) is (right > 0)


@pytest.mark.parametrize("num_dropped", [0, 2])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_case_30_every_boundary_is_taken_up_from_what_drafting_left(
    loaded: LoadedModel, cold: Recording, num_dropped: int, right: float
) -> None:
    """On the device and from the own store; drafting goes on there too."""
    if num_dropped and layout(loaded).rings is None:
        pytest.skip("it has no layers to drop")
    whole = [*LONG.prompt_token_ids, *cold.tokens["it"]]
    setup = replace(
        PLAIN,
        drafts=known([LONG], cold, right=right, waits=0.8),
        num_draft_tokens=MOST,
        num_dropped_layers=num_dropped,
        prefix_cache="radix",
    )
    stores = Stores()
    served = Served(loaded, setup, watch=[1], stores=stores)
    assert served.serve([LONG]).digests[SequenceId(1)] == cold.digests[SequenceId(1)]
    assert served.recording.tokens["it"] == cold.tokens["it"]
    rule = layout(loaded, num_dropped).rule
    for is_stored in (False, True):
        for i in range(1 + PROMPT_TOKENS // BLOCK_SIZE, (len(whole) - AFTER) // BLOCK_SIZE):
            boundary = i * BLOCK_SIZE
            name = f"{boundary}, {is_stored}"
            request = greedy(name, whole[: boundary + 1], AFTER)
            if is_stored:
                served.engine.reset_prefix_cache()
                entries = PrefixSource(store_id=OWN, first=0, end=i, segments=tuple(range(i)))
                request = replace(request, sources=(entries,))
            sequence = served.submit(request, watch=True)
            recording = served.serve()
            assert recording.num_cached_tokens[name] == max(0, i - rule.num_recomputed) * BLOCK_SIZE
            assert recording.tokens[name] == whole[boundary + 1 : boundary + 1 + AFTER]
            ours = recording.digests[sequence]
            for position in range(boundary, boundary + AFTER):
                assert ours[position] == cold.digests[SequenceId(1)][position], position
    assert (served.recording.drafts.num_accepted > 50) is (right > 0)


def test_gone_on_with_where_another_engine_died_at_every_token(loaded: LoadedModel) -> None:
    """Whether that one drafted or not, and this one drafts."""
    for request in all_kinds(loaded.config.vocab_size)[1::2]:
        plain = serve(loaded, PLAIN, [request])
        whole = plain.tokens[request.request_id]
        drafts = known([request], plain, right=0.7, waits=0.8)
        continued = [
            replace(request, request_id=RequestId(str(received)), output_token_ids=tuple(whole[:received]))
            for received in range(1, len(whole))
        ]
        setup = replace(PLAIN, max_num_seqs=8, drafts=drafts, num_draft_tokens=MOST)
        recording = serve(loaded, setup, continued)
        for received in range(1, len(whole)):
            assert recording.tokens[str(received)] == whole[received:]
        assert recording.drafts.num_accepted > 20


def test_preempted_again_and_again(loaded: LoadedModel, cold: Recording) -> None:
    drafts = known([LONG], cold, right=0.7, waits=0.8)
    setup = replace(PLAIN, drafts=drafts, num_draft_tokens=MOST, prefix_cache="radix")
    served = Served(loaded, setup, watch=[1])
    it = served.submit(LONG)
    for _ in range(12):
        for _ in range(5):
            served.step()
        if any(s.sequence_id == it for s in served._scheduler._running):
            served.preempt(it)
    recording = served.serve()
    assert recording.tokens == cold.tokens and recording.digests == cold.digests
    assert recording.num_preemptions > 5 and recording.drafts.num_accepted > 20


def test_what_a_model_repeats_is_drafted_by_prompt_lookup(shallow: LoadedModel) -> None:
    """Few layers of SmolLM2 fall into a loop soon; beside those that draw at random."""
    requests = [
        greedy("loops", tokens(1, 60), 80),
        sampled("draws", tokens(2, 50), frozenset(), temperature=1.0, seed=3),
        sampled("draws what is likely", tokens(3, 50), frozenset(), temperature=0.4, top_k=3),
    ]
    setup = replace(PLAIN, max_model_len=1024)
    plain = serve(shallow, setup, requests, watch=(1, 2, 3))
    drafts = PromptLookupDrafts(MOST)
    drafted = serve(shallow, replace(setup, drafts=drafts, num_draft_tokens=MOST), requests, watch=(1, 2, 3))
    assert drafted.tokens == plain.tokens and drafted.digests == plain.digests
    assert drafted.logprobs == plain.logprobs
    assert drafted.drafts.num_accepted > 20
