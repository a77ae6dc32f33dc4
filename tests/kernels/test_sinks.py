"""A head's sink takes its share of the softmax, once a row is finished: no bit of it depends on the step."""

import pytest
import torch
from torch import Tensor

from tests.kernels.helpers import BEST, REFERENCE, Paged, every_cpu, same_bits

LENGTH = 330  # six tiles, two segments
# One that no score reaches, one that counts for nothing, and some between.
SINKS = torch.tensor([40.0, -200.0, 0.0, 1.5, -3.0, 5.0, 0.25, -0.5, 2.0])


def paged() -> Paged:
    return Paged(heads=9, kv_heads=3, head_size=64, lengths=[LENGTH])


def rows(start: int, end: int) -> list[tuple[int, int]]:
    return [(0, p) for p in range(start, end)]


@pytest.mark.parametrize("window", [None, 24, 100])
def test_against_float64(window: int | None) -> None:
    world = paged()
    pool, exact = world.filled(16), world.exact(0, window=window, sinks_H=SINKS)
    for backend in (BEST, REFERENCE):
        out = world.attend(rows(0, LENGTH), pool, backend, window=window, sinks_H=SINKS)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_threads_and_instruction_sets_change_no_bit(window: int | None) -> None:
    world = paged()
    whole = world.attend(rows(0, LENGTH), world.filled(128), window=window, sinks_H=SINKS)
    pool = world.filled(32)
    for backend in every_cpu():
        for start, end in ((329, 330), (0, 1), (64, 65), (250, 300)):
            part = world.attend(rows(start, end), pool, backend, window=window, sinks_H=SINKS)
            assert same_bits(part, whole[start:end]), (backend.name, start, end)


def test_a_sink_of_nothing_is_none() -> None:
    world = paged()
    pool, nothing = world.filled(16), torch.full((9,), -torch.inf)
    plain = world.attend(rows(0, LENGTH), pool)
    assert same_bits(world.attend(rows(0, LENGTH), pool, sinks_H=nothing), plain)


@pytest.mark.parametrize("sinks", [torch.zeros(8), torch.zeros(9).double(), torch.zeros(18)[::2]])
def test_sinks_of_another_kind_are_refused(sinks: Tensor) -> None:
    world = paged()
    with pytest.raises(ValueError, match="sinks must be contiguous"):
        world.attend(rows(0, 3), world.filled(16), sinks_H=sinks)
