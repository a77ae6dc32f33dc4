"""Rows in rings attend to the same bits as paged ones, and a ring can be taken up from its segments."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import Backend, LayerRing, Rows, Tape
from tests.kernels.helpers import BEST, REFERENCE, Paged, every_cpu, rows, same_bits
from tests.kernels.ringed import BLOCK, Chunk, Ringed, Step, chunks, part

DTYPES = (torch.float32, torch.bfloat16)
WINDOWS = (1, 2, 8, 17, 64, 200)
LENGTH = 330
EVERYWHERE: tuple[Backend, ...] = (*every_cpu(), REFERENCE)


def world(*lengths: int) -> Paged:
    return Paged(heads=6, kv_heads=2, head_size=16, lengths=lengths)


def whole(paged: Paged, window: int, sequence: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    which = [(sequence, p) for p in range(paged.lengths[sequence])]
    return paged.attend(which, paged.filled(32, dtype=dtype), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_of_any_size_attend_as_paged_rows_do(window: int, dtype: torch.dtype) -> None:
    paged = world(LENGTH)
    expected = whole(paged, window, dtype=dtype)
    for size in (1, 7, 64, 300):
        ringed = Ringed(paged, window, dtype=dtype)
        got = [ringed.step(Step(chunks=[chunk])) for chunk in chunks(LENGTH, size)]
        assert same_bits(torch.cat(got), expected), size


@pytest.mark.parametrize("window", [17, 200])
def test_threads_and_instruction_sets_change_no_bit(window: int) -> None:
    paged = world(LENGTH, 300)
    expected = torch.cat([whole(paged, window), whole(paged, window, 1)])
    steps = [[(0, 0, 290), (1, 0, 40)], [(1, 40, 299), (0, 290, 291)], [(0, 291, 330), (1, 299, 300)]]
    for backend in every_cpu():
        ringed = Ringed(paged, window)
        got = torch.empty_like(expected)
        for chunk in steps:
            step = Step(chunks=chunk)
            got[[s * LENGTH + p for s, p in step.which]] = ringed.step(step, backend)
        assert same_bits(got, expected), backend.name


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_batch_in_any_steps_attends_as_paged_rows_do(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [choose.randrange(1, 150) for _ in range(choose.randrange(1, 5))]
    window = choose.choice([1, 2, 5, 16, 17, 33, 64, 100])
    paged = world(*lengths)
    ringed = Ringed(paged, window, most=600, spare=1 if window == 1 else choose.choice([0, 1, 6]))
    expected = [whole(paged, window, s) for s in range(len(lengths))]
    done = [0] * len(lengths)
    while done != lengths:
        batch: list[Chunk] = []
        for s in choose.sample(range(len(lengths)), len(lengths)):
            end = min(lengths[s], done[s] + choose.choice([0, 1, 1, 20, 80]))
            if end > done[s]:
                batch.append((s, done[s], end))
                done[s] = end
        if batch:
            step = Step(chunks=batch)
            got = ringed.step(step)
            assert same_bits(got, torch.stack([expected[s][p] for s, p in step.which]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_boundary_can_be_taken_up_from_its_segments(window: int, dtype: torch.dtype) -> None:
    """Segments are captured in chunks that begin and end anywhere, and several of them in one step."""
    paged = world(LENGTH)
    expected = whole(paged, window, dtype=dtype)
    ringed = Ringed(paged, window, dtype=dtype)
    for start, end in ((0, 5), (5, 33), (33, 34), (34, 170), (170, 288), (288, LENGTH)):
        captures = [(0, b, b // BLOCK) for b in range(BLOCK, end + 1, BLOCK) if b > start]
        ringed.step(Step(chunks=[(0, start, end)], captures=captures))
    segments_needed = -(-(window - 1) // BLOCK)
    for boundary in range(0, LENGTH - 32, BLOCK):
        ringed.forget()
        last = boundary // BLOCK
        restores = [(0, i * BLOCK, i) for i in range(max(1, last - segments_needed + 1), last + 1)]
        steps = [Step(chunks=[chunk]) for chunk in chunks(boundary + 32, 31, start=boundary)]
        steps[0] = replace(steps[0], restores=restores)
        got = torch.cat([ringed.step(step) for step in steps])
        assert same_bits(got, expected[boundary : boundary + 32]), boundary


def test_a_segment_holds_a_blocks_last_rows_as_the_ring_does() -> None:
    paged = world(100, 70)
    for window in (9, 40):
        ringed = Ringed(paged, window, dtype=torch.bfloat16)
        ringed.step(Step(chunks=[(1, 0, 60), (0, 0, 30)], captures=[(1, 48, 7)]))
        ringed.step(Step(chunks=[(1, 60, 61), (0, 30, 70)], captures=[(0, 64, 3), (0, 32, 9)]))
        segments = ringed.ring.segments
        assert segments is not None
        for sequence, boundary, segment in ((1, 48, 7), (0, 64, 3), (0, 32, 9)):
            count = min(BLOCK, window - 1)
            _, k, v = paged.fused([(sequence, p) for p in range(boundary - count, boundary)])
            assert same_bits(segments.k_PBHD[segment], k.bfloat16())
            assert same_bits(segments.v_PBHD[segment], v.bfloat16())
        written = segments.k_PBHD.isfinite().all(-1).all(-1).all(-1).nonzero().flatten().tolist()
        assert written == [3, 7, 9], "and no other segment is touched"


def test_positions_before_valid_from_are_not_seen_by_a_layer_that_is_not_stored() -> None:
    window, valid_from = 50, 128
    paged = world(200, 40)
    steps = [
        Step(chunks=[(0, 128, 129), (1, 0, 40)], valid_from={0: valid_from}),
        Step(chunks=[(0, 129, 140)], valid_from={0: valid_from}),
        Step(chunks=[(0, 140, 200)], valid_from={0: valid_from}),
    ]
    full, exact = valid_from + window - 1, paged.exact(0, window=window)
    _, _, v = paged.fused([(0, valid_from)])
    for backend in EVERYWHERE:
        ringed = Ringed(paged, window, num_segments=None)
        first, *others = [ringed.step(step, backend) for step in steps]
        got = torch.cat([first[:1], *others])
        torch.testing.assert_close(got[window - 1 :].double(), exact[full:], rtol=0, atol=3e-6)
        before = got[: window - 1].double() - exact[valid_from:full]
        assert (before.abs().amax((1, 2)) > 1e-3).all(), "nothing was hidden"
        assert same_bits(got[0], v[0].repeat_interleave(3, dim=0)), "the first sees itself alone"


def test_a_stored_layer_sees_what_is_before_valid_from() -> None:
    paged = world(100)
    ringed = Ringed(paged, 20)
    ringed.step(Step(chunks=[(0, 0, 60)]))
    got = ringed.step(Step(chunks=[(0, 60, 100)], valid_from={0: 60}))
    assert same_bits(got, whole(paged, 20)[60:])


def test_rows_before_store_from_stay_as_they_are() -> None:
    paged = world(40, 30)
    which = [(0, p) for p in range(10, 40)] + [(1, p) for p in range(30)]
    for backend in EVERYWHERE:
        kv, table_SN = paged.pool(16)
        _, k, v = paged.fused(which)
        where = replace(rows(which, table_SN), store_from_S=torch.tensor([32, 0], dtype=torch.int32))
        backend.store(k, v, kv, where)
        for (s, p), key, value in zip(which, k, v, strict=True):
            block = int(table_SN[s, p // 16])
            if s == 0 and p < 32:
                assert kv.k_PBHD[block, p % 16].isnan().all() and kv.v_PBHD[block, p % 16].isnan().all()
            else:
                assert same_bits(kv.k_PBHD[block, p % 16], key)
                assert same_bits(kv.v_PBHD[block, p % 16], value)


def test_the_reference_agrees() -> None:
    paged = world(120, 90)
    ours, theirs = (Ringed(paged, 33, dtype=torch.bfloat16) for _ in range(2))
    for step in (
        Step(chunks=[(0, 0, 50), (1, 0, 20)], captures=[(0, 48, 1), (0, 32, 2), (1, 16, 3)]),
        Step(chunks=[(1, 20, 90), (0, 50, 51)], captures=[(1, 32, 4)]),
        Step(chunks=[(0, 48, 120)], restores=[(0, 48, 1), (0, 32, 2)]),
    ):
        torch.testing.assert_close(ours.step(step), theirs.step(step, REFERENCE), rtol=0, atol=3e-6)
    for a, b in zip(memory(ours.ring), memory(theirs.ring), strict=True):
        assert same_bits(a, b)


def memory(ring: LayerRing) -> list[Tensor]:
    parts = [ring.slots, ring.own, *([ring.segments] if ring.segments else [])]
    return [x for kv in parts for x in (kv.k_PBHD, kv.v_PBHD)]


def test_a_tape_takes_its_slots_and_segments_from_each_step() -> None:
    paged = world(64, 40)
    ringed, taped = Ringed(paged, 24, most=64), Ringed(paged, 24, most=64)
    q, k, v = (torch.zeros(64, n, 16) for n in (6, 2, 2))
    out = torch.zeros(64, 6, 16)

    def run(step: Step) -> Tensor:
        count = len(step.which)
        for buffer, x in zip((q, k, v), paged.fused(step.which), strict=True):
            buffer[:count] = x
        recorded(step.rows(2))
        return out[:count]

    def layer(tape: Tape) -> None:
        tape.restore(taped.ring)
        tape.store(k, v, taped.ring)
        tape.attention(q, taped.ring, 0.25, out, window=24)
        tape.capture(taped.ring)
        tape.commit(taped.ring)

    recorded = BEST.record(layer)
    for step in (
        Step(chunks=[(1, 0, 30), (0, 0, 1)], captures=[(1, 16, 5)]),
        Step(chunks=[(0, 1, 48)], captures=[(0, 16, 1), (0, 32, 2)]),
        Step(chunks=[(0, 32, 64), (1, 30, 31)], restores=[(0, 16, 1), (0, 32, 2)]),
    ):
        assert same_bits(run(step), ringed.step(step))


RING = Ringed(world(40, 40), 8, most=20).ring
STEP = Step(chunks=[(0, 3, 20), (1, 0, 2)])


def with_rings(**changes: Tensor) -> Rows:
    where = STEP.rows(2)
    assert where.rings is not None
    return replace(where, rings=replace(where.rings, **changes))


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def commit(where: Rows, ring: LayerRing = RING) -> None:
    BEST.commit(ring, where)


def attend(window: int | None, ring: LayerRing = RING) -> None:
    q = torch.zeros(19, 6, 16)
    BEST.attention(q, ring, STEP.rows(2), 1.0, torch.empty(q.shape), window=window)


REFUSED: dict[str, Callable[[], object]] = {
    "no slots": lambda: commit(replace(STEP.rows(2), rings=None)),
    "a slot past the pool": lambda: commit(with_rings(slot_S=ints(3, 1))),
    "a negative slot": lambda: commit(with_rings(slot_S=ints(-1, 1))),
    "slots of another dtype": lambda: commit(with_rings(slot_S=ints(2, 1).long())),
    "slots of another count": lambda: commit(with_rings(slot_S=ints(2))),
    "rows that begin elsewhere": lambda: commit(with_rings(start_S=ints(4, 0))),
    "rows with a gap": lambda: commit(replace(STEP.rows(2), position_T=ints(*range(3, 19), 20, 0, 1))),
    "rows that are no neighbours": lambda: commit(
        replace(STEP.rows(2), sequence_T=ints(*[0] * 16, 1, 0, 1), position_T=ints(*range(3, 19), 0, 19, 1))
    ),
    "looking before there were rows": lambda: commit(with_rings(valid_from_S=ints(4, 0))),
    "more rows than lie beside the ring": lambda: commit(Step(chunks=[(0, 0, 21)]).rows(2)),
    "a segment past the pool": lambda: BEST.capture(RING, with_rings(captures_C3=ints((0, 16, 40)))),
    "a negative segment": lambda: BEST.capture(RING, with_rings(captures_C3=ints((0, 16, -1)))),
    "a capture of a sequence that is not there": lambda: BEST.capture(
        RING, with_rings(captures_C3=ints((2, 16, 1)))
    ),
    "a capture of rows to come": lambda: BEST.capture(RING, with_rings(captures_C3=ints((0, 32, 1)))),
    "a capture of rows long gone": lambda: BEST.capture(RING, with_rings(captures_C3=ints((0, 3, 1)))),
    "a restore of rows to come": lambda: BEST.restore(RING, with_rings(restores_C3=ints((0, 16, 1)))),
    "a restore before position 0": lambda: BEST.restore(RING, with_rings(restores_C3=ints((0, 3, 1)))),
    "pieces of another shape": lambda: BEST.capture(RING, with_rings(captures_C3=ints(0, 16, 1))),
    "no window over a ring": lambda: attend(None),
    "a window longer than the ring": lambda: attend(10),
    "segments of another head size": lambda: attend(
        8, replace(RING, segments=part((4, 7, 2, 32), torch.float32))
    ),
    "own rows of another dtype": lambda: attend(8, replace(RING, own=part((1, 20, 2, 16), torch.bfloat16))),
    "own rows in two blocks": lambda: attend(8, replace(RING, own=part((2, 10, 2, 16), torch.float32))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    with pytest.raises(ValueError):
        REFUSED[what]()


def test_a_step_that_is_refused_changes_nothing() -> None:
    ringed = Ringed(world(40), 8, most=20)
    ringed.step(Step(chunks=[(0, 0, 20)]))
    before = [x.clone() for x in memory(ringed.ring)]
    for captures in ([(0, 32, 1), (0, 48, 2)], [(0, 32, 1), (0, 32, 99)]):
        with pytest.raises(ValueError, match="segment is out of range"):
            BEST.capture(ringed.ring, Step(chunks=[(0, 20, 40)], captures=captures).rows(1))
    assert all(same_bits(a, b) for a, b in zip(memory(ringed.ring), before, strict=True))


def test_a_window_of_one_keeps_nothing() -> None:
    """Its segments have no rows; whoever names one is right all the same."""
    paged = Paged(heads=6, kv_heads=2, head_size=16, lengths=[40])
    ringed = Ringed(paged, 1)
    assert ringed.ring.segments is not None and ringed.ring.segments.k_PBHD.shape[1] == 0
    ringed.step(Step(chunks=[(0, 0, 32)], captures=[(0, 16, 1), (0, 32, 2)]))
    ringed.forget()
    got = ringed.step(Step(chunks=[(0, 32, 40)], restores=[(0, 32, 2)]))
    assert same_bits(got, whole(paged, 1)[32:]) and not got.isnan().any()
