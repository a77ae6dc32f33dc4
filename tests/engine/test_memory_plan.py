"""Weights, step, state, then blocks; and a refusal that shows the numbers."""

import pytest

from shoal.actors.engine.memory_plan import MemoryPlan, NotEnoughMemory, num_state_slots, plan_memory

MIB = 1 << 20


def a_plan(**changes: int) -> MemoryPlan:
    numbers = {
        "total_bytes": 1000 * MIB,
        "weights_bytes": 300 * MIB,
        "step_peak_bytes": 100 * MIB,
        "state_bytes_per_slot": 0,
        "block_bytes": 5 * MIB,
        "block_size": 128,
        "segment_bytes": 0,
        "max_num_seqs": 64,
        "max_model_len": 8192,
    }
    return plan_memory(**{**numbers, **changes})


def test_blocks_take_what_is_left() -> None:
    plan = a_plan()
    assert plan.num_blocks == 120
    assert plan.num_tokens == 119 * 128, "block 0 is never issued"
    assert plan.describe() == (
        "memory 1000MiB = weights 300MiB + step 100MiB + state 0B + 120 blocks of 5MiB (15,232 tokens)"
    )


def test_state_comes_before_blocks_and_is_doubled_for_its_staging() -> None:
    assert num_state_slots(10) == 12 + 1, "floor(1.2 * 10) usable, and slot 0"
    plan = a_plan(state_bytes_per_slot=5 * MIB, max_num_seqs=10)
    assert plan.state_bytes == 2 * 13 * 5 * MIB
    assert plan.num_slots == 13
    assert plan.num_blocks == 120 - 26


def test_segments_have_as_many_bytes_as_blocks() -> None:
    plan = a_plan(segment_bytes=10 * MIB, max_model_len=1024)
    assert (plan.num_blocks, plan.num_segments) == (60, 30)
    assert plan.describe().endswith("+ 60 blocks of 5MiB (7,552 tokens) + 30 segments of 10MiB")


def test_but_no_block_has_two_of_them() -> None:
    plan = a_plan(segment_bytes=MIB, max_model_len=1024)
    assert (plan.num_blocks, plan.num_segments) == (100, 100)


def test_and_a_sequence_of_the_greatest_length_comes_first() -> None:
    plan = a_plan(segment_bytes=10 * MIB, max_model_len=110 * 128)
    assert (plan.num_blocks, plan.num_segments) == (112, 4)


def test_blocks_without_bytes_are_as_many_as_can_be_of_use() -> None:
    plan = a_plan(block_bytes=0, segment_bytes=MIB, state_bytes_per_slot=MIB, max_num_seqs=10)
    assert plan.num_segments == 600 - 26
    assert plan.num_blocks == 2 * 10 * 64 + 1
    assert a_plan(block_bytes=0, segment_bytes=MIB, max_num_seqs=1).num_blocks == 600, "a segment each"


def test_state_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as refusal:
        a_plan(block_bytes=0, segment_bytes=MIB, state_bytes_per_slot=10 * MIB)
    assert str(refusal.value) == (
        "not enough memory: one sequence of max_model_len 8192 needs its state; of 1000MiB, after weights "
        "300MiB, step 100MiB and state 1.5GiB, 0B is left. Give --memory at least 1.9GiB, or lower "
        "--max-num-seqs."
    )


def test_prefixes_may_fill_what_sequences_cannot() -> None:
    assert a_plan(max_num_seqs=1, max_model_len=1000).num_blocks == 120


def test_82_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as refusal:
        a_plan(total_bytes=500 * MIB)
    assert str(refusal.value) == (
        "not enough memory: one sequence of max_model_len 8192 needs 64 KV blocks of 5MiB and one spare; "
        "of 500MiB, after weights 300MiB, step 100MiB and state 0B, 100MiB is left, which is 20 blocks. "
        "Give --memory at least 725MiB, or lower --max-model-len to 2432."
    )
    a_plan(total_bytes=725 * MIB)
    a_plan(total_bytes=500 * MIB, max_model_len=2432)


def test_weights_alone_may_be_too_much() -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"0B is left, which is 0 blocks. Give --memory at least 725MiB\."
    ):
        a_plan(total_bytes=200 * MIB)
