"""Who computes what in each step, and what everybody gets in the end."""

import pytest

from shoal.actors.engine.engine import MAX_FAILED_STEPS
from shoal.actors.engine.scheduler import SchedulerConfig
from shoal.actors.messages import ErrorKind, FinishReason, IngressId, RequestId
from tests.engine.bench import Bench, a_request
from tests.fake_runner import VOCABULARY, generate, logprob


def test_one_request_from_prompt_to_limit() -> None:
    bench = Bench()
    bench.submit(a_request("a", [5, 6, 7, 8, 9], max_tokens=3))
    assert bench.step() == [(0, 5)]
    assert bench.step() == [(5, 1)]
    assert bench.step() == [(6, 1)]
    assert bench.step() == []
    assert bench.tokens["a"] == generate([5, 6, 7, 8, 9], 3)
    assert bench.finished == {"a": FinishReason.LENGTH}
    assert bench.drained()


def test_a_stop_token_ends_a_request_and_is_its_last() -> None:
    expected = generate([1, 2], 5)
    bench = Bench()
    bench.submit(a_request("a", [1, 2], max_tokens=10, stop_token_ids=frozenset({expected[2]})))
    bench.finish()
    assert bench.tokens["a"] == expected[:3]
    assert bench.finished == {"a": FinishReason.STOP}


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    bench = Bench(max_num_batched_tokens=6)
    bench.submit(a_request("short", [1, 2]))
    bench.submit(a_request("long", list(range(10))))
    assert bench.step() == [(0, 2), (0, 4)], "two prompts share the budget, in order of arrival"
    assert bench.step() == [(2, 1), (4, 5)], "decode first, the prompt takes what is left"
    assert bench.step() == [(3, 1), (9, 1)]
    bench.finish()
    assert bench.tokens["long"] == generate(list(range(10)), 3)


def test_an_urgent_arrival_does_not_wait_for_a_long_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.submit(a_request("long", list(range(20)), priority=5))
    assert bench.step() == [(0, 4)]
    bench.submit(a_request("equal", [1, 2], priority=5))
    bench.submit(a_request("urgent", [3, 4, 5], max_tokens=1, priority=-5))
    assert bench.step() == [(0, 3), (4, 1)]
    assert bench.step() == [(5, 4)], "the equal one came later"
    bench.finish()
    assert bench.tokens["long"] == generate(list(range(20)), 3)


def test_a_prompt_claims_its_whole_length_at_its_first_chunk() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=4)
    bench.submit(a_request("long", list(range(16)), max_tokens=1))
    bench.step()
    assert bench.pools.blocks.num_free == 1


def test_what_must_wait_holds_back_those_behind_it() -> None:
    bench = Bench(num_blocks=6)
    bench.submit(a_request("a", list(range(12)), max_tokens=2))
    bench.submit(a_request("too big for now", list(range(20, 28)), max_tokens=1))
    bench.submit(a_request("small", [1], max_tokens=1))
    assert bench.step() == [(0, 12)]
    assert bench.step() == [(12, 1)], "small would fit, but it came later"
    assert bench.step() == [], "what a owned is free when its last step has finished"
    assert bench.step() == [(0, 8), (0, 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.submit(a_request(name, [1], max_tokens=2))
    assert len(bench.step()) == 2
    bench.finish()
    assert sorted(bench.finished) == ["a", "b", "c"]


def test_42_what_can_never_fit_is_refused_at_once_and_the_others_go_on() -> None:
    bench = Bench(num_blocks=49, max_num_batched_tokens=300)
    bench.submit(a_request("never", [1] * 4 * 63, max_tokens=1))
    bench.submit(a_request("fits", [1, 2, 3]))
    assert bench.errors["never"].kind is ErrorKind.NEVER_FITS
    assert "252 prompt tokens and 1 output tokens need 63 KV blocks" in bench.errors["never"].message
    assert "48 in all" in bench.errors["never"].message
    bench.finish()
    assert bench.tokens["fits"] == generate([1, 2, 3], 3)


def test_a_request_that_would_outgrow_the_pool_is_refused_before_it_starts() -> None:
    bench = Bench(num_blocks=4)
    bench.submit(a_request("fills it", [1] * 9, max_tokens=4))
    bench.submit(a_request("outgrows it", [1] * 9, max_tokens=5))
    assert list(bench.errors) == ["outgrows it"]
    bench.finish()
    assert bench.tokens["fills it"] == generate([1] * 9, 4)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0)])
