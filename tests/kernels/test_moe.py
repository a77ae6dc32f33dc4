"""A row's experts, their weights and their sum depend on that row alone, whoever shares an expert with it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.kernels import library
from shoal.kernels.backend import Backend, Experts, Gate
from shoal.kernels.cpu import CpuBackend
from tests.kernels.helpers import BEST, REFERENCE, same_bits

SIZE, INNER, COUNT, ROWS = 40, 24, 6, 200


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, RESIDUAL = randn(ROWS, SIZE, seed=0), randn(ROWS, SIZE, seed=1)
# Expert 5 is nobody's, expert 0 nearly everybody's.
LOGITS = randn(ROWS, COUNT, seed=2) + torch.tensor([3.0, 0, 0, 0, 0, -20])
GATE, UP, DOWN = (
    randn(COUNT, INNER, SIZE, seed=3),
    randn(COUNT, INNER, SIZE, seed=4),
    randn(COUNT, SIZE, INNER, seed=5),
)
GATE_BIAS, UP_BIAS, DOWN_BIAS = (
    randn(COUNT, INNER, seed=6),
    randn(COUNT, INNER, seed=7),
    randn(COUNT, SIZE, seed=8),
)


def experts(
    backend: Backend, *, top: int = 2, gate: Gate = "clamped_swiglu", dtype: torch.dtype = torch.bfloat16
) -> Experts:
    return Experts(
        gate_up=tuple(
            backend.pack_gate_up(GATE[e].to(dtype), UP[e].to(dtype), GATE_BIAS[e], UP_BIAS[e])
            for e in range(COUNT)
        ),
        down=tuple(backend.pack([DOWN[e].to(dtype)], DOWN_BIAS[e]) for e in range(COUNT)),
        top=top,
        gate=gate,
    )


MINE = experts(BEST)


def added(backend: Backend, rows: slice, of: Experts = MINE, logits: Tensor = LOGITS) -> Tensor:
    return backend.add_experts(X[rows], logits[rows], of, RESIDUAL[rows].clone())


def one_by_one(row: int, of: Experts, logits: Tensor = LOGITS) -> Tensor:
    """The contract, spelled out for one row."""
    order = sorted(range(COUNT), key=lambda e: (-logits[row, e].item(), e))[: of.top]
    weights = logits[row, order].double().softmax(-1)
    total = RESIDUAL[row].double()
    for expert, weight in zip(order, weights, strict=True):
        inner = BEST.gated_linear(X[row : row + 1], of.gate_up[expert], torch.empty(1, INNER), gate=of.gate)
        total = total + weight * BEST.linear(inner, of.down[expert], torch.empty(1, SIZE))[0].double()
    return total


@pytest.mark.parametrize("top", [1, 2, 4, COUNT])
def test_the_best_experts_weighted_by_a_softmax_among_themselves(top: int) -> None:
    of = replace(MINE, top=top)
    whole = added(BEST, slice(0, 20), of)
    for row in range(20):
        torch.testing.assert_close(whole[row].double(), one_by_one(row, of), rtol=0, atol=1e-5 * SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["clamped_swiglu", "silu"])
def test_the_reference_agrees(gate: Gate, dtype: torch.dtype) -> None:
    ours = added(BEST, slice(0, 50), experts(BEST, gate=gate, dtype=dtype))
    theirs = added(REFERENCE, slice(0, 50), experts(REFERENCE, gate=gate, dtype=dtype))
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-4)


def test_a_row_alone_is_that_row_among_200() -> None:
    whole = added(BEST, slice(0, ROWS))
    for row in (0, 1, 77, 199):
        assert same_bits(added(BEST, slice(row, row + 1)), whole[row : row + 1]), row
    for start, end in ((3, 16), (50, 99), (120, 200)):
        assert same_bits(added(BEST, slice(start, end)), whole[start:end]), (start, end)


@pytest.mark.parametrize("isa", library.instruction_sets())
def test_threads_and_instruction_sets_change_no_bit(isa: str) -> None:
    whole = added(BEST, slice(0, ROWS))
    for threads in (1, 2, 5):
        backend = CpuBackend(threads, isa)
        assert same_bits(added(backend, slice(0, ROWS)), whole), threads
        assert same_bits(added(backend, slice(9, 12)), whole[9:12]), threads


def test_equal_logits_go_to_the_lower_ids() -> None:
    level = torch.zeros(1, COUNT)
    level[0, 0] = -1
    expected = LOGITS.new_full((1, COUNT), -100.0)
    expected[0, [1, 2]] = 0
    assert same_bits(added(BEST, slice(0, 1), logits=level), added(BEST, slice(0, 1), logits=expected))
    theirs = experts(REFERENCE)
    ours, reference = added(BEST, slice(0, 1), logits=level), added(REFERENCE, slice(0, 1), theirs, level)
    torch.testing.assert_close(ours, reference, rtol=2e-6, atol=2e-4)


def test_nan_stays_in_its_row() -> None:
    x, logits = X[:20].clone(), LOGITS[:20].clone()
    x[4], logits[4], logits[7] = torch.nan, torch.nan, torch.nan
    out = BEST.add_experts(x, logits, MINE, RESIDUAL[:20].clone())
    untouched = [i for i in range(20) if i not in (4, 7)]
    assert same_bits(out[untouched], added(BEST, slice(0, 20))[untouched])
    assert out[[4, 7]].isnan().all()


def test_rows_may_be_slices_of_wider_ones() -> None:
    x, logits, residual = (torch.cat([t, t], dim=1) for t in (X[:9], LOGITS[:9], RESIDUAL[:9]))
    BEST.add_experts(x[:, :SIZE], logits[:, :COUNT], MINE, residual[:, :SIZE])
    assert same_bits(residual[:, :SIZE], added(BEST, slice(0, 9)))
    assert same_bits(residual[:, SIZE:], RESIDUAL[:9])


def test_no_rows_are_no_work() -> None:
    assert added(BEST, slice(0, 0)).shape == (0, SIZE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top": 0},
        {"top": COUNT + 1},
        {"down": MINE.down[:-1]},
        {"down": MINE.gate_up},
        {"gate_up": experts(REFERENCE).gate_up},
        {"down": (*MINE.down[:-1], BEST.pack([torch.ones(SIZE, INNER + 1)]))},
        {"gate": "relu"},
    ],
    ids=", ".join,
)
def test_experts_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        added(BEST, slice(0, 3), replace(MINE, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(("columns", "rows"), [(COUNT - 1, 3), (COUNT, 2)])
def test_logits_that_do_not_fit_are_refused(columns: int, rows: int) -> None:
    with pytest.raises(ValueError):
        BEST.add_experts(X[:3], LOGITS[:rows, :columns].contiguous(), MINE, RESIDUAL[:3].clone())
