"""What the kernel tests share: bitwise equality, every instruction set, and a small paged world."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from shoal.kernels import library
from shoal.kernels.backend import Adjustment, Backend, LayerKV, Rows, Sampling
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend

BEST = CpuBackend(threads=2)
REFERENCE = TorchBackend()
NAN = float("nan")


def every_cpu() -> list[CpuBackend]:
    """One backend for each instruction set this machine has, one thread and several."""
    return [CpuBackend(threads, isa) for isa in library.instruction_sets() for threads in (1, 3)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits_of_a, bits_of_b = (x.contiguous().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(bits_of_a, bits_of_b)


def rows(which: Sequence[tuple[int, int]], table_SN: Tensor) -> Rows:
    """Rows of a step, as (sequence, position)."""
    sequences, positions = zip(*which, strict=True)
    return Rows(
        sequence_T=torch.tensor(sequences, dtype=torch.int32),
        position_T=torch.tensor(positions, dtype=torch.int32),
        table_SN=table_SN,
    )


class Wishes(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    adjustments: Sequence[Adjustment]


def sampling(count: int, **wishes: Unpack[Wishes]) -> Sampling:
    """The same wishes for every row; each row stands one position further."""
    first = wishes.get("position", 0)
    return Sampling(
        temperature_T=torch.full((count,), float(wishes.get("temperature", 1.0))),
        top_k_T=torch.full((count,), wishes.get("top_k", 0), dtype=torch.int32),
        top_p_T=torch.full((count,), wishes.get("top_p", 1.0)),
        min_p_T=torch.full((count,), float(wishes.get("min_p", 0.0))),
        seed_T=torch.full((count,), wishes.get("seed", 7), dtype=torch.int64),
        position_T=torch.arange(first, first + count),
        adjustments=wishes.get("adjustments", ()),
    )


def adjustment(
    row: int = 0,
    tokens: Sequence[int] = (),
    *,
    prompt: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: Sequence[tuple[int, float]] = (),
) -> Adjustment:
    return Adjustment(
        row=row,
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        num_prompt_tokens=prompt,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        bias_ids=torch.tensor([token_id for token_id, _ in bias], dtype=torch.int64),
        bias=torch.tensor([added for _, added in bias], dtype=torch.float32),
    )


class Paged:
    """Sequences of random queries, keys and values, and pools that hold them in scattered blocks.

    Every pool row that no sequence owns is NaN, so one that is read anywhere shows.
    """

    def __init__(self, *, heads: int, kv_heads: int, head_size: int, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.heads, self.kv_heads, self.head_size, self.lengths = heads, kv_heads, head_size, lengths
        # One fused row a token, [q | k | v], as a model computes it: the kernels read strided slices.
        self.qkv = [torch.randn(n, heads + 2 * kv_heads, head_size, generator=generator) for n in lengths]
        self.generator = generator

    def pool(self, block_rows: int, *, dtype: torch.dtype = torch.float32) -> tuple[LayerKV, Tensor]:
        """An empty pool with one layer's view of it, blocks of which lie apart, and a block table."""
        blocks = [-(-n // block_rows) for n in self.lengths]
        total = sum(blocks) + 1
        order = torch.randperm(total - 1, generator=self.generator)[: sum(blocks)] + 1
        table_SN = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for s, count in enumerate(blocks):
            table_SN[s, :count], order = order[:count], order[count:]
        layers = torch.full((total, 3, 2, block_rows, self.kv_heads, self.head_size), NAN, dtype=dtype)
        return LayerKV(k_PBHD=layers[:, 1, 0], v_PBHD=layers[:, 1, 1]), table_SN

    def fused(self, which: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of some rows, as slices of fused rows."""
        fused = torch.stack([self.qkv[s][p] for s, p in which])
        first_k, first_v = self.heads, self.heads + self.kv_heads
        return fused[:, :first_k], fused[:, first_k:first_v], fused[:, first_v:]

    def filled(
        self, block_rows: int, *, dtype: torch.dtype = torch.float32, upto: int | None = None
    ) -> tuple[LayerKV, Tensor]:
        """A pool that holds positions 0..upto-1 of every sequence."""
        kv, table_SN = self.pool(block_rows, dtype=dtype)
        which = [
            (s, p) for s, n in enumerate(self.lengths) for p in range(min(n, n if upto is None else upto))
        ]
        _, k, v = self.fused(which)
        BEST.store(k, v, kv, rows(which, table_SN))
        return kv, table_SN

    def attend(
        self,
        which: Sequence[tuple[int, int]],
        pool: tuple[LayerKV, Tensor],
        backend: Backend = BEST,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        kv, table_SN = pool
        q, _, _ = self.fused(which)
        out, scale = torch.empty(len(which), self.heads, self.head_size), self.head_size**-0.5
        where = rows(which, table_SN)
        return backend.attention(q, kv, where, scale, out, window=window, sinks_H=sinks_H)

    def exact(
        self,
        sequence: int,
        dtype: torch.dtype = torch.float32,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows of a sequence in float64, over keys and values in the pool's dtype."""
        q, k, v = self.fused([(sequence, p) for p in range(self.lengths[sequence])])
        group = self.heads // self.kv_heads
        k, v = (x.to(dtype).double().repeat_interleave(group, 1) for x in (k, v))
        score_HQN = torch.einsum("qhd,nhd->hqn", q.double(), k) * self.head_size**-0.5
        hidden_QN = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        if window is not None:
            hidden_QN |= hidden_QN.new_ones(hidden_QN.shape).tril(-window)
        score_HQN = score_HQN.masked_fill(hidden_QN, -torch.inf)
        if sinks_H is not None:
            sink_HQ1 = sinks_H.double()[:, None, None].expand(-1, len(q), 1)
            score_HQN = torch.cat([score_HQN, sink_HQ1], dim=-1)
        return torch.einsum("hqn,nhd->qhd", score_HQN.softmax(-1)[..., : len(k)], v)