def test_an_empty_request_is_refused(prompt: list[int], max_tokens: int) -> None:
    bench = Bench()
    bench.submit(a_request("a", prompt, max_tokens))
    assert bench.errors["a"].kind is ErrorKind.INVALID


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_that_the_model_does_not_have_harms_nobody_else(token: int) -> None:
    bench = Bench()
    bench.submit(a_request("poison", [1, token, 2]))
    bench.submit(a_request("innocent", [1, 2]))
    assert bench.errors["poison"].kind is ErrorKind.INVALID
    assert "from 0 to 1008" in bench.errors["poison"].message
    bench.finish()
    assert bench.tokens["innocent"] == generate([1, 2], 3)


def test_the_youngest_is_preempted_and_still_gets_the_same_tokens() -> None:
    bench = Bench(num_blocks=7, max_num_batched_tokens=64)
    prompts = {name: [i, i + 1, i + 2] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        bench.submit(a_request(name, prompt, max_tokens=10))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert bench.tokens[name] == generate(prompt, 10)
    assert list(bench.finished) == ["a", "b", "c"], "the oldest is never the victim"
    assert bench.drained()


def test_45_preemption_always_makes_progress() -> None:
    """A prompt longer than a step's budget, resumed beside a decode that needs every block there is."""
    bench = Bench(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=4)
    bench.submit(a_request("decode", [1, 2], max_tokens=28))
    bench.submit(a_request("prompt", list(range(20)), max_tokens=8))
    bench.finish(within=200)
    assert bench.scheduler.num_preemptions <= 8
    assert bench.tokens["decode"] == generate([1, 2], 28)
    assert bench.tokens["prompt"] == generate(list(range(20)), 8)


def test_case_49_a_preempted_request_is_not_starved_by_later_ones_of_its_priority() -> None:
    bench = Bench(num_blocks=7)
    bench.submit(a_request("first", [1, 2, 3], max_tokens=16))
    bench.submit(a_request("preempted", [4, 5, 6], max_tokens=12))
    while not bench.scheduler.num_preemptions:
        bench.step()
    bench.step()  # the step in flight may have drawn one more token for it
    num_drawn = len(bench.tokens["preempted"])
    bench.submit(a_request("later", [7], max_tokens=1))
    while len(bench.tokens["preempted"]) == num_drawn:
        assert "later" not in bench.finished, "it would fit at any time"
        bench.step()
    bench.finish()
    assert bench.tokens["preempted"] == generate([4, 5, 6], 12)
    assert bench.tokens["later"] == generate([7], 1)
    assert bench.drained()


def test_an_abort_frees_everything_wherever_the_request_is() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=8)
    bench.submit(a_request("running", list(range(12))))
    bench.submit(a_request("waiting", list(range(12))))
    bench.step()
    for name in ("waiting", "running", "unknown"):
        bench.engine.abort(RequestId(name), 1)
        bench.engine.check()
    assert bench.step() == []
    assert bench.drained()


def test_a_queue_of_tokens_has_an_end_but_for_one_that_waits_alone() -> None:
    bench = Bench(max_num_seqs=1, max_queued_tokens=20)
    bench.submit(a_request("runs", [1, 2]))
    bench.step()
    bench.submit(a_request("alone", [1] * 40))
    bench.submit(a_request("beside it", [1]))
    assert bench.errors["beside it"].kind is ErrorKind.OVERLOADED
    assert "40 tokens wait" in bench.errors["beside it"].message
    bench.engine.abort(RequestId("alone"), 1)
    for name in ("eleven", "nine"):
        bench.submit(a_request(name, [1] * {"eleven": 11, "nine": 9}[name]))
    bench.submit(a_request("one more", [1]))
    assert list(bench.errors) == ["beside it", "one more"]
    bench.finish()
    assert {"runs", "eleven", "nine"} <= bench.finished.keys()
    assert bench.drained()


