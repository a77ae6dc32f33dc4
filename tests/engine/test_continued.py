"""A request that another engine has begun: what is left of it is computed as if there had been one engine."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import ErrorKind, FinishReason, SamplingParams, StoreId
from shoal.kvstore.block_hash import segment_key
from shoal.kvstore.boundary import BoundaryRule, Resume
from tests.engine.bench import Bench, a_request, benches
from tests.fake_runner import VOCABULARY, generate, logprob
from tests.fake_store import OTHER, OWN, view

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


@settings(max_examples=100, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([3, 4, 7]),
            "window": st.sampled_from([None, 1, 5, 9]),
            "num_dropped": st.integers(0, 2),
            "num_segments": st.integers(0, 20),
        }
    ),
    copies=st.lists(st.sampled_from(["none", "begins", "ends", "all end"]), min_size=8, max_size=40),
    own=st.sampled_from([OWN, OTHER]),
)
def test_case_54_whatever_the_stores_have_of_it_is_not_computed_again(
    *, shape: dict[str, Any], copies: list[str], own: StoreId
) -> None:
    """Its engine died in the middle of a copy, or behind on many; the next is on its node or another."""
    first = Bench(num_blocks=40, view=view(), **shape)
    first.submit(a_request("a", PROMPT, 50))
    for copy in copies:
        first.step()
        if copy == "begins":
            first.carrier.take(max_bytes=3)
        elif copy == "ends" and first.carrier.saving:
            first.carrier.save()
        elif copy == "all end":
            first.carrier.run()
    tokens = [*PROMPT, *first.tokens["a"]]
    second = Bench(num_blocks=40, view=view(own=own), stores=first.stores, **shape)
    keys, saved = second.keys(tokens), first.stores.has[OWN]
    num_saved = next((i for i, key in enumerate(keys) if key not in saved), len(keys))
    num_usable = min(num_saved, (len(tokens) - 1) // second.block_size)
    rule = second.rule or BoundaryRule()
    resume = rule.furthest(num_usable, lambda i: segment_key(keys[i]) in saved)
    if len(rule.segments_at(resume.start)) > second.pools.segments.num_usable:
        resume = Resume()  # there is no room for its state
    num_cached = second.serve("a", PROMPT, 50, output_token_ids=tuple(first.tokens["a"]))
    assert num_cached == resume.start * second.block_size
    if not rule.num_segments and not rule.num_recomputed:
        unsaved = (len(tokens) - 1) // second.block_size - num_usable
        assert len(tokens) - num_cached <= (1 + unsaved) * second.block_size
