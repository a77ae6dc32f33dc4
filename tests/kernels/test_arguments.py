"""What would read or write outside a tensor is refused by name, before a kernel runs."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from shoal.kernels.backend import Gate, LayerKV, Rotary, Rows
from shoal.kernels.cpu import CpuBackend
from tests.kernels.helpers import BEST, REFERENCE, Paged, adjustment, rows, sampling

PAGED = Paged(heads=4, kv_heads=2, head_size=16, lengths=[40])
W = BEST.pack([torch.ones(8, 16)])
GATE_UP = BEST.pack_gate_up(torch.ones(8, 16), torch.ones(8, 16))
TABLE = torch.arange(1, 4, dtype=torch.int32).view(1, 3)
Q = torch.zeros(1, 4, 16)


def pool(blocks: int = 4, block_rows: int = 16, heads: int = 2, head_size: int = 16) -> LayerKV:
    shape = (blocks, block_rows, heads, head_size)
    return LayerKV(k_PBHD=torch.zeros(shape), v_PBHD=torch.zeros(shape))


def attend(
    q: Tensor = Q,
    kv: LayerKV | None = None,
    where: Rows | None = None,
    out: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    out = torch.empty(q.shape) if out is None else out
    return BEST.attention(q, kv or pool(), where or rows([(0, 3)], TABLE), 1.0, out, window=window)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSED: dict[str, Callable[[], object]] = {
    "x of another dtype": lambda: BEST.linear(zeros(2, 16).bfloat16(), W, zeros(2, 8)),
    "x of another width": lambda: BEST.linear(zeros(2, 15), W, zeros(2, 8)),
    "x with strided columns": lambda: BEST.linear(zeros(16, 2).T, W, zeros(2, 8)),
    "x on another device": lambda: BEST.linear(zeros(2, 16).to("meta"), W, zeros(2, 8)),
    "out too narrow": lambda: BEST.linear(zeros(2, 16), W, zeros(2, 7)),
    "out too short": lambda: BEST.linear(zeros(2, 16), W, zeros(1, 8)),
    "a gate-up matrix as a plain one": lambda: BEST.linear(zeros(2, 16), GATE_UP, zeros(2, 8)),
    "a plain matrix as a gate-up one": lambda: BEST.gated_linear(zeros(2, 16), W, zeros(2, 8)),
    "another backend's matrix": lambda: BEST.linear(
        zeros(2, 16), REFERENCE.pack([zeros(8, 16)]), zeros(2, 8)
    ),
    "weights of an unknown dtype": lambda: BEST.pack([zeros(8, 16).double()]),
    "weights of two dtypes": lambda: BEST.pack([zeros(8, 16), zeros(8, 16).bfloat16()]),
    "weights of two widths": lambda: BEST.pack([zeros(8, 16), zeros(8, 17)]),
    "no weights": lambda: BEST.pack([]),
    "gate and up of two sizes": lambda: BEST.pack_gate_up(zeros(8, 16), zeros(9, 16)),
    "a bias of another size": lambda: BEST.pack([zeros(8, 16)], zeros(9)),
    "a bias of another dtype": lambda: BEST.pack([zeros(8, 16)], zeros(8).bfloat16()),
    "a bias of gate alone": lambda: BEST.pack_gate_up(zeros(8, 16), zeros(8, 16), zeros(8), None),
    "heads of another number": lambda: BEST.rms_norm(zeros(2, 3, 16), zeros(16), 1e-5, zeros(2, 4, 16)),
    "a window of nothing": lambda: attend(window=0),
    "a gate of no name": lambda: BEST.gated_linear(
        zeros(2, 16), GATE_UP, zeros(2, 8), gate=cast(Gate, "relu")
    ),
    "a norm weight of another size": lambda: BEST.rms_norm(zeros(2, 16), zeros(15), 1e-5, zeros(2, 16)),
    "an id past the table": lambda: BEST.gather(zeros(5, 4), torch.tensor([5]), zeros(1, 4)),
    "a negative id": lambda: BEST.gather(zeros(5, 4), torch.tensor([-1]), zeros(1, 4)),
    "ids of another dtype": lambda: BEST.gather(zeros(5, 4), zeros(1, dtype=torch.int32), zeros(1, 4)),
    "a table of another dtype": lambda: BEST.gather(
        zeros(5, 4, dtype=torch.int32), torch.tensor([0]), zeros(1, 4)
    ),
    "a position without an angle": lambda: BEST.rotate(
        zeros(1, 4, 16), Rotary(cos=zeros(3, 8), sin=zeros(3, 8)), rows([(0, 3)], TABLE)
    ),
    "more rotated than a head has": lambda: BEST.rotate(
        zeros(1, 4, 16), Rotary(cos=zeros(9, 9), sin=zeros(9, 9)), rows([(0, 3)], TABLE)
    ),
    "rows of another count": lambda: attend(where=rows([(0, 3), (0, 4)], TABLE)),
    "a negative position": lambda: attend(where=rows([(0, -1)], TABLE)),
    "a position past the table": lambda: attend(where=rows([(0, 48)], TABLE)),
    "an unknown sequence": lambda: attend(where=rows([(1, 0)], TABLE)),
    "a block past the pool": lambda: attend(where=rows([(0, 20)], TABLE + 2)),
    "a negative block": lambda: attend(where=rows([(0, 20)], TABLE - 2)),
    "positions of another dtype": lambda: attend(
        where=Rows(sequence_T=TABLE[0, :1], position_T=zeros(1, dtype=torch.int64), table_SN=TABLE)
    ),
    "heads with gaps between": lambda: attend(q=zeros(1, 8, 16)[:, ::2]),
    "heads of another size": lambda: attend(kv=pool(head_size=32)),
    "heads that do not divide": lambda: attend(kv=pool(heads=3)),
    "a head size that is no multiple of 16": lambda: attend(q=zeros(1, 4, 8), kv=pool(head_size=8)),
    "a pool of another dtype": lambda: attend(
        kv=LayerKV(k_PBHD=zeros(4, 16, 2, 16).half(), v_PBHD=zeros(4, 16, 2, 16).half())
    ),
    "keys and values of two dtypes": lambda: attend(
        kv=LayerKV(k_PBHD=zeros(4, 16, 2, 16), v_PBHD=zeros(4, 16, 2, 16).bfloat16())
    ),
    "a pool with strided rows": lambda: attend(
        kv=LayerKV(k_PBHD=zeros(4, 16, 2, 32)[..., ::2], v_PBHD=zeros(4, 16, 2, 32)[..., ::2])
    ),
    "out of another shape": lambda: attend(out=zeros(1, 3, 16)),
    "keys of another shape": lambda: BEST.store(
        zeros(1, 2, 8), zeros(1, 2, 16), pool(), rows([(0, 3)], TABLE)
    ),
    "a store past the table": lambda: BEST.store(
        zeros(1, 2, 16), zeros(1, 2, 16), pool(), rows([(0, 48)], TABLE)
    ),
    "wishes of another count": lambda: BEST.sample(zeros(2, 10), sampling(3)),
    "token ids of another dtype": lambda: BEST.sample(
        zeros(1, 10), sampling(1, adjustments=[replace(adjustment(), token_ids=zeros(2, dtype=torch.int32))])
    ),
    "biases of another count": lambda: BEST.sample(
        zeros(1, 10), sampling(1, adjustments=[replace(adjustment(), bias=zeros(2))])
    ),
    "tokens for other rows": lambda: BEST.logprobs(zeros(2, 10), torch.arange(2), torch.arange(1), 1),
    "an empty vocabulary": lambda: BEST.sample(zeros(2, 0), sampling(2)),
    "no threads": lambda: CpuBackend(0),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    with pytest.raises(ValueError):
        REFUSED[what]()


def test_arguments_looked_at_once_are_not_kept_alive() -> None:
    kv = pool()
    attend(kv=kv)
    alive = weakref.ref(kv.k_PBHD)
    del kv
    gc.collect()
    assert alive() is None


def test_rows_may_be_refilled_in_place() -> None:
    """A runner reuses its buffers: what they hold is checked at every call."""
    where = rows([(0, 3)], TABLE)
    attend(where=where)
    where.position_T[0] = 48
    with pytest.raises(ValueError, match="out of range"):
        attend(where=where)
