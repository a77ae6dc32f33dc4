"""Norm, rotary positions and the store: each row by itself, and close to float64."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.backend import Backend, Rotary
from tests.kernels.helpers import BEST, REFERENCE, Paged, every_cpu, rows, same_bits


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 16, 37, 576])
def test_gather_widens_rows(dtype: torch.dtype, size: int) -> None:
    table, ids = randn(40, size + 3)[:, :size].to(dtype), torch.tensor([39, 0, 7, 7, 21])
    backends: list[Backend] = [REFERENCE, *every_cpu()]
    for backend in backends:
        out = torch.full((5, size + 2), 9.0)
        backend.gather(table, ids, out[:, 1:-1])
        assert same_bits(out[:, 1:-1], table[ids].float())
        assert (out[:, [0, -1]] == 9).all()


def test_gather_scales_in_float32() -> None:
    table, ids, scale = randn(9, 37).bfloat16(), torch.tensor([8, 0, 3]), 640**0.5
    backends: list[Backend] = [REFERENCE, *every_cpu()]
    for backend in backends:
        out = backend.gather(table, ids, torch.empty(3, 37), scale=scale)
        assert same_bits(out, table[ids].float() * torch.tensor(scale)), backend.name


@pytest.mark.parametrize("size", [1, 7, 100, 576, 1024])
def test_rms_norm(size: int) -> None:
    x, weight = randn(70, size + 3)[:, :size] * 3, randn(size, seed=1)
    y = BEST.rms_norm(x, weight, 1e-5, torch.empty(70, size))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(y.double(), exact, rtol=2e-6, atol=1e-7)
    theirs = REFERENCE.rms_norm(x, weight, 1e-5, torch.empty(70, size))
    torch.testing.assert_close(y, theirs, rtol=2e-6, atol=1e-7)
    for backend in every_cpu():
        assert same_bits(backend.rms_norm(x, weight, 1e-5, torch.empty(70, size)), y)
        assert same_bits(backend.rms_norm(x[9:10], weight, 1e-5, torch.empty(1, size)), y[9:10])


@pytest.mark.parametrize("size", [7, 640])
def test_a_norm_is_added_when_it_is_finished(size: int) -> None:
    x, weight, residual = randn(40, size) * 3, randn(size, seed=1), randn(40, size, seed=2)
    expected = residual + BEST.rms_norm(x, weight, 1e-6, torch.empty(40, size))
    for backend in every_cpu():
        assert same_bits(backend.add_rms_norm(x, weight, 1e-6, residual.clone()), expected), backend.name
    theirs = REFERENCE.add_rms_norm(x, weight, 1e-6, residual.clone())
    torch.testing.assert_close(theirs, expected, rtol=2e-6, atol=1e-6)


def test_rms_norm_of_heads_is_that_of_each_head() -> None:
    fused, weight = randn(30, 8, 80), randn(80, seed=1)
    heads = BEST.rms_norm(fused[:, 1:6].flatten(0, 1), weight, 1e-6, torch.empty(150, 80)).view(30, 5, 80)
    for backend in every_cpu():
        normed = fused.clone()
        backend.rms_norm(normed[:, 1:6], weight, 1e-6, normed[:, 1:6])  # in place, within wider rows
        assert same_bits(normed[:, 1:6], heads), backend.name
        assert same_bits(normed[:, 0], fused[:, 0]) and same_bits(normed[:, 6:], fused[:, 6:])
    theirs = fused.clone()
    REFERENCE.rms_norm(theirs[:, 1:6], weight, 1e-6, theirs[:, 1:6])
    torch.testing.assert_close(theirs[:, 1:6], heads, rtol=2e-6, atol=1e-7)


def angles(positions: int, half: int) -> Rotary:
    angle = torch.outer(torch.arange(positions), 10_000.0 ** (-torch.arange(half) / half)).double()
    return Rotary(cos=angle.cos().float(), sin=angle.sin().float())


@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (128, 64), (80, 20)])
def test_rotate_turns_pairs_and_leaves_the_rest(head_size: int, rotated: int) -> None:
    fused, rotary, half = randn(30, 8, head_size), angles(500, rotated // 2), rotated // 2
    where = rows([(0, p * 13) for p in range(30)], torch.zeros(1, 40, dtype=torch.int32))
    turned = fused.clone()
    BEST.rotate(turned[:, 1:6], rotary, where)

    position_T = where.position_T.long()
    cos, sin = (x[position_T].double()[:, None] for x in (rotary.cos, rotary.sin))
    a, b = fused[:, 1:6, :half].double(), fused[:, 1:6, half:rotated].double()
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    torch.testing.assert_close(turned[:, 1:6, :rotated].double(), exact, rtol=0, atol=1e-6)
    assert same_bits(turned[:, 1:6, rotated:], fused[:, 1:6, rotated:])
    assert same_bits(turned[:, 0], fused[:, 0]) and same_bits(turned[:, 6:], fused[:, 6:])

    theirs = fused.clone()
    REFERENCE.rotate(theirs[:, 1:6], rotary, where)
    torch.testing.assert_close(turned, theirs, rtol=0, atol=1e-6)
    for backend in every_cpu():
        again = fused.clone()
        backend.rotate(again[:, 1:6], rotary, where)
        assert same_bits(again, turned), backend.name


def test_store_writes_only_its_rows() -> None:
    paged = Paged(heads=4, kv_heads=2, head_size=16, lengths=[40, 30])
    which = [(1, 29), (0, 0), (0, 17), (1, 3)]
    _, k, v = paged.fused(which)
    for backend in every_cpu():
        kv, table_SN = paged.pool(16)
        backend.store(k, v, kv, rows(which, table_SN))
        for (s, p), key, value in zip(which, k, v, strict=True):
            block = int(table_SN[s, p // 16])
            assert same_bits(kv.k_PBHD[block, p % 16], key) and same_bits(kv.v_PBHD[block, p % 16], value)
        assert kv.k_PBHD.isfinite().sum() == k.numel()  # all else is still NaN


def test_a_bfloat16_pool_takes_the_nearest_value_ties_to_even() -> None:
    paged = Paged(heads=1, kv_heads=1, head_size=16, lengths=[1])
    special = [1.00390625, 1.01171875, 3.3895314e38, torch.inf, -torch.inf, torch.nan, -0.0, 1e-45, -1.7]
    k = torch.tensor(special + [0.1] * 7).view(1, 1, 16)
    backends: list[Backend] = [*every_cpu(), REFERENCE]
    for backend in backends:
        kv, table_SN = paged.pool(16, dtype=torch.bfloat16)
        backend.store(k, k, kv, rows([(0, 0)], table_SN))
        stored = kv.k_PBHD[table_SN[0, 0], 0]
        torch.testing.assert_close(stored, k[0].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_many_rows_store_like_few() -> None:
    paged = Paged(heads=4, kv_heads=2, head_size=64, lengths=[700])
    kv, _ = paged.filled(32)
    generator_state = paged.generator.get_state()
    one_by_one, table_SN = paged.pool(32)
    for p in range(700):
        _, k, v = paged.fused([(0, p)])
        BEST.store(k, v, one_by_one, rows([(0, p)], table_SN))
    paged.generator.set_state(generator_state)
    at_once, table_SN = paged.pool(32)
    which = [(0, p) for p in range(700)]
    _, k, v = paged.fused(which)
    BEST.store(k, v, at_once, rows(which, table_SN))
    assert same_bits(at_once.k_PBHD, one_by_one.k_PBHD) and same_bits(at_once.v_PBHD, one_by_one.v_PBHD)
    assert kv.k_PBHD.shape == at_once.k_PBHD.shape
