"""Prefixes of a model with sliding layers: where they are taken up, and which segments that needs."""

import random

import pytest

from shoal.actors.engine.step import SequenceStep
from shoal.actors.messages import RequestId
from shoal.kvstore.boundary import BoundaryRule
from tests.engine.bench import Bench, a_request
from tests.fake_runner import generate

PROMPT = list(range(100, 126))
"""Six blocks of four tokens and a half."""


def steps_of(bench: Bench, sequence: int) -> list[SequenceStep]:
    return [s for plan in bench.runner.plans for s in plan.sequences if s.sequence_id == sequence]


def segments_of(bench: Bench, prompt: list[int]) -> list[int]:
    """The blocks of a prompt whose segments are cached."""
    segments = bench.pools.prefix_cache.segments
    return [i for i, key in enumerate(bench.keys(prompt)) if key in segments]


@pytest.mark.parametrize(
    ("window", "num_dropped", "rule"),
    [
        (1, 2, BoundaryRule()),
        (2, 0, BoundaryRule(num_segments=1)),
        (5, 0, BoundaryRule(num_segments=1)),
        (6, 0, BoundaryRule(num_segments=2)),
        (9, 0, BoundaryRule(num_segments=2)),
        (4, 1, BoundaryRule(num_segments=1, num_recomputed=1)),
        (4, 2, BoundaryRule(num_segments=1, num_recomputed=2)),
        (6, 2, BoundaryRule(num_segments=2, num_recomputed=3)),
    ],
)
def test_19_however_much_of_a_prompt_is_cached_the_answer_is_the_same(
    window: int, num_dropped: int, rule: BoundaryRule
) -> None:
    for cut in range(1, len(PROMPT) + 1):
        bench = Bench(window=window, num_dropped=num_dropped, num_blocks=40)
        assert bench.rule == rule
        bench.serve("before", PROMPT[:cut])
        cached = bench.serve("whole", PROMPT, max_tokens=3)
        assert cached == 4 * max(0, cut // 4 - rule.num_recomputed), f"{cut} tokens computed before"
        assert bench.drained()


@pytest.mark.parametrize(
    ("num_dropped", "too_little"),
    [(0, BoundaryRule(num_segments=1)), (2, BoundaryRule(num_segments=2, num_recomputed=2))],
)
def test_a_rule_that_needs_less_than_the_layers_do_gives_wrong_tokens(
    num_dropped: int, too_little: BoundaryRule
) -> None:
    """So none of these tests would pass with state that is not all there: two segments, three blocks."""
    bench = Bench(window=6, num_dropped=num_dropped, num_blocks=40, rule=too_little)
    bench.serve("before", PROMPT)
    with pytest.raises(AssertionError, match="whatever was cached"):
        bench.serve("again", PROMPT, max_tokens=3)


def test_18_a_hit_does_not_read_what_another_sequence_left_in_its_slot() -> None:
    bench = Bench(window=6, num_blocks=60, num_segments=60)
    bench.serve("cold", PROMPT, max_tokens=4)
    assert bench.serve("again", PROMPT, max_tokens=4) == 24
    for name in "abcdefgh":
        bench.submit(a_request(name, [ord(name)] * 9, max_tokens=4))
    bench.finish()
    assert {s.slot for s in steps_of(bench, 3)} < {
        s.slot for plan in bench.runner.plans for s in plan.sequences
    }
    assert bench.serve("after others", PROMPT, max_tokens=4) == 24


def test_21_the_second_to_come_hits_be_it_only_what_it_shares() -> None:
    bench = Bench(window=6, num_blocks=40)
    bench.serve("first", PROMPT)
    assert bench.serve("second", PROMPT) == 24
    assert bench.serve("another tail", [*PROMPT[:14], 1, 2, 3, 4, 5]) == 12


def test_a_turn_begins_where_the_one_before_it_ended() -> None:
    bench = Bench(window=6, num_blocks=40)
    bench.serve("turn 1", PROMPT, max_tokens=8)
    longer = [*PROMPT, *bench.tokens["turn 1"], 1, 2, 3]
    assert bench.serve("turn 2", longer) == 32, "of 34 tokens, the last of which was never computed"


def test_a_plan_says_what_to_restore_and_what_to_capture() -> None:
    bench = Bench(window=6, num_dropped=1, num_blocks=40, max_num_batched_tokens=11)
    bench.serve("first", PROMPT, max_tokens=2)
    assert [[boundary for boundary, _ in s.captures] for s in steps_of(bench, 1)] == [
        [4, 8],
        [12, 16, 20],
        [24],
        [],
    ]
    captured = {b: segment for s in steps_of(bench, 1) for b, segment in s.captures}
    bench.serve("second", PROMPT, max_tokens=2)
    first, second = steps_of(bench, 2)
    assert (first.start, first.valid_from, first.store_from) == (16, 16, 24)
    assert first.restore == (captured[12], captured[16])
    assert first.captures == (), "all are there"
    assert (second.restore, second.valid_from, second.store_from) == ((), 16, 24)


def test_tokens_before_a_boundary_are_computed_again_and_not_written_again() -> None:
    """As many as state is made of that no segment has; then the state before them is what is restored."""
    rule = BoundaryRule(num_segments=2, num_rewound=2)
    bench = Bench(window=6, num_blocks=40, rule=rule, max_num_batched_tokens=3, max_num_seqs=2)
    bench.serve("first", PROMPT, max_tokens=2)
    segments = bench.pools.prefix_cache.segments
    for key in bench.keys(PROMPT)[4:6]:
        segments.detach(key)
    captured = {b: segment for s in steps_of(bench, 1) for b, segment in s.captures}
    assert bench.serve("again", PROMPT, max_tokens=2) == 16 - 2, "these two are not counted as cached"
    first, second, *_ = steps_of(bench, 2)
    assert (first.start, first.end, first.valid_from, first.store_from) == (14, 17, 14, 16)
    assert first.restore == (captured[12], captured[16])
    assert (first.captures, second.captures[0][0]) == ((), 20), "the state at 16 is there"
    assert bench.drained()


@pytest.mark.parametrize("num_dropped", [0, 1])
def test_19_rewound_by_some_tokens_the_answer_is_the_same(num_dropped: int) -> None:
    for cut in range(1, len(PROMPT) + 1):
        rule = BoundaryRule(num_segments=2, num_recomputed=2 * num_dropped, num_rewound=3)
        bench = Bench(window=6, num_blocks=40, num_dropped=num_dropped, rule=rule)
        bench.serve("before", PROMPT[:cut])
        start = 4 * max(0, cut // 4 - rule.num_recomputed)
        assert bench.serve("whole", PROMPT, max_tokens=3) == max(0, start - 3)
        assert bench.drained()


def test_state_that_is_missing_before_a_boundary_is_captured_on_the_way_to_it() -> None:
    """The blocks between where computing goes on and the boundary are cached, and their rows not written."""
    bench = Bench(window=4, num_dropped=2, num_blocks=40)
    bench.serve("first", PROMPT[:17])
    segments = bench.pools.prefix_cache.segments
    for key in bench.keys(PROMPT)[2:4]:
        segments.detach(key)
    assert segments_of(bench, PROMPT) == [0, 1]
    assert bench.serve("longer", PROMPT) == 8
    assert segments_of(bench, PROMPT) == [0, 1, 2, 3, 4, 5]


def test_without_segments_nothing_hits_and_all_is_right() -> None:
    bench = Bench(window=6, num_blocks=40, num_segments=0)
    assert [bench.serve(name, PROMPT, max_tokens=5) for name in "ab"] == [0, 0]
    assert bench.drained()


def test_a_single_segment_goes_to_the_end_of_the_prompt_then_to_that_of_the_turn() -> None:
    bench = Bench(window=4, num_blocks=40, num_segments=2, max_num_batched_tokens=64)
    bench.serve("short", PROMPT, max_tokens=2)
    assert segments_of(bench, PROMPT) == [5]
    assert bench.serve("again", PROMPT, max_tokens=7) == 24
    longer = [*PROMPT, *bench.tokens["again"], 1]
    assert segments_of(bench, longer) == [7]
    assert bench.serve("turn 2", longer) == 32
    assert bench.drained()


def test_if_a_step_comes_past_more_boundaries_than_it_can_capture_it_captures_the_last() -> None:
    bench = Bench(window=9, num_blocks=40, num_segments=4, max_num_batched_tokens=64)
    bench.serve("it", PROMPT)
    assert segments_of(bench, PROMPT) == [3, 4, 5]


def test_where_prompts_part_is_kept_longer_than_what_lies_between() -> None:
    bench = Bench(window=4, num_blocks=60, num_segments=14)
    bench.serve("first", PROMPT)  # takes 6 segments
    bench.serve("parts after three blocks", [*PROMPT[:13], *range(10)])  # 2 more, as block 2's is there
    assert segments_of(bench, PROMPT) == [0, 1, 2, 3, 4, 5]
    bench.serve("another", list(range(200, 246)))  # 11, of which 5 are free
    assert segments_of(bench, PROMPT) == [2, 5], "where they part, and where the first ends"
    assert bench.serve("parts there again", [*PROMPT[:13], 7, 8, 9]) == 12


def test_a_block_that_is_evicted_takes_its_segment_along() -> None:
    bench = Bench(window=4, num_blocks=8, num_segments=30)
    bench.serve("a", list(range(16)))
    assert bench.pools.segments.num_free == 29 - 4
    bench.serve("b", list(range(50, 66)))
    assert segments_of(bench, list(range(16))) == [0, 1, 2]
    assert bench.pools.segments.num_free == 29 - 3 - 4
    keys = set(bench.engine.prefix_keys())
    assert len(keys) == 14, "seven blocks and their segments are reported"
    bench.engine.take_prefix_changes()
    bench.serve("c", list(range(80, 96)))
    changes = bench.engine.take_prefix_changes()
    assert len(changes.removed) == 8 and (keys - set(changes.removed)) | set(changes.stored) == set(
        bench.engine.prefix_keys()
    )


def test_of_two_that_capture_the_same_state_at_once_one_segment_stays() -> None:
    bench = Bench(window=4, num_blocks=40, max_num_batched_tokens=64)
    bench.submit(a_request("a", PROMPT, max_tokens=2))
    bench.submit(a_request("b", PROMPT, max_tokens=2, prompt_logprobs=0))  # needs every row
    bench.step()
    assert bench.pools.segments.num_free == 19 - 12
    bench.finish()
    assert bench.pools.segments.num_free == 19 - 6
    assert bench.tokens["a"] == bench.tokens["b"] == generate(PROMPT, 2)
    assert bench.drained()


def test_41_who_was_preempted_resumes_from_the_furthest_state_that_is_cached() -> None:
    """Two requests of 34 and 35 tokens, and seven blocks of 16."""
    bench = Bench(window=10, block_size=16, num_blocks=8, max_num_batched_tokens=64, max_num_seqs=2)
    prompts = {"elder": list(range(34)), "younger": list(range(100, 135))}
    for name, prompt in prompts.items():
        bench.submit(a_request(name, prompt, max_tokens=30))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    starts = [s.start for s in steps_of(bench, 2) if s.known_tokens]
    assert starts[0] == 0 and starts[1] >= 16
    for name, prompt in prompts.items():
        assert bench.tokens[name] == generate(prompt, 30)
    assert bench.drained()


def test_79_another_salt_takes_up_no_state() -> None:
    bench = Bench(window=6, num_blocks=40)
    assert [bench.serve(f"{salt}{i}", PROMPT, cache_salt=salt) for salt in "ab" for i in range(2)] == [
        0,
        24,
        0,
        24,
    ]


def test_prompt_logprobs_hit_nothing_and_what_is_resumed_owes_the_rest() -> None:
    bench = Bench(window=6, num_blocks=40)
    bench.serve("before", PROMPT)
    assert bench.serve("all rows", PROMPT, prompt_logprobs=0) == 0
    assert len(bench.prompt_logprobs["all rows"]) == len(PROMPT) - 1
    assert bench.serve("after", PROMPT) == 24


def test_a_reset_gives_segments_back_and_nothing_is_captured_for_what_ran() -> None:
    bench = Bench(window=6, num_blocks=40, max_num_batched_tokens=8)
    bench.submit(a_request("it", PROMPT, max_tokens=20))
    for _ in range(3):
        bench.step()
    bench.engine.reset_prefix_cache()
    bench.engine.check()
    bench.step()
    assert bench.pools.segments.num_free == 19, "the step in flight, which captured some, has finished"
    bench.finish()
    assert bench.pools.segments.num_free == 19
    assert bench.tokens["it"] == generate(PROMPT, 20)
    assert bench.serve("again", PROMPT) == 0


def test_what_is_aborted_while_its_state_is_restored_gives_the_segments_back_after_that_step() -> None:
    bench = Bench(window=6, num_blocks=40, num_segments=7)
    bench.serve("before", PROMPT)
    bench.submit(a_request("it", PROMPT))
    bench.step()
    segments = bench.pools.prefix_cache.segments
    assert segments.num_evictable == 6 - 2, "blocks 4 and 5 are being restored"
    bench.engine.abort(RequestId("it"), 1)
    bench.engine.check()
    assert segments.num_evictable == 6 - 2
    bench.step()
    assert segments.num_evictable == 6
    assert bench.drained()


def test_28_29_prompts_that_overlap_in_a_tiny_pool_lose_and_count_nothing_twice() -> None:
    """Each step checks every owner; at rest every block, slot and segment is free or evictable, and once."""
    bench = Bench(window=6, num_blocks=26, num_segments=7, max_num_seqs=3)
    choose = random.Random(28)
    for i in range(500):
        shared, own = choose.randrange(len(PROMPT)), choose.randrange(1, 6)
        bench.submit(a_request(f"{i}", [*PROMPT[:shared], *([choose.randrange(3, 50)] * own)], max_tokens=3))
        for _ in range(choose.randrange(3)):
            bench.step()
        if choose.random() < 0.1:
            bench.engine.abort(RequestId(f"{choose.randrange(i + 1)}"), 1)
        if i % 50 == 49:
            bench.finish()
            pools = bench.pools
            assert pools.num_available == pools.blocks.num_usable
            assert pools.num_available_segments == pools.segments.num_usable
            assert pools.slots is not None and pools.slots.num_free == pools.slots.num_usable
    assert bench.drained()


def test_a_whole_state_is_kept_where_somebody_is_likely_to_come_back() -> None:
    """The last row is all the state that there is, and so one segment is enough."""
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=0)
    assert bench.rule == BoundaryRule(num_segments=1)
    bench.serve("first", PROMPT)
    assert segments_of(bench, PROMPT) == [5], "where the prompt ends"
    assert bench.serve("again", PROMPT) == 24
    assert bench.serve("parts after three blocks", [*PROMPT[:13], 1, 2]) == 0
    assert segments_of(bench, PROMPT) == [2, 5]
    assert bench.serve("parts there again", [*PROMPT[:13], 3, 4]) == 12


def test_a_whole_state_is_kept_at_every_so_manieth_boundary() -> None:
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=2)
    bench.serve("first", [*PROMPT, *PROMPT])
    assert segments_of(bench, [*PROMPT, *PROMPT]) == [1, 3, 5, 7, 9, 11, 12], "and where the turn ends"
    assert bench.serve("parts after three blocks", [*PROMPT[:13], 1, 2]) == 8


