"""What requests get out of the prefix cache, and in which order they are served."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.actors.engine.engine import Engine
from shoal.actors.messages import EngineRequest, ErrorKind, RequestId, TokenChunk
from tests.engine.bench import INGRESS, Bench, a_request
from tests.fake_runner import generate, logprob

PROMPT = list(range(100, 110))


def served(bench: Bench, name: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> int:
    """Serve one request by itself; how many tokens of its prompt were cached."""
    bench.submit(a_request(name, prompt, max_tokens, **more))
    bench.finish()
    assert bench.tokens[name] == generate(prompt, max_tokens)
    return bench.cached[name]


@pytest.mark.parametrize(
    ("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (10, 8), (12, 8), (13, 8), (20, 8)]
)
def test_a_hit_ends_before_the_last_token_and_on_a_block(length: int, hit: int) -> None:
    """Ten tokens are cached as two blocks of four."""
    bench = Bench()
    assert served(bench, "first", PROMPT) == 0
    assert served(bench, "second", [*PROMPT, *range(20)][:length]) == hit
    assert bench.runner.plans[-1].sequences[0].start == hit
    assert bench.drained()


def test_generated_tokens_are_cached_too() -> None:
    bench = Bench()
    served(bench, "turn 1", PROMPT, max_tokens=8)
    longer = [*PROMPT, *bench.tokens["turn 1"], 1, 2, 3]
    assert served(bench, "turn 2", longer) == 16, "of 18 tokens, the last of which was never computed"


def test_what_was_committed_before_an_abort_stays_cached() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.submit(a_request("a", PROMPT))
    bench.step()
    bench.step()
    bench.engine.abort(RequestId("a"), 1)
    bench.finish()
    assert served(bench, "b", PROMPT) == 4, "its second block was in flight"


@pytest.mark.parametrize("more", [{"cache_salt": "theirs"}, {"prompt_logprobs": 0}])
def test_who_must_not_share_does_not(more: dict[str, Any]) -> None:
    bench = Bench()
    served(bench, "first", PROMPT)
    assert served(bench, "second", PROMPT, **more) == 0
    assert served(bench, "third", PROMPT) == 8


def test_an_engine_of_another_fingerprint_has_other_keys() -> None:
    keys = []
    for fingerprint in (b"a", b"b"):
        bench = Bench(fingerprint=fingerprint)
        served(bench, "it", PROMPT)
        keys.append(bench.engine.prefix_keys())
    assert len(keys[0]) == len(keys[1]) == 2 and not set(keys[0]) & set(keys[1])


def test_without_a_cache_nothing_hits_and_nothing_is_kept() -> None:
    bench = Bench(cache="naive")
    assert [served(bench, name, PROMPT) for name in "ab"] == [0, 0]
    assert bench.pools.blocks.num_free == 19


def test_without_a_cache_nobody_waits_for_what_another_computes() -> None:
    bench = Bench(cache="naive", max_num_batched_tokens=20)
    for name in "ab":
        bench.submit(a_request(name, PROMPT))
    assert bench.step() == [(0, 10), (0, 10)]
    bench.finish()
    assert bench.tokens == {name: generate(PROMPT, 3) for name in "ab"}
    assert bench.drained()


def test_cached_blocks_are_given_up_for_whoever_needs_them() -> None:
    bench = Bench(num_blocks=6)
    assert served(bench, "a", list(range(16))) == 0
    assert bench.pools.blocks.num_free == 1
    assert served(bench, "b", list(range(50, 66))) == 0, "three of a's blocks are evicted, its tail first"
    assert served(bench, "a again", list(range(8))) == 4


def test_a_hit_that_would_leave_too_little_for_the_rest_waits() -> None:
    """Locking a hit takes its blocks from those that can be evicted."""
    bench = Bench(num_blocks=6, max_num_seqs=2)
    served(bench, "cached", list(range(9)))
    bench.submit(a_request("running", list(range(50, 60)), max_tokens=3))
    bench.submit(a_request("hits two blocks, wants two more", list(range(16))))
    assert bench.step() == [(0, 10)]
    assert bench.step() == [(10, 1)]
    bench.finish()
    assert bench.scheduler.num_preemptions == 0
    assert bench.drained()


def test_2_those_who_arrive_together_compute_what_they_share_once() -> None:
    bench = Bench(num_blocks=40)
    prompts = {name: [*PROMPT[:8], ord(name), 1] for name in "abcd"}
    for name, prompt in prompts.items():
        bench.submit(a_request(name, prompt))
    assert bench.step() == [(0, 10)], "the others wait for it, whatever room the step has"
    assert bench.step() == [(10, 1)], "which is in flight"
    assert bench.step() == [(11, 1), (8, 2), (8, 2), (8, 2)]
    bench.finish()
    assert bench.cached == {"a": 0, "b": 8, "c": 8, "d": 8}
    assert bench.tokens == {name: generate(prompt, 3) for name, prompt in prompts.items()}
    assert bench.drained()


@pytest.mark.parametrize("end", [lambda e: e.abort(RequestId("a"), 1), lambda e: e.reset_prefix_cache()])
def test_who_waits_for_what_never_comes_computes_it(end: Callable[[Engine], object]) -> None:
    bench = Bench()
    for name in "ab":
        bench.submit(a_request(name, PROMPT))
    assert bench.step() == [(0, 10)]
    end(bench.engine)
    assert (0, 10) in bench.step()
    bench.finish()
    assert bench.cached["b"] == 0
    assert bench.tokens["b"] == generate(PROMPT, 3)
    assert bench.drained()


def test_two_that_compute_the_same_at_once_end_up_on_one_copy() -> None:
    bench = Bench(max_num_batched_tokens=20)
    bench.submit(a_request("a", PROMPT, max_tokens=6))
    bench.submit(a_request("b", PROMPT, max_tokens=6, prompt_logprobs=0))  # needs every row
    bench.step()
    assert bench.pools.blocks.num_free == 19 - 3 - 3
    bench.step()
    bench.step()
    tables = [step.block_table for step in bench.runner.plans[-1].sequences]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert bench.pools.blocks.num_free == 19 - 2 - 1 - 1
    bench.finish()
    assert bench.tokens["a"] == bench.tokens["b"] == generate(PROMPT, 6)
    assert bench.drained()


def test_who_was_preempted_resumes_from_what_is_still_cached() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=2)
    bench.submit(a_request("elder", list(range(14)), max_tokens=8))
    bench.submit(a_request("younger", list(range(50, 60)), max_tokens=8))
    bench.finish()
    assert bench.scheduler.num_preemptions == 1
    resumed = bench.runner.plans[-1].sequences[0]
    starts = [s.start for plan in bench.runner.plans for s in plan.sequences if s.known_tokens]
    assert starts[:2] == [0, 0] and starts[2] >= 8 and resumed.sequence_id == 2
    assert bench.cached["younger"] == 0, "what its first admission found, whatever came later"
    assert bench.tokens["younger"] == generate(list(range(50, 60)), 8)


def test_a_reset_offers_nothing_again_that_was_computed_before_it() -> None:
    bench = Bench()
    served(bench, "before", PROMPT)
    bench.submit(a_request("running", [*range(50, 60)], max_tokens=20))
    for _ in range(3):
        bench.step()
    bench.engine.reset_prefix_cache()
    bench.finish()
    assert bench.engine.prefix_keys() == (), "nor what is built upon it"
    assert served(bench, "again", list(range(50, 60))) == 0
    assert served(bench, "once more", list(range(50, 60))) == 8


def test_the_engine_reports_what_its_cache_holds() -> None:
    bench = Bench(num_blocks=6)
    served(bench, "a", list(range(16)))
    held = set(bench.engine.take_prefix_changes().stored)
    assert held == set(bench.engine.prefix_keys()) and len(held) == 4
    served(bench, "b", list(range(50, 66)))
    changes = bench.engine.take_prefix_changes()
    assert held - set(changes.removed) | set(changes.stored) == set(bench.engine.prefix_keys())


def test_work_that_stands_before_a_new_request() -> None:
    bench = Bench(max_num_batched_tokens=8)
    for first in (0, 50):
        bench.submit(a_request(f"from {first}", list(range(first, first + 10))))
    assert bench.engine.uncomputed_tokens == 20
    bench.step()
    assert bench.engine.uncomputed_tokens == 12
    bench.step()
    assert bench.engine.uncomputed_tokens == 4
    bench.step()
    assert bench.engine.uncomputed_tokens == 0


def test_lower_priority_values_come_first_among_those_that_wait() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in {"late": 5, "first": 0, "second": 0, "urgent": -1}.items():
        bench.submit(a_request(name, [1], max_tokens=1, priority=priority))
    bench.finish()
    assert list(bench.finished) == ["urgent", "first", "second", "late"]


def test_of_those_that_run_the_least_urgent_gives_way_and_of_equals_the_youngest() -> None:
    bench = Bench(num_blocks=7, max_num_batched_tokens=64)
    for name, priority in {"a": 1, "b": 0, "c": 0}.items():
        bench.submit(a_request(name, [ord(name), 1, 2], max_tokens=10, priority=priority))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert list(bench.finished) == ["b", "c", "a"]


def test_one_request_too_many_is_told_to_come_again() -> None:
    bench = Bench(max_num_seqs=1, max_queued_requests=2)
    for name in "abcd":
        bench.submit(a_request(name, [1]))
    assert {name: error.kind for name, error in bench.errors.items()} == {"d": ErrorKind.OVERLOADED}
    bench.finish()
    bench.submit(a_request("e", [1]))
    bench.finish()
    assert sorted(bench.finished) == ["a", "b", "c", "d", "e"] and list(bench.errors) == ["d"]


def test_a_request_longer_than_the_context_is_refused() -> None:
    bench = Bench(max_model_len=12)
    bench.submit(a_request("fits", [1] * 9, max_tokens=3))
    bench.submit(a_request("does not", [1] * 9, max_tokens=4))
    assert bench.errors["does not"].kind is ErrorKind.NEVER_FITS
    assert bench.errors["does not"].message == (
        "9 prompt tokens and 4 output tokens exceed the context of 12 tokens"
    )
    bench.finish()


def chunks_of(bench: Bench, request: EngineRequest) -> list[TokenChunk]:
    bench.engine.submit([request], INGRESS)
    chunks = []
    while bench.engine.has_work:
        chunks += [reply.chunk for reply in bench.engine.step()]
    return chunks


def test_logprobs_come_with_their_tokens() -> None:
    chunks = chunks_of(Bench(), a_request("a", PROMPT, max_tokens=3, logprobs=0))
    expected = generate(PROMPT, 3)
    assert [chunk.logprobs for chunk in chunks] == [(logprob(token),) for token in expected]


def test_prompt_logprobs_come_in_pieces_from_the_second_token_on() -> None:
    bench = Bench(max_num_batched_tokens=4)
    chunks = chunks_of(bench, a_request("a", PROMPT, max_tokens=2, prompt_logprobs=1))
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [4, 4, 1, 0]
    assert [len(chunk.token_ids) for chunk in chunks] == [0, 0, 1, 1]
    said = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert said == [logprob(token) for token in PROMPT[1:]]


def test_prompt_logprobs_are_said_once_even_if_the_prompt_is_computed_again() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=4)
    bench.submit(a_request("elder", [1, 2], max_tokens=28))
    bench.submit(a_request("it", PROMPT, max_tokens=12, prompt_logprobs=0))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert bench.prompt_logprobs["it"] == [logprob(token) for token in PROMPT[1:]]
    assert bench.tokens["it"] == generate(PROMPT, 12)
