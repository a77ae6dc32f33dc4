"""The promise of test_exactness.py for the choices of one prompt: each is what it would be by itself."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, RequestId, SamplingParams
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import tiny_gemma3, tiny_gpt_oss
from tests.fake_drafts import FakeDrafts
from tests.oracle.recording import Recording, Served, Setup, greedy, serve

BACKEND = CpuBackend(2)
BLOCK, NUM_CHOICES, OUTPUT_TOKENS = 16, 4, 20
PROMPT = [(7 * i * i + 3 * i) % 500 + 3 for i in range(77)]
WRITER = greedy("writer", [(11 * i * i + i) % 500 + 3 for i in range(150)], 2)
SETUP = Setup(backend=BACKEND, block_size=BLOCK, num_blocks=60, max_model_len=512)


def choices(prompt: Sequence[int] = PROMPT, **more: Any) -> list[EngineRequest]:
    sampling = SamplingParams(
        temperature=1.2, top_p=0.95, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=3
    )
    return [
        EngineRequest(
            request_id=RequestId(str(i)),
            attempt=1,
            prompt_token_ids=tuple(prompt),
            max_tokens=OUTPUT_TOKENS,
            stop_token_ids=frozenset(range(0, 500, 40)),
            sampling=replace(sampling, seed=i),
            logprobs=3,
            group=RequestId("all"),
            **more,
        )
        for i in range(NUM_CHOICES)
    ]


@dataclass(frozen=True, kw_only=True)
class Subject:
    loaded: LoadedModel

    def alone(self, requests: Sequence[EngineRequest]) -> list[Recording]:
        return [serve(self.loaded, SETUP, [request]) for request in requests]

    def together(self, setup: Setup = SETUP, executor: Executor | None = None) -> Served:
        everybody = range(1, NUM_CHOICES + 1)
        return Served(self.loaded, setup, watch=everybody, executor=executor)


@pytest.fixture(scope="module", params=["smollm2", "gemma 3", "gpt-oss"])
def subject(
    request: pytest.FixtureRequest, shallow: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    tiny: dict[str, Callable[[Path], Path]] = {"gemma 3": tiny_gemma3, "gpt-oss": tiny_gpt_oss}
    if request.param not in tiny:
        return Subject(loaded=shallow)
    folder = tiny[request.param](tmp_path_factory.mktemp("checkpoint"))
    return Subject(loaded=load_model(folder, BACKEND, max_model_len=SETUP.max_model_len))


@pytest.fixture(scope="module")
def alone(subject: Subject) -> list[Recording]:
    recordings = subject.alone(choices())
    assert len({tuple(recording.tokens[str(i)]) for i, recording in enumerate(recordings)}) == NUM_CHOICES
    return recordings


def assert_same(served: Served, alone: Sequence[Recording], but_for: frozenset[int] = frozenset()) -> None:
    """Tokens, logprobs, and the bits of each row of logits that was computed for it alone."""
    together = served.recording
    for i, expected in enumerate(alone):
        if i in but_for:
            continue
        name = str(i)
        assert together.tokens[name] == expected.tokens[name], name
        assert together.logprobs[name] == expected.logprobs[name], name
        digests = together.digests[SequenceId(i + 1)]
        assert digests and digests.items() <= expected.digests[SequenceId(1)].items(), name


@pytest.mark.parametrize("max_num_batched_tokens", [512, 30, 11])
def test_each_choice_is_what_it_is_alone(
    subject: Subject, alone: Sequence[Recording], max_num_batched_tokens: int
) -> None:
    served = subject.together(replace(SETUP, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8))
    served.serve(choices())
    assert served.num_forked == NUM_CHOICES - 1
    assert_same(served, alone)
    own_rows = [min(served.recording.digests[SequenceId(i)]) for i in range(2, NUM_CHOICES + 1)]
    assert own_rows == [len(PROMPT)] * (NUM_CHOICES - 1), "the prompt was computed once"


@pytest.mark.parametrize("num_tokens", [64, 65, 5, 1])
def test_prompts_that_end_with_a_block_or_are_shorter(subject: Subject, num_tokens: int) -> None:
    requests = choices(PROMPT[:num_tokens], prompt_logprobs=1)
    served = subject.together()
    served.serve(requests)
    assert served.num_forked == NUM_CHOICES - 1
    assert_same(served, subject.alone(requests))


@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_choices_that_are_preempted(subject: Subject, alone: Sequence[Recording], num_steps: int) -> None:
    """The first of them, and one that was forked from it: be it that the fork is in flight."""
    served = subject.together(replace(SETUP, prefix_cache="radix"))
    for request in choices():
        served.submit(request)
    for _ in range(num_steps):
        served.step()
    for number in (1, 3):
        served.preempt(SequenceId(number))
    served.serve()
    assert served.recording.num_preemptions == 2
    assert_same(served, alone)


@pytest.mark.parametrize("right", [0.3, 0.9])
def test_choices_with_drafts(subject: Subject, alone: Sequence[Recording], right: float) -> None:
    """Each has its own, from its first token on, which is drawn behind the same row as the others'."""

    said = {
        request.sampling.seed: [*PROMPT, *recording.tokens[request.request_id]]
        for request, recording in zip(choices(), alone, strict=True)
    }

    def going_on(history: list[int], num_tokens: int, seed: int) -> list[int]:
        return said[seed][len(history) : len(history) + num_tokens]

    drafts = FakeDrafts(5, right=right, going_on=going_on)
    served = subject.together(replace(SETUP, drafts=drafts, num_draft_tokens=5))
    served.serve(choices())
    assert served.num_forked == NUM_CHOICES - 1
    assert served.recording.drafts.num_accepted > 0
    assert_same(served, alone)


class Late(Executor):
    """A device that has not begun a step when the next one is planned."""

    def submit(self, run: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        return _Unbegun(run)


class _Unbegun(Future[Any]):
    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._run())
        return super().result()


def test_48_copies_that_are_late_are_of_what_was_to_be_copied(
    subject: Subject, alone: Sequence[Recording]
) -> None:
    """When the first choice is gone its tail and its slot are wanted by another, whose steps poison them."""
    setup = replace(SETUP, num_blocks=1 + 5 + NUM_CHOICES + 10, max_num_seqs=4)
    served = subject.together(setup, Late())
    for request in choices():
        served.submit(request)
    served.step()
    assert not served.recording.digests, "planned, and neither computed nor copied"
    served.engine.abort(RequestId("0"), 1)
    served.submit(WRITER)
    served.serve()
    assert served.num_forked == NUM_CHOICES - 1
    assert_same(served, alone, but_for=frozenset({0}))
    assert served.recording.tokens["writer"] == serve(subject.loaded, SETUP, [WRITER]).tokens["writer"]