def test_of_the_states_that_an_output_comes_past_the_last_remains() -> None:
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=0)
    bench.serve("turn 1", PROMPT, max_tokens=15)
    longer = [*PROMPT, *bench.tokens["turn 1"], 1, 2, 3]
    assert segments_of(bench, longer) == [5, 9], "of blocks 6 to 9, which the output filled"
    assert bench.serve("turn 2", longer) == 40, "of 41 tokens that were computed"
    assert bench.drained()


def test_the_state_behind_a_prompt_that_fills_its_last_block_is_kept_for_who_goes_on() -> None:
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=0)
    bench.serve("turn 1", PROMPT[:24], max_tokens=3)
    assert bench.serve("again", PROMPT[:24]) == 20, "its last token is computed for the next"
    assert bench.serve("turn 2", [*PROMPT[:24], *bench.tokens["turn 1"], 1]) == 24
    assert bench.drained()


def test_41_who_is_preempted_goes_on_from_the_last_state_of_its_output() -> None:
    bench = Bench(
        window=2, block_size=16, num_blocks=8, max_num_batched_tokens=64, max_num_seqs=2, snapshot_every=0
    )
    for name, prompt in (("elder", list(range(34))), ("younger", list(range(100, 135)))):
        bench.submit(a_request(name, prompt, max_tokens=30))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    starts = [s.start for s in steps_of(bench, 2) if s.known_tokens]
    assert starts[1] >= 32
    assert bench.tokens["younger"] == generate(list(range(100, 135)), 30)
    assert bench.drained()


