"""A request that another engine has begun: what is left of it is computed as if there had been one engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import ErrorKind, FinishReason, SamplingParams
from tests.engine.bench import Bench, a_request, benches
from tests.fake_runner import VOCABULARY, generate, logprob

PROMPT = [5, 6, 7, 8, 9]


def test_the_output_so_far_is_computed_like_a_prompt_and_not_said_again() -> None:
    whole = generate(PROMPT, 6)
    bench = Bench()
    bench.submit(a_request("a", PROMPT, 6, output_token_ids=tuple(whole[:2])))
    assert bench.scheduler.num_uncomputed_tokens == 7
    assert bench.step() == [(0, 7)]
    bench.finish()
    assert bench.tokens["a"] == whole[2:], "max_tokens is the whole answer's"
    assert bench.finished == {"a": FinishReason.LENGTH}
    assert bench.drained()


def test_what_it_draws_is_drawn_as_output() -> None:
    """Penalties and min_tokens count from the prompt's end."""
    sampling = SamplingParams(min_tokens=4, frequency_penalty=0.5)
    bench = Bench()
    bench.submit(a_request("a", PROMPT, output_token_ids=(1, 2), sampling=sampling))
    bench.step()
    (step,) = bench.runner.plans[-1].sequences
    assert step.draw is not None and step.draw.num_prompt_tokens == len(PROMPT)
    assert step.known_tokens == (*PROMPT, 1, 2)


def test_what_is_cached_of_prompt_and_output_is_a_hit() -> None:
    whole = generate(PROMPT, 12)
    bench = Bench()
    bench.serve("before", PROMPT, 12)
    bench.submit(a_request("after", PROMPT, 12, output_token_ids=tuple(whole[:9])))
    bench.finish()
    assert bench.tokens["after"] == whole[9:]
    assert bench.cached["after"] == 12, "three blocks of four, of fourteen tokens"


def test_the_rest_of_the_prompts_logprobs_is_said() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.submit(a_request("a", PROMPT, 2, prompt_logprobs=0, num_prompt_logprobs=3))
    bench.finish()
    assert bench.prompt_logprobs["a"] == [logprob(PROMPT[4])]
    bench.submit(a_request("b", PROMPT, 2, prompt_logprobs=0, num_prompt_logprobs=4, output_token_ids=(1,)))
    bench.finish()
    assert bench.prompt_logprobs["b"] == []


@pytest.mark.parametrize(
    ("output", "message"),
    [((1, 2, 3), "of max_tokens 3 there are 3 already"), ((VOCABULARY,), "token ids of output")],
)
def test_an_output_that_cannot_be_gone_on_from_is_refused(output: tuple[int, ...], message: str) -> None:
    bench = Bench()
    bench.submit(a_request("a", PROMPT, 3, output_token_ids=output))
    assert bench.errors["a"].kind is ErrorKind.INVALID
    assert message in bench.errors["a"].message


@settings(max_examples=100, deadline=None)
@given(
    received=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    bench=benches(),
    logprobs=st.booleans(),
)
def test_each_goes_on_as_it_would_have_gone_on_alone(
    *, received: list[int], bench: Bench, logprobs: bool
) -> None:
    """Whatever was received when their engine died, beside and preempted by each other."""
    prompts = [[i // 3, *range(10)] for i in range(len(received))]
    for i, (prompt, num_received) in enumerate(zip(prompts, received, strict=True)):
        so_far = tuple(generate(prompt, num_received))
        wanted = {"prompt_logprobs": 0, "num_prompt_logprobs": 10 if so_far else 0} if logprobs else {}
        bench.submit(a_request(str(i), prompt, 12, output_token_ids=so_far, **wanted))
    bench.finish()
    for i, (prompt, num_received) in enumerate(zip(prompts, received, strict=True)):
        assert bench.tokens[str(i)] == generate(prompt, 12)[num_received:]
        assert len(bench.prompt_logprobs[str(i)]) == (10 if logprobs and not num_received else 0)
    assert bench.drained()
