"""Drafts in the plan: who is left out of a step for them, what is reserved, kept and given back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.engine.drafts import PromptLookupDrafts
from shoal.actors.engine.sequence import Sequence
from shoal.actors.engine.step import Drawn, SequenceId, SequenceStep
from shoal.actors.messages import DraftCounts, FinishReason, RequestId
from shoal.kvstore.block_hash import root_key
from tests.engine.bench import INGRESS, Bench, a_request, benches
from tests.fake_drafts import FakeDrafts
from tests.fake_runner import generate, logprob

PROMPT = [5, 6, 7, 8, 9]


def a_bench(right: float = 1.0, *, most: int = 3, **more: object) -> Bench:
    drafts = FakeDrafts(most, right=right)
    return Bench(drafts=drafts, num_draft_tokens=most, **more)  # type: ignore[arg-type]


def test_tokens_count_up_to_the_first_that_differs_from_its_draft() -> None:
    step = SequenceStep(sequence_id=SequenceId(1), row=1, start=4, end=7, block_table=(), drafts=(11, 12))
    for drawn, num_accepted in (((11, 12, 13), 3), ((11, 9, 13), 2), ((9, 12, 13), 1)):
        tokens = tuple(Drawn(token_id=token) for token in drawn)
        assert step.accepted(tokens) == tokens[:num_accepted]


def test_a_step_verifies_drafts_and_nothing_is_planned_behind_it() -> None:
    bench = a_bench()
    bench.submit(a_request("a", PROMPT, max_tokens=9))
    assert bench.step() == [(0, 5)]
    assert bench.step() == [], "its token is waited for"
    assert bench.step() == [(5, 4)], "that token, and three drafts"
    assert bench.tokens["a"] == generate(PROMPT, 1)
    assert bench.step() == [], "it is not known how far it comes"
    assert bench.tokens["a"] == generate(PROMPT, 5)
    assert bench.step() == [(9, 4)]
    bench.finish()
    assert bench.tokens["a"] == generate(PROMPT, 9)
    assert bench.scheduler.draft_counts() == DraftCounts(num_drafts=2, num_tokens=6, num_accepted=6)
    assert bench.drained()


def test_wrong_drafts_cost_rows_and_change_nothing() -> None:
    bench = a_bench(right=0.0)
    bench.submit(a_request("a", PROMPT, max_tokens=4))
    steps = [bench.step() for _ in range(8)]
    assert [step for step in steps if step] == [[(0, 5)], [(5, 3)], [(6, 2)], [(7, 1)]]
    assert bench.tokens["a"] == generate(PROMPT, 4)
    assert bench.scheduler.draft_counts() == DraftCounts(num_drafts=2, num_tokens=3)
    assert bench.drained()


class Only(FakeDrafts):
    def wait(self, sequence: Sequence, *, num_running: int) -> bool:
        return sequence.request.request_id == "drafts"


def test_who_has_nothing_to_draft_runs_ahead_beside_one_that_has() -> None:
    bench = Bench(drafts=Only(most=3))
    bench.submit(a_request("drafts", PROMPT, max_tokens=9))
    bench.submit(a_request("plain", [1, 2], max_tokens=6))
    assert bench.step() == [(0, 5), (0, 2)]
    assert bench.step() == [(2, 1)]
    assert bench.step() == [(5, 4), (3, 1)]
    assert bench.step() == [(4, 1)]
    assert bench.step() == [(9, 4), (5, 1)]
    bench.finish()
    assert bench.tokens["drafts"] == generate(PROMPT, 9)
    assert bench.tokens["plain"] == generate([1, 2], 6)


def test_positions_for_drafts_are_reserved_and_given_back() -> None:
    bench = a_bench(right=0.0, most=5)
    bench.submit(a_request("a", list(range(7)), max_tokens=8))
    bench.step()
    assert bench.pools.blocks.num_free == 19 - 2
    bench.step()
    bench.step()
    assert bench.pools.blocks.num_free == 19 - 4, "8 tokens and 5 drafts"
    bench.step()
    assert bench.pools.blocks.num_free == 19 - 3, "9 tokens"
    bench.finish()
    assert bench.drained()


def test_nobody_is_preempted_for_drafts() -> None:
    bench = a_bench(right=0.0, most=9, num_blocks=5, cache="naive")
    bench.submit(a_request("a", [1, 2, 3], max_tokens=5))
    bench.submit(a_request("b", [4, 5, 6], max_tokens=5))
    bench.finish()
    assert bench.scheduler.num_preemptions == 0
    assert bench.tokens["a"] == generate([1, 2, 3], 5) and bench.tokens["b"] == generate([4, 5, 6], 5)


def test_nobody_is_preempted_while_blocks_for_drafts_are_about_to_come_back() -> None:
    """Four blocks are enough for both, but for the one that holds nothing but wrong drafts."""
    bench = Bench(drafts=Only(most=4, right=0.0), num_draft_tokens=4, num_blocks=5, cache="naive")
    bench.submit(a_request("drafts", [1], max_tokens=6))
    bench.submit(a_request("plain", [4, 5, 6, 7], max_tokens=6))
    bench.finish()
    assert bench.scheduler.draft_counts().num_tokens > 0
    assert bench.scheduler.num_preemptions == 0
    assert bench.tokens["plain"] == generate([4, 5, 6, 7], 6)


def test_drafts_leave_a_row_of_the_budget_for_each_that_may_run() -> None:
    bench = a_bench(most=9, max_num_batched_tokens=6)
    for name in "ab":
        bench.submit(a_request(name, [ord(name), 2], max_tokens=20))
    bench.finish()
    assert max(plan.num_drafts for plan in bench.runner.plans) == 6 - 4
    assert max(plan.num_tokens for plan in bench.runner.plans) == 4
    for name in "ab":
        assert bench.tokens[name] == generate([ord(name), 2], 20)


def test_a_stop_token_among_the_drafts_ends_the_sequence_there() -> None:
    expected = generate(PROMPT, 9)
    bench = a_bench(most=6)
    bench.submit(a_request("a", PROMPT, max_tokens=9, stop_token_ids=frozenset({expected[3]}), logprobs=0))
    bench.finish()
    assert bench.tokens["a"] == expected[:4]
    assert bench.finished["a"] is FinishReason.STOP
    assert bench.scheduler.draft_counts(INGRESS).num_accepted == 2, "of which the answer was longer"
    keys = bench.keys([*PROMPT, *expected])
    assert bench.engine.prefix_keys() == tuple(keys[:2]), "eight rows are of what was said"
    assert bench.drained()


def test_logprobs_are_of_the_tokens_that_count() -> None:
    said = []
    bench = a_bench(right=0.5)
    bench.engine.submit([a_request("a", PROMPT, max_tokens=12, logprobs=0)], INGRESS)
    while bench.engine.has_work:
        for reply in bench.engine.step():
            said += list(zip(reply.chunk.token_ids, reply.chunk.logprobs, strict=True))
    assert said == [(token, logprob(token)) for token in generate(PROMPT, 12)]


def test_no_more_is_drafted_than_may_be_drawn() -> None:
    bench = a_bench(most=9, max_model_len=12)
    bench.submit(a_request("a", PROMPT, max_tokens=7))
    bench.finish()
    assert bench.tokens["a"] == generate(PROMPT, 7)
    ends = [step.end for plan in bench.runner.plans for step in plan.sequences]
    assert max(ends) == 11, "the last row's token is at position 11"


def test_preempted_while_its_drafts_are_verified_it_keeps_what_was_right() -> None:
    bench = a_bench(eager=False)
    bench.submit(a_request("a", PROMPT, max_tokens=9))
    for _ in range(3):
        bench.step()
    (sequence,) = bench.scheduler._running
    assert sequence.num_drafts == 3
    bench.scheduler._preempt(sequence)
    bench.engine.check()
    bench.step()
    assert bench.tokens["a"] == generate(PROMPT, 5)
    bench.finish()
    assert bench.tokens["a"] == generate(PROMPT, 9)
    assert bench.drained()


def test_aborted_while_its_drafts_are_verified_it_gives_all_back_behind_that_step() -> None:
    bench = a_bench(window=4)
    bench.submit(a_request("a", PROMPT, max_tokens=9))
    for _ in range(3):
        bench.step()
    bench.engine.abort(RequestId("a"), 1)
    bench.engine.check()
    assert bench.pools.blocks.num_free < bench.pools.blocks.num_usable
    bench.finish()
    assert bench.drained()


def test_a_boundary_that_only_wrong_drafts_came_past_is_not_cached_and_its_segment_not_lost() -> None:
    bench = a_bench(right=0.0, most=6, window=6, num_blocks=40)
    prompt = list(range(100, 106))
    bench.submit(a_request("a", prompt, max_tokens=8))
    for _ in range(3):
        bench.step()
    assert [boundary for boundary, _ in bench.runner.plans[-1].sequences[0].captures] == [8, 12]
    bench.step()
    assert len(bench.pools.prefix_cache.segments) == 1, "of the prompt's complete block"
    used = bench.pools.usage().segments["used"]
    for _ in range(4):
        bench.step()
        assert bench.pools.usage().segments["used"] <= used, "they are captured again, not anew"
    bench.finish()
    assert bench.tokens["a"] == generate(prompt, 8)
    assert bench.serve("again", [*prompt, *generate(prompt, 8)]) == 12
    assert bench.drained()


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=15), min_size=1, max_size=6),
    max_tokens=st.integers(1, 20),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    most=st.integers(1, 6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_whatever_is_drafted_everybody_gets_what_they_would_get_alone(
    *, prompts: list[list[int]], max_tokens: int, right: float, most: int, seed: int, data: st.DataObject
) -> None:
    drafts = FakeDrafts(most, right=right, waits=0.7, choose=random.Random(seed))
    bench = data.draw(benches(drafts=st.just(drafts), num_draft_tokens=st.just(most)))
    for i, prompt in enumerate(prompts):
        bench.submit(a_request(str(i), prompt, max_tokens))
    bench.finish()
    for i, prompt in enumerate(prompts):
        if str(i) not in bench.errors:
            assert bench.tokens[str(i)] == generate(prompt, max_tokens)
    assert bench.drained()


class TestPromptLookupDrafts:
    @staticmethod
    def sequence(tokens: list[int], max_tokens: int = 100) -> Sequence:
        return Sequence(
            sequence_id=SequenceId(1),
            request=a_request("a", tokens, max_tokens),
            reply_to=INGRESS,
            keys=[root_key(b"", "")],
        )

    def test_a_long_copy_is_drafted_as_far_as_allowed(self) -> None:
        sequence = self.sequence([*range(30), *range(12)])
        drafts = PromptLookupDrafts(5)
        assert drafts.propose(sequence, num_running=1, most=100) == (12, 13, 14, 15, 16)
        assert drafts.propose(sequence, num_running=1, most=2) == (12, 13)
        assert drafts.propose(sequence, num_running=1, most=0) == ()

    def test_a_token_in_flight_is_waited_for_if_what_may_follow_it_is_worth_that(self) -> None:
        assert PromptLookupDrafts(5).wait(self.sequence([*range(30), *range(12)]), num_running=1)
        assert not PromptLookupDrafts(5).wait(self.sequence(list(range(30))), num_running=1)

    def test_the_more_run_the_surer_a_draft_must_be(self) -> None:
        sequence = self.sequence([*range(30), *range(12)])
        num_drafts = [
            len(PromptLookupDrafts(5).propose(sequence, num_running=n, most=100)) for n in (1, 4, 64)
        ]
        assert num_drafts == sorted(num_drafts, reverse=True)
        assert num_drafts[0] == 5 and num_drafts[-1] == 0

    def test_who_is_never_right_drafts_no_more(self) -> None:
        sequence = self.sequence([*range(30), *range(12)])
        drafts = PromptLookupDrafts(5)
        num_drafted = 0
        for i in range(300):
            num_drafted += len(drafts.propose(sequence, num_running=1, most=100))
            sequence.append(1000 + i)  # not what came there
            sequence.tokens += range(8 + i % 3)
        assert num_drafted < 60

    def test_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="num_draft_tokens must be at least 1"):
            PromptLookupDrafts(0)
