"""Linear attention: the state that rows change in turn, in slots and in segments."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal.kernels import library
from shoal.kernels.backend import Backend, HeadStates, RecurrentRows, RingRows, Rows
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from tests.kernels.helpers import same_bits

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 12, 80
NUM_ROWS = 40
Piece = tuple[int, int, int]
"""(sequence, start, end)"""


@dataclass
class Inputs:
    """Of two sequences, by position."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None


def inputs(*, delta: bool) -> Inputs:
    some = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, NUM_ROWS, *shape, generator=some)

    decay, beta = (torch.rand(2, NUM_ROWS, HEADS, generator=some) for _ in range(2))
    k = torch.nn.functional.normalize(normal(KEY_HEADS, KEY), dim=-1)
    return Inputs(normal(KEY_HEADS, KEY), k, normal(HEADS, VALUE), decay, beta if delta else None)


def states() -> HeadStates:
    """Slots 1 and 2, segments 1 to 5; nobody has written any of them."""
    slots, segments = (torch.full((n, HEADS, KEY, VALUE), float("nan")) for n in (3, 6))
    return HeadStates(slots_PHKV=slots, segments_PHKV=segments)


def run(
    backend: Backend,
    given: Inputs,
    kept: HeadStates,
    *pieces: Piece,
    captures: Sequence[tuple[int, int, int]] = (),
) -> Tensor:
    """The rows of the pieces, [T, H, V]."""
    where = [(s, p) for s, start, end in pieces for p in range(start, end)]
    sequence_T, position_T = torch.tensor(where, dtype=torch.int32).T.contiguous()
    start_S = torch.zeros(2, dtype=torch.int32)
    for s, start, _ in pieces:
        start_S[s] = start
    rows = Rows(
        sequence_T=sequence_T,
        position_T=position_T,
        table_SN=torch.zeros(2, 1, dtype=torch.int32),
        rings=RingRows(
            slot_S=torch.tensor([1, 2], dtype=torch.int32),
            start_S=start_S,
            valid_from_S=torch.zeros(2, dtype=torch.int32),
            restores_C3=torch.zeros(0, 3, dtype=torch.int32),
            captures_C3=torch.tensor(captures, dtype=torch.int32).view(-1, 3),
        ),
    )
    at = sequence_T, position_T
    beta = None if given.beta is None else given.beta[at]
    out = torch.full((len(where), HEADS, VALUE), float("nan"))
    x = RecurrentRows(
        q_THK=given.q[at], k_THK=given.k[at], v_THV=given.v[at], decay_TH=given.decay[at], beta_TH=beta
    )
    return backend.recurrence(x, kept, rows, out)


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_what_torch_computes(delta: bool) -> None:
    given, ours, theirs = inputs(delta=delta), states(), states()
    pieces, captures = ((1, 0, 33), (0, 0, 40)), [(0, 16, 1), (0, 40, 2), (1, 8, 3)]
    out = run(CpuBackend(2), given, ours, *pieces, captures=captures)
    expected = run(TorchBackend(), given, theirs, *pieces, captures=captures)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert ours.segments_PHKV is not None and theirs.segments_PHKV is not None
    for mine, other in (
        (ours.slots_PHKV[1:], theirs.slots_PHKV[1:]),
        (ours.segments_PHKV[1:4], theirs.segments_PHKV[1:4]),
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("isa", library.instruction_sets())
def test_neither_chunks_nor_neighbours_nor_the_machine_change_a_bit(isa: str, delta: bool) -> None:
    given, whole, backend = inputs(delta=delta), states(), CpuBackend(1)
    expected = run(backend, given, whole, (0, 0, NUM_ROWS), captures=[(0, 16, 1)])
    here, backend = states(), CpuBackend(2, isa)
    first = run(backend, given, here, (0, 0, 7))
    second = run(backend, given, here, (1, 0, 5), (0, 7, 30), captures=[(0, 16, 4)])[5:]
    third = run(backend, given, here, (0, 30, 31), (1, 5, 6))[:1]
    last = run(backend, given, here, (0, 31, NUM_ROWS))
    assert same_bits(torch.cat([first, second, third, last]), expected)
    assert same_bits(here.slots_PHKV[1], whole.slots_PHKV[1])
    assert here.segments_PHKV is not None and whole.segments_PHKV is not None
    assert same_bits(here.segments_PHKV[4], whole.segments_PHKV[1])
    assert here.segments_PHKV[[1, 2, 3, 5]].isnan().all(), "only what was named is written"


def test_who_has_no_rows_in_a_step_keeps_its_state() -> None:
    given, here = inputs(delta=True), states()
    run(CpuBackend(1), given, here, (1, 0, 9))
    assert here.slots_PHKV[1].isnan().all() and not here.slots_PHKV[2].isnan().any()


@pytest.mark.parametrize(
    "captures",
    [[(0, 16, 6)], [(0, 41, 1)], [(2, 8, 1)], [(0, 0, 1)]],
    ids=["segment", "after", "who", "before"],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(
    captures: list[tuple[int, int, int]],
) -> None:
    here = states()
    with pytest.raises(ValueError, match="out of range"):
        run(CpuBackend(1), inputs(delta=True), here, (0, 0, NUM_ROWS), captures=captures)
    assert here.slots_PHKV.isnan().all()


def test_values_that_fill_no_vector_are_refused() -> None:
    with pytest.raises(ValueError, match="values of 8 are not a multiple of 16"):
        x = torch.zeros(1, 1, 8)
        kept = HeadStates(slots_PHKV=torch.zeros(2, 1, 8, 8), segments_PHKV=None)
        one = torch.zeros(1, dtype=torch.int32)
        rows = Rows(sequence_T=one, position_T=one, table_SN=one[:, None])
        given = RecurrentRows(q_THK=x, k_THK=x, v_THV=x, decay_TH=torch.zeros(1, 1))
        CpuBackend(1).recurrence(given, kept, rows, torch.zeros(1, 1, 8))