def test_of_many_that_share_a_prefix_and_come_together_two_compute_it() -> None:
    """The first knows of no parting. The second has its state captured, and the others wait for that."""
    bench = Bench(
        window=2,
        num_blocks=60,
        num_segments=60,
        max_num_seqs=5,
        max_num_batched_tokens=100,
        snapshot_every=0,
    )
    for i in range(5):
        bench.submit(a_request(f"{i}", [*PROMPT[:20], 7 + i, *PROMPT[:8]], max_tokens=2))
    bench.finish()
    assert [bench.cached[f"{i}"] for i in range(5)] == [0, 0, 20, 20, 20]
    assert bench.drained()


def test_what_is_computed_of_an_output_again_keeps_one_state_of_it() -> None:
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=0, max_num_batched_tokens=64)
    bench.submit(a_request("it", PROMPT, max_tokens=20))
    while len(bench.tokens["it"]) < 15:
        bench.step()
    (sequence,) = bench.scheduler._running
    bench.engine.reset_prefix_cache()
    bench.scheduler._preempt(sequence)
    bench.finish()
    again = next(s for s in steps_of(bench, 1)[1:] if s.start == 0)
    assert [boundary for boundary, _ in again.captures] == [24, again.end // 4 * 4]
    assert bench.tokens["it"] == generate(PROMPT, 20)
    assert bench.drained()


def test_25_blocks_whose_state_is_gone_give_a_shorter_hit() -> None:
    bench = Bench(window=2, num_blocks=60, num_segments=60, snapshot_every=2)
    bench.serve("first", PROMPT)
    assert segments_of(bench, PROMPT) == [1, 3, 5]
    bench.pools.prefix_cache.segments.detach(bench.keys(PROMPT)[5])
    assert bench.serve("again", PROMPT) == 16
    for key in bench.keys(PROMPT):
        bench.pools.prefix_cache.segments.detach(key)
    assert bench.serve("and again", PROMPT) == 0
