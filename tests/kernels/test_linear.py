"""A linear is one float32 fma chain an output, whoever computes it and whatever stands beside it."""

import ctypes
import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from shoal.kernels.backend import Gate
from tests.kernels.helpers import BEST, REFERENCE, every_cpu, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# [N, K]: ragged panels, ragged k, several passes over k
SHAPES = ((48, 64), (100, 577), (33, 1539), (16, 3), (7, 1))

libm = ctypes.CDLL("libm.so.6")
libm.fmaf.argtypes, libm.fmaf.restype = (ctypes.c_float,) * 3, ctypes.c_float


def chain(x_K: Tensor, w_K: Tensor) -> float:
    """The contract, spelled out."""
    acc = 0.0
    for x, w in zip(x_K.tolist(), w_K.tolist(), strict=True):
        acc = libm.fmaf(x, w, acc)
    return acc


def weights(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[0, 0], w[-1, -1] = 0, 2e-7  # a zero, and a subnormal of float16
    return w.to(dtype)


def inputs(rows: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_output_is_one_chain_of_fma(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w, x = weights(shape, dtype), inputs(5, shape[1])
    y = BEST.linear(x, BEST.pack([w]), torch.empty(5, shape[0]))
    for t, n in itertools.product((0, 4), (0, 1, shape[0] // 2, shape[0] - 1)):
        assert y[t, n].item() == chain(x[t], w[n].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_threads_and_instruction_sets_change_no_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w, x = weights(shape, dtype), inputs(150, shape[1])
    packed = BEST.pack([w])
    whole = BEST.linear(x, packed, torch.empty(150, shape[0]))
    for count in (*range(1, 27), 47, 48, 49, 97, 150):
        start = count * 7 % (151 - count)
        part = BEST.linear(x[start : start + count], packed, torch.empty(count, shape[0]))
        assert same_bits(part, whole[start : start + count]), count
    for backend in every_cpu():
        part = backend.linear(x[:50], backend.pack([w]), torch.empty(50, shape[0]))
        assert same_bits(part, whole[:50]), backend.name


def wild(shape: tuple[int, int], rare: list[tuple[int, int]]) -> Tensor:
    """bfloat16 weights whose high bytes are few but at `rare`."""
    w = weights(shape, torch.bfloat16)
    for i, (n, k) in enumerate(rare):
        w[n, k] = (3e38, -1e-30, torch.inf, 1e-40)[i % 4]  # the last one is subnormal
    return w


@pytest.mark.parametrize("k", [40, 577, 1539])  # whole fours, a rest of one and of three, several passes
def test_bfloat16_in_12_bits_is_bfloat16(k: int) -> None:
    """A few weights are not in the table: first and last, side by side, where a pass ends, in the rest."""
    rare = [
        (0, 0),
        (5, 0),
        (0, 4),
        (40, 8),
        (69, k - 1),
        (17, k // 2),
        *([(33, 767), (33, 768)] if k > 768 else []),
    ]
    w, x = wild((70, k), rare), inputs(30, k)
    packed = BEST.pack([w])
    assert packed.num_bytes < 0.9 * BEST.pack([w.half()]).num_bytes
    wide = BEST.linear(x, BEST.pack([w.float()]), torch.empty(30, 70))
    for backend, count in itertools.product(every_cpu(), (1, 3, 7, 13, 30)):
        narrow = backend.linear(x[:count], backend.pack([w]), torch.empty(count, 70))
        assert same_bits(narrow, wide[:count]), (backend.name, count)


def test_weights_of_no_trained_kind_stay_as_they_are() -> None:
    w = torch.randint(-(2**15), 2**15, (40, 96), generator=torch.Generator().manual_seed(0)).short()
    w = w.view(torch.bfloat16).nan_to_num(1.0, 2.0, -2.0)
    packed = BEST.pack([w])
    assert packed.num_bytes == 48 * 96 * 2 + 16 * 96 * 2  # panels in pairs
    x = inputs(4, 96) * 1e-20
    assert same_bits(
        BEST.linear(x, packed, torch.empty(4, 40)), BEST.linear(x, BEST.pack([w.float()]), torch.empty(4, 40))
    )


def test_stacked_matrices_are_the_matrices() -> None:
    q, k, v = (weights((n, 40), torch.bfloat16, seed=n) for n in (72, 24, 25))  # v begins inside a panel
    x = inputs(3, 40)
    fused = BEST.linear(x, BEST.pack([q, k, v]), torch.empty(3, 121))
    apart = [BEST.linear(x, BEST.pack([w]), torch.empty(3, len(w))) for w in (q, k, v)]
    assert same_bits(fused, torch.cat(apart, dim=1))


def test_inputs_and_outputs_may_be_slices_of_wider_rows() -> None:
    w, wide_x, wide_y = BEST.pack([weights((20, 30), torch.float32)]), inputs(9, 50), torch.full((9, 40), 7.0)
    BEST.linear(wide_x[:, 10:40], w, wide_y[:, 5:25])
    assert same_bits(wide_y[:, 5:25], BEST.linear(wide_x[:, 10:40].contiguous(), w, torch.empty(9, 20)))
    assert (wide_y[:, :5] == 7).all() and (wide_y[:, 25:] == 7).all()


def test_a_bias_is_added_to_the_finished_chain() -> None:
    q, k, v = (weights((n, 40), torch.bfloat16, seed=n) for n in (72, 24, 25))
    x, bias = inputs(60, 40), inputs(1, 121, seed=5)[0]
    expected = BEST.linear(x, BEST.pack([q, k, v]), torch.empty(60, 121)) + bias
    for backend, count in itertools.product(every_cpu(), (1, 13, 60)):
        y = backend.linear(x[:count], backend.pack([q, k, v], bias), torch.empty(count, 121))
        assert same_bits(y, expected[:count]), (backend.name, count)
    theirs = REFERENCE.linear(x, REFERENCE.pack([q, k, v], bias), torch.empty(60, 121))
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)


def test_a_bias_comes_before_the_residual() -> None:
    w, x, residual = weights((33, 70), torch.float16), inputs(20, 70), inputs(20, 33, seed=2)
    bias = inputs(1, 33, seed=5)[0]
    expected = residual + (BEST.linear(x, BEST.pack([w]), torch.empty(20, 33)) + bias)
    for backend in every_cpu():
        assert same_bits(backend.add_linear(x, backend.pack([w], bias), residual.clone()), expected)


@pytest.mark.parametrize("size", [16, 75])
def test_gate_and_up_have_biases_of_their_own(size: int) -> None:
    gate, up = (weights((size, 61), torch.bfloat16, seed=s) for s in (3, 4))
    gate_bias, up_bias, x = *inputs(2, size, seed=5), inputs(60, 61)
    packed = BEST.pack_gate_up(gate, up, gate_bias, up_bias)
    whole = BEST.gated_linear(x, packed, torch.empty(60, size))
    g, u = x.double() @ gate.double().T + gate_bias.double(), x.double() @ up.double().T + up_bias.double()
    torch.testing.assert_close(whole.double(), torch.nn.functional.silu(g) * u, rtol=2e-6, atol=2e-5)
    for backend, count in itertools.product(every_cpu(), (1, 13, 60)):
        part = backend.gated_linear(x[:count], packed, torch.empty(count, size))
        assert same_bits(part, whole[:count]), (backend.name, count)
    theirs = REFERENCE.pack_gate_up(gate, up, gate_bias, up_bias)
    torch.testing.assert_close(
        REFERENCE.gated_linear(x, theirs, torch.empty(60, size)), whole, rtol=2e-6, atol=2e-5
    )


def test_add_linear_adds_the_finished_product() -> None:
    w, x, residual = BEST.pack([weights((33, 70), torch.float16)]), inputs(20, 70), inputs(20, 33, seed=2)
    expected = residual + BEST.linear(x, w, torch.empty(20, 33))
    for backend in every_cpu():
        assert same_bits(backend.add_linear(x, w, residual.clone()), expected)


@pytest.mark.parametrize("size", [16, 75, 96])  # of which one is no multiple of a panel
def test_gate_and_up_fuse_to_the_same_bits_everywhere(size: int) -> None:
    gate, up = (weights((size, 61), torch.bfloat16, seed=s) * 20 for s in (3, 4))
    x = inputs(60, 61)
    packed = BEST.pack_gate_up(gate, up)
    assert packed.num_outputs == size
    whole = BEST.gated_linear(x, packed, torch.empty(60, size))
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    torch.testing.assert_close(whole.double(), torch.nn.functional.silu(g) * u, rtol=2e-6, atol=2e-5)
    for backend, count in itertools.product(every_cpu(), (1, 2, 5, 13, 60)):
        part = backend.gated_linear(x[:count], packed, torch.empty(count, size))
        assert same_bits(part, whole[:count]), (backend.name, count)


def exact_gate(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    match gate:
        case "silu":
            return g * torch.sigmoid(g) * u
        case "gelu_tanh":
            return g / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
        case "clamped_swiglu":
            g, u = g.clamp(max=7), u.clamp(-7, 7)
            return (u + 1) * g * torch.sigmoid(g * 1.702)


@pytest.mark.parametrize("gate", get_args(Gate))
def test_gates_from_their_formulas(gate: Gate) -> None:
    """Weights of one, so that gate and up are what is written here: far beyond every limit, and NaN."""
    values = torch.tensor(
        [0.0, -0.0, 1e-6, -0.3, 0.3, 1.0, -2.0, 5.0, -6.9, 7.0, 7.1, -30.0, 30.0, 1e4, -1e4]
    )
    g, u = (x.flatten()[:, None] for x in torch.meshgrid(values, values, indexing="ij"))
    x = torch.cat([g, u], dim=1)
    packed = BEST.pack_gate_up(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    whole = BEST.gated_linear(x, packed, torch.empty(len(x), 1), gate=gate)
    expected = exact_gate(gate, g.double(), u.double())
    torch.testing.assert_close(whole.double(), expected, rtol=2e-6, atol=1e-6)
    for backend, count in itertools.product(every_cpu(), (1, 5, len(x))):
        part = backend.gated_linear(x[:count], packed, torch.empty(count, 1), gate=gate)
        assert same_bits(part, whole[:count]), (backend.name, count)
    theirs = REFERENCE.pack_gate_up(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    theirs_out = REFERENCE.gated_linear(x, theirs, torch.empty(len(x), 1), gate=gate)
    torch.testing.assert_close(theirs_out, whole, rtol=2e-6, atol=1e-5)
    assert BEST.gated_linear(x[:1] + torch.nan, packed, torch.empty(1, 1), gate=gate).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_stays_that_of_float32_sums(dtype: torch.dtype) -> None:
    w, x = weights((64, 1024), dtype), inputs(10, 1024)
    exact = x.double() @ w.double().T
    bound = 4e-7 * (x.double().abs() @ w.double().abs().T)
    for y in (
        BEST.linear(x, BEST.pack([w]), torch.empty(10, 64)),
        REFERENCE.linear(x, REFERENCE.pack([w]), torch.empty(10, 64)),
    ):
        assert ((y.double() - exact).abs() < bound).all()


def test_infinity_and_nan_stay_in_their_row() -> None:
    w, x = BEST.pack([weights((40, 37), torch.bfloat16)]), inputs(9, 37)
    clean = BEST.linear(x, w, torch.empty(9, 40))
    x[4, 3], x[5, 36] = torch.nan, torch.inf
    y = BEST.linear(x, w, torch.empty(9, 40))
    untouched = [0, 1, 2, 3, 6, 7, 8]
    assert same_bits(y[untouched], clean[untouched])
    assert y[4].isnan().all() and not y[5].isfinite().any()


def test_a_freed_matrix_gives_its_memory_back() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    w = torch.ones(4096, 1024)
    for _ in range(3):
        BEST.pack([w])
    before = resident_bytes()
    for _ in range(10):
        BEST.pack([w])  # 16 MiB each, dropped at once
    assert resident_bytes() - before < w.nbytes * 2
    assert BEST.pack([w]).num_bytes == w.nbytes


def test_no_rows_are_no_work() -> None:
    assert BEST.linear(torch.empty(0, 8), BEST.pack([torch.ones(4, 8)]), torch.empty(0, 4)).shape == (0, 4)
