"""A row's attention depends on its query and its keys: not on blocks, chunks, neighbours or threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import LayerKV
from tests.kernels.helpers import BEST, NAN, REFERENCE, Paged, every_cpu, rows, same_bits

SHAPES = ((9, 3, 64), (4, 1, 256), (8, 8, 16))  # query heads, key/value heads, head size
DTYPES = (torch.float32, torch.bfloat16)
LENGTH = 330  # six tiles, two segments


def world(shape: tuple[int, int, int], *lengths: int) -> Paged:
    heads, kv_heads, head_size = shape
    return Paged(heads=heads, kv_heads=kv_heads, head_size=head_size, lengths=lengths)


def prefill(paged: Paged, sequence: int, pool: tuple[LayerKV, Tensor]) -> Tensor:
    return paged.attend([(sequence, p) for p in range(paged.lengths[sequence])], pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    paged = world(shape, LENGTH)
    ours = prefill(paged, 0, paged.filled(128, dtype=dtype))
    torch.testing.assert_close(ours.double(), paged.exact(0, dtype), rtol=0, atol=3e-6)


def test_the_reference_agrees() -> None:
    paged = world((9, 3, 64), 50, 20)
    kv, table_SN = paged.filled(16)
    which = [(1, 19), *((0, p) for p in range(30, 50)), (1, 3)]
    q, _, _ = paged.fused(which)
    theirs = REFERENCE.attention(q, kv, rows(which, table_SN), 0.125, torch.empty(q.shape))
    torch.testing.assert_close(paged.attend(which, (kv, table_SN)), theirs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_chunks_and_block_sizes_change_no_bit(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    paged = world(shape, LENGTH)
    whole = prefill(paged, 0, paged.filled(128, dtype=dtype))
    for block_rows in (16, 24, 32, 256):
        assert same_bits(prefill(paged, 0, paged.filled(block_rows, dtype=dtype)), whole), block_rows
    for chunk in (7, 64, 200):
        # The chunk's own keys are stored first; nothing later exists yet.
        for start in range(0, LENGTH, chunk * 3):
            end = min(LENGTH, start + chunk)
            part = paged.attend([(0, p) for p in range(start, end)], paged.filled(32, dtype=dtype, upto=end))
            assert same_bits(part, whole[start:end]), (chunk, start)
    for position in (0, 1, 15, 16, 63, 64, 100, 255, 256, 329):
        pool = paged.filled(64, dtype=dtype, upto=position + 1)
        assert same_bits(paged.attend([(0, position)], pool), whole[position : position + 1]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_change_no_bit(dtype: torch.dtype) -> None:
    paged = world((9, 3, 64), 600)
    pool = paged.filled(48, dtype=dtype)
    for which in ([(0, 599)], [(0, p) for p in range(230, 300)], [(0, p) for p in (5, 599, 64, 300)]):
        expected = paged.attend(which, pool)
        for backend in every_cpu():
            assert same_bits(paged.attend(which, pool, backend), expected), backend.name


def test_neighbours_change_no_bit() -> None:
    paged = world((9, 3, 64), LENGTH, 70, 300)
    pool = paged.filled(16)
    alone = [prefill(paged, s, pool) for s in range(3)]
    everything = [(s, p) for s, n in enumerate(paged.lengths) for p in range(n)]
    shuffled = [everything[i] for i in torch.randperm(len(everything), generator=paged.generator)]
    decode_beside_prefill = [(2, 299), *((0, p) for p in range(100, 240)), (1, 69), (1, 0)]
    for which in (everything, shuffled, decode_beside_prefill):
        assert same_bits(paged.attend(which, pool), torch.stack([alone[s][p] for s, p in which]))


def test_a_poisoned_later_key_does_not_reach_earlier_rows() -> None:
    paged = world((4, 2, 32), 200)
    clean = prefill(paged, 0, paged.filled(32))
    paged.qkv[0][150, 4:6], paged.qkv[0][150, 6:] = torch.inf, NAN
    poisoned = prefill(paged, 0, paged.filled(32))
    assert same_bits(poisoned[:150], clean[:150])
    assert not poisoned[150:].isfinite().all()


def test_output_rows_may_lie_in_wider_ones() -> None:
    paged = world((4, 2, 32), 40)
    kv, table_SN = paged.filled(16)
    which = [(0, p) for p in range(40)]
    q, _, _ = paged.fused(which)
    wide = torch.zeros(40, 7, 32)
    BEST.attention(q, kv, rows(which, table_SN), 32**-0.5, wide[:, 1:5])
    assert same_bits(wide[:, 1:5], paged.attend(which, (kv, table_SN)))
    assert not wide[:, [0, 5, 6]].any()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_step_gives_the_rows_of_a_whole_prefill(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    block_rows = data.draw(st.sampled_from([16, 32, 128]))
    paged = world((6, 2, 32), *lengths)
    pool = paged.filled(block_rows)
    everything = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
    which = data.draw(st.lists(st.sampled_from(everything), min_size=1, max_size=40))
    alone = {s: prefill(paged, s, pool) for s in {s for s, _ in which}}
    assert same_bits(paged.attend(which, pool), torch.stack([alone[s][p] for s, p in which]))


@pytest.mark.parametrize("heads", [1, 64])
def test_many_query_heads_share_one_key(heads: int) -> None:
    paged = world((heads, 1, 16), 280)
    whole = prefill(paged, 0, paged.filled(64))
    torch.testing.assert_close(whole.double(), paged.exact(0), rtol=0, atol=3e-6)


WINDOWS = (1, 16, 24, 63, 64, 65, 100, 256, 300)


def windowed(paged: Paged, pool: tuple[LayerKV, Tensor], window: int) -> Tensor:
    return paged.attend([(0, p) for p in range(paged.lengths[0])], pool, window=window)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_against_float64(shape: tuple[int, int, int], window: int) -> None:
    paged = world(shape, LENGTH)
    pool = paged.filled(16)
    exact = paged.exact(0, window=window)
    torch.testing.assert_close(windowed(paged, pool, window).double(), exact, rtol=0, atol=3e-6)
    whole = [(0, p) for p in range(LENGTH)]
    theirs = paged.attend(whole, pool, REFERENCE, window=window)
    torch.testing.assert_close(theirs.double(), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_changes_with_no_chunk_block_thread_or_instruction_set(
    window: int, dtype: torch.dtype
) -> None:
    paged = world((9, 3, 64), 600)
    whole = windowed(paged, paged.filled(128, dtype=dtype), window)
    assert same_bits(windowed(paged, paged.filled(16, dtype=dtype), window), whole)
    pool = paged.filled(32, dtype=dtype)
    for backend in every_cpu():
        for start, end in ((599, 600), (64, 65), (230, 243), (250, 330), (0, 70)):
            part = paged.attend([(0, p) for p in range(start, end)], pool, backend, window=window)
            assert same_bits(part, whole[start:end]), (backend.name, start, end)


def test_a_window_of_all_positions_is_none() -> None:
    paged = world((9, 3, 64), LENGTH)
    pool = paged.filled(16)
    full = prefill(paged, 0, pool)
    for window in (LENGTH, LENGTH + 1, (1 << 31) - 1):
        assert same_bits(windowed(paged, pool, window), full)
    assert same_bits(windowed(paged, pool, 100)[:100], full[:100]), "rows whose window is not full yet"


def test_keys_behind_the_window_do_not_reach_a_row() -> None:
    """Nor do their values: a block out of sight may be anything."""
    window = 50
    paged = world((4, 2, 32), 400)
    clean = windowed(paged, paged.filled(16), window)
    paged.qkv[0][:200, 4:6], paged.qkv[0][:200, 6:] = torch.inf, NAN
    poisoned = windowed(paged, paged.filled(16), window)
    assert same_bits(poisoned[200 + window - 1 :], clean[200 + window - 1 :])
    assert not poisoned[: 200 + window - 1].isfinite().all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_windowed_step_gives_the_rows_of_a_whole_prefill(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    window = data.draw(st.integers(1, 420))
    paged = world((6, 2, 32), *lengths)
    pool = paged.filled(data.draw(st.sampled_from([16, 128])))
    everything = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
    which = data.draw(st.lists(st.sampled_from(everything), min_size=1, max_size=40))
    alone = {
        s: paged.attend([(s, p) for p in range(lengths[s])], pool, window=window)
        for s in {s for s, _ in which}
    }
    together = paged.attend(which, pool, window=window)
    assert same_bits(together, torch.stack([alone[s][p] for s, p in which]))