def test_an_answer_that_has_begun_elsewhere_is_let_in_where_others_are_not() -> None:
    bench = Bench(max_num_seqs=1, max_queued_requests=0)
    bench.submit(a_request("runs", [1, 2]))
    bench.submit(a_request("new", [3]))
    drawn = generate([4], 2)
    bench.submit(a_request("goes on", [4], max_tokens=4, output_token_ids=tuple(drawn)))
    bench.submit(a_request("is scored on", [5] * 4, prompt_logprobs=0, num_prompt_logprobs=2))
    assert list(bench.errors) == ["new"]
    bench.finish()
    assert drawn + bench.tokens["goes on"] == generate([4], 4)
    assert bench.prompt_logprobs["is scored on"] == [logprob(5)]


def test_an_answer_that_has_begun_elsewhere_does_not_wait_behind_those_that_have_not() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(a_request("runs", [1, 2]))
    bench.step()
    bench.submit(a_request("new", [3]))
    bench.submit(a_request("urgent", [4], priority=-1))
    bench.submit(a_request("goes on", [5], output_token_ids=tuple(generate([5], 1))))
    bench.finish()
    assert list(bench.finished) == ["runs", "urgent", "goes on", "new"]


def test_what_is_outstanding_is_named() -> None:
    bench = Bench(num_slots=3)
    bench.submit(a_request("a", list(range(9))))
    bench.step()
    nothing = dict.fromkeys(bench.engine.outstanding(), 0)
    assert bench.engine.outstanding() == nothing | {
        "requests": 1,
        "blocks": 3,
        "rows": 1,
        "slots": 1,
        "steps": 1,
    }
    bench.finish()
    assert bench.engine.outstanding() == nothing, "what only the prefix cache holds has been returned"


def test_an_abort_of_another_attempt_is_not_ours() -> None:
    bench = Bench()
    bench.submit(a_request("a", [1]))
    bench.engine.abort(RequestId("a"), 2)
    assert bench.engine.num_requests == 1


def test_an_ingress_that_is_gone_takes_its_requests_along() -> None:
    bench = Bench()
    bench.submit(a_request("stays", [1]))
    bench.engine.submit([a_request("goes", [2])], IngressId("ingress-2"))
    bench.step()
    bench.engine.abort_all(IngressId("ingress-2"))
    bench.finish()
    assert list(bench.finished) == ["stays"]
    assert bench.drained()


def test_state_slots_are_claimed_and_returned_with_blocks() -> None:
    bench = Bench(num_slots=3)
    for name in "abc":
        bench.submit(a_request(name, [1], max_tokens=2))
    bench.step()
    assert [s.slot for s in bench.runner.plans[-1].sequences] == [1, 2]
    bench.finish()
    assert bench.pools.slots is not None and bench.pools.slots.num_free == 2


def test_63_a_step_that_fails_ends_its_requests_with_an_error_and_nothing_leaks() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(a_request("in the step", [1]))
    bench.submit(a_request("not yet", [2]))
    bench.runner.failures = 1
    bench.finish()
    error = bench.errors["in the step"]
    assert error.kind is ErrorKind.INTERNAL
    assert "kernel" not in error.message, "internals are for the log"
    assert bench.tokens["not yet"] == generate([2], 3)
    assert bench.drained()


def test_an_engine_that_fails_every_step_does_not_go_on_swallowing_requests() -> None:
    bench = Bench()
    bench.runner.failures = MAX_FAILED_STEPS
    for i in range(MAX_FAILED_STEPS - 1):
        bench.submit(a_request(str(i), [1], max_tokens=1))
        bench.finish()
    assert list(bench.errors) == ["0", "1"]
    bench.submit(a_request("last", [1]))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        bench.finish()


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        SchedulerConfig(max_num_seqs=0, max_num_batched_tokens=1, max_model_len=2, vocab_size=1)
    with pytest.raises(ValueError, match="a full decode step would not fit"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=2, vocab_size=1)
