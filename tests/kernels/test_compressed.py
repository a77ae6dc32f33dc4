"""Windows and compressed rows, of any batch in any steps, against loops that go from token to token."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import RingRows, Rows
from shoal.kernels.compressed import (
    Index,
    LayerCompressed,
    LayerKept,
    LayerWindow,
    Queries,
    Span,
    Tile,
    attend,
    capture,
    choose,
    commit,
    compress,
    new_rows,
    restore,
    spans_of,
)
from tests.kernels.helpers import NAN

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, TOP = 3, 8, 4, 6, 3
WINDOW, SPARE, BLOCK, NUM_BLOCKS = 6, 3, 16, 8
Chunk = tuple[int, int, int]
"""Positions start to end - 1 of a sequence: (sequence, start, end)."""
Copy = tuple[int, int, int]
"""(sequence, boundary, segment)"""


@dataclass
class Sequences:
    """What a model would make of each token, and what attention makes of that, from token to token."""

    lengths: Sequence[int]
    ratio: int
    is_sparse: bool
    seed: int = 0
    sinks_H: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random_ = torch.Generator().manual_seed(self.seed)
        times = 1 + self.is_sparse

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random_)

        self.q = [normal(n, HEADS, SIZE) for n in self.lengths]
        self.kv = [normal(n, SIZE) for n in self.lengths]
        self.making = [normal(n, 2, times * SIZE) for n in self.lengths]
        self.index_making = [normal(n, 2, times * INDEX_SIZE) for n in self.lengths]
        self.index_q = [normal(n, INDEX_HEADS, INDEX_SIZE) for n in self.lengths]
        self.index_weight = [normal(n, INDEX_HEADS) for n in self.lengths]
        self.bias = normal(self.ratio, times * SIZE)
        self.index_bias = normal(self.ratio, times * INDEX_SIZE)
        self.sinks_H = normal(HEADS)

    def compressed(self, making: Tensor, bias: Tensor, row: int) -> Tensor:
        """Row `row`, of one stretch or of two."""
        size = bias.shape[1] // (1 + self.is_sparse)
        values, gates = [], []
        for token in range((row - self.is_sparse) * self.ratio, (row + 1) * self.ratio):
            if token < 0:
                continue
            own = token >= row * self.ratio
            half = slice(size, None) if self.is_sparse and own else slice(0, size)
            values.append(making[token, 0, half])
            gates.append(making[token, 1, half] + bias[token % self.ratio, half])
        return (torch.stack(values) * torch.stack(gates).softmax(0)).sum(0)

    def attended(self, sequence: int, position: int) -> Tensor:
        first = max(0, position + 1 - WINDOW)
        keys = list(self.kv[sequence][first : position + 1])
        rows = range((position + 1) // self.ratio)
        if self.is_sparse:
            score = {row: self._score(sequence, position, row) for row in rows}
            rows = sorted(rows, key=lambda row: -score[row])[:TOP]  # type: ignore[assignment]
        keys += [self.compressed(self.making[sequence], self.bias, row) for row in rows]
        k_ND = torch.stack(keys)
        score_HN = self.q[sequence][position] @ k_ND.T * SIZE**-0.5
        weight_HN = torch.cat([score_HN, self.sinks_H[:, None]], dim=1).softmax(-1)[:, :-1]
        return weight_HN @ k_ND

    def _score(self, sequence: int, position: int, row: int) -> float:
        key = self.compressed(self.index_making[sequence], self.index_bias, row)
        products = self.index_q[sequence][position] @ key
        return float((products.clamp(min=0) * self.index_weight[sequence][position]).sum())


class Layer:
    """One layer's memory, NaN where nobody wrote; sequence s has slot s + 1, and blocks in no order."""

    def __init__(self, of: Sequences, dtype: torch.dtype = torch.float32) -> None:
        self.of = of
        count = len(of.lengths)
        num_blocks = NUM_BLOCKS * count + 1
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.table_SN = order.int().view(count, NUM_BLOCKS)
        segment_rows = min(BLOCK, WINDOW - 1) + of.ratio
        ring_rows = segment_rows - 1 + SPARE
        self.window = LayerWindow(
            slots_SRD=torch.full((count + 1, ring_rows, SIZE), NAN, dtype=dtype),
            segments_KCD=torch.full((num_blocks, segment_rows, SIZE), NAN, dtype=dtype),
        )
        self.compressed, self.index = (self._rows(size, num_blocks, dtype) for size in (SIZE, INDEX_SIZE))

    def _rows(self, size: int, num_blocks: int, dtype: torch.dtype) -> LayerCompressed:
        times, ratio = 1 + self.of.is_sparse, self.of.ratio
        making_rows = times * ratio - 1 + SPARE
        return LayerCompressed(
            ratio=ratio,
            overlaps=self.of.is_sparse,
            rows_PBX=torch.full((num_blocks, BLOCK // ratio, size), NAN, dtype=dtype),
            making_SR2M=torch.full((len(self.of.lengths) + 1, making_rows, 2, times * size), NAN),
        )

    def forget(self, boundary: int) -> None:
        """Whatever is not in the first sequence's blocks before the boundary, or in segments."""
        self.window.slots_SRD.fill_(NAN)
        for rows in (self.compressed, self.index):
            rows.making_SR2M.fill_(NAN)
            rows.rows_PBX[self.table_SN[0, boundary // BLOCK :].long()] = NAN

    def step(
        self,
        chunks: Sequence[Chunk],
        *,
        restores: Sequence[Copy] = (),
        captures: Sequence[Copy] = (),
        store_from: int = 0,
    ) -> dict[tuple[int, int], Tensor]:
        """What each (sequence, position) attends to."""
        rows = self._step_rows(chunks, restores, captures, store_from)
        which = [(s, p) for s, start, end in chunks for p in range(start, end)]
        of, spans = self.of, spans_of(rows)

        def pick(per_token: list[Tensor]) -> Tensor:
            return torch.stack([per_token[s][p] for s, p in which])

        own_TD = pick(of.kv).to(self.window.slots_SRD.dtype)
        restore(self.window, rows)
        for kept, making, bias in (
            (self.compressed, pick(of.making), of.bias),
            (self.index, pick(of.index_making), of.index_bias),
        ):
            if (new := new_rows(kept, making, spans)) is not None:
                row_WX = compress(new.making_WK2M, bias, overlaps=kept.overlaps)
                kept.rows_PBX[new.block_W, new.offset_W] = row_WX.to(kept.rows_PBX.dtype)
            commit(kept.making_SR2M, making, spans)
        index = Index(q_THI=pick(of.index_q), weight_TH=pick(of.index_weight), top=TOP)
        queries = Queries(
            q_THD=pick(of.q),
            scale=SIZE**-0.5,
            window=WINDOW,
            sinks_H=of.sinks_H,
            index=index if of.is_sparse else None,
        )
        layer = LayerKept(window=self.window, compressed=self.compressed, index=self.index)
        out = attend(queries, own_TD, layer, spans)
        capture(self.window, own_TD, rows, spans)
        commit(self.window.slots_SRD, own_TD, spans)
        return dict(zip(which, out, strict=True))

    def _step_rows(
        self, chunks: Sequence[Chunk], restores: Sequence[Copy], captures: Sequence[Copy], store_from: int
    ) -> Rows:
        count = len(self.of.lengths)
        start_S = torch.zeros(count, dtype=torch.int32)
        for s, start, _ in chunks:
            start_S[s] = start
        which = [(s, p) for s, start, end in chunks for p in range(start, end)]
        sequence_T, position_T = torch.tensor(which, dtype=torch.int32).T.contiguous()
        return Rows(
            sequence_T=sequence_T,
            position_T=position_T,
            table_SN=self.table_SN,
            store_from_S=torch.full((count,), store_from, dtype=torch.int32),
            rings=RingRows(
                slot_S=torch.arange(1, count + 1, dtype=torch.int32),
                start_S=start_S,
                valid_from_S=torch.zeros(count, dtype=torch.int32),
                restores_C3=torch.tensor(restores, dtype=torch.int32).view(-1, 3),
                captures_C3=torch.tensor(captures, dtype=torch.int32).view(-1, 3),
            ),
        )


KINDS = pytest.mark.parametrize(("ratio", "is_sparse"), [(4, True), (2, True), (8, False), (16, False)])


def assert_right(of: Sequences, got: dict[tuple[int, int], Tensor]) -> None:
    for (sequence, position), attended in got.items():
        expected = of.attended(sequence, position)
        assert (attended - expected).abs().max() < 1e-5, (sequence, position)


@KINDS
@pytest.mark.parametrize("size", [1, 7, 90])
def test_chunks_of_any_size(ratio: int, is_sparse: bool, size: int) -> None:
    of = Sequences([90], ratio, is_sparse)
    layer = Layer(of)
    for start in range(0, 90, size):
        assert_right(of, layer.step([(0, start, min(90, start + size))]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), kind=st.sampled_from([(4, True), (8, False)]))
def test_any_batch_in_any_steps(seed: int, kind: tuple[int, bool]) -> None:
    draw = random.Random(seed)
    of = Sequences([draw.randint(1, 100) for _ in range(3)], *kind, seed=seed)
    layer, done = Layer(of), [0] * 3
    while any(at < length for at, length in zip(done, of.lengths, strict=True)):
        chunks: list[Chunk] = []
        for s in draw.sample(range(3), draw.randint(1, 3)):
            if done[s] < of.lengths[s]:
                end = min(of.lengths[s], done[s] + draw.choice([1, 2, 30]))
                chunks.append((s, done[s], end))
                done[s] = end
        if chunks:
            assert_right(of, layer.step(chunks))


@KINDS
def test_every_boundary_is_taken_up_from_blocks_and_segments_alone(ratio: int, is_sparse: bool) -> None:
    """Where stretches overlap the last one before a boundary is computed again; what is in blocks stays."""
    of = Sequences([90], ratio, is_sparse)
    layer, again = Layer(of), ratio if is_sparse else 0
    for boundary in range(BLOCK, 90, BLOCK):
        layer.step([(0, 0, 90)], captures=[(0, b, b // BLOCK) for b in range(BLOCK, 91, BLOCK)])
        kept = layer.compressed.rows_PBX[layer.table_SN[0, : boundary // BLOCK].long()].clone()
        layer.forget(boundary)
        restores = [(0, boundary, boundary // BLOCK)]
        got = layer.step([(0, boundary - again, 90)], restores=restores, store_from=boundary)
        assert_right(of, {(s, p): x for (s, p), x in got.items() if p >= boundary - again})
        assert torch.equal(kept, layer.compressed.rows_PBX[layer.table_SN[0, : boundary // BLOCK].long()])


@pytest.mark.parametrize("again", range(4))
def test_less_of_the_last_stretch_is_not_enough(again: int) -> None:
    of, boundary = Sequences([60], 4, is_sparse=True), 2 * BLOCK
    layer = Layer(of)
    layer.step([(0, 0, 60)], captures=[(0, boundary, 2)])
    layer.forget(boundary)
    got = layer.step([(0, boundary - again, 60)], restores=[(0, boundary, 2)], store_from=boundary)
    assert got[0, 59].isnan().any(), "of its first stretch's row a part was never there"


@pytest.mark.parametrize("again", [4, 5, 6, 7])
def test_more_than_the_last_stretch_does_no_harm(again: int) -> None:
    """As far as the ring and the segment reach."""
    of, boundary = Sequences([60], 4, is_sparse=True), 2 * BLOCK
    layer = Layer(of)
    layer.window = LayerWindow(
        slots_SRD=torch.full((2, WINDOW + 6, SIZE), NAN), segments_KCD=torch.full((5, WINDOW + 6, SIZE), NAN)
    )
    layer.step([(0, 0, 60)], captures=[(0, boundary, 2)])
    layer.forget(boundary)
    assert_right(
        of, layer.step([(0, boundary - again, 60)], restores=[(0, boundary, 2)], store_from=boundary)
    )


def test_a_step_may_end_before_what_is_not_there_already() -> None:
    """As where layers that are not stored are computed again from far before."""
    of, boundary = Sequences([60], 4, is_sparse=True), 2 * BLOCK
    layer = Layer(of)
    layer.step([(0, 0, 60)])
    rows = layer.compressed.rows_PBX.clone()
    for start in range(0, 60, 5):
        assert_right(of, layer.step([(0, start, start + 5)], store_from=boundary))
    assert torch.equal(rows[layer.table_SN[0, :2]], layer.compressed.rows_PBX[layer.table_SN[0, :2]])


def test_rows_that_are_taken_back_leave_no_trace() -> None:
    """Of a step of 1 + SPARE rows the first is kept, and what comes instead of the others is next."""
    of = Sequences([80], 4, is_sparse=True)
    other = Sequences([80], 4, is_sparse=True, seed=1)
    layer, position = Layer(of), 0
    while position + 1 + SPARE < 80:
        layer.of = _mixed(of, other, position + 1)
        layer.step([(0, position, position + 1 + SPARE)])
        layer.of = of
        position += 2
        captures = [(0, position, position // BLOCK)] if position % BLOCK == 0 else []
        assert_right(of, layer.step([(0, position - 1, position)], captures=captures))
    for boundary in range(BLOCK, position, BLOCK):
        layer.window.slots_SRD.fill_(NAN)
        restores = [(0, boundary, boundary // BLOCK)]
        assert_right(of, layer.step([(0, boundary - 4, 80)], restores=restores, store_from=boundary))


def _mixed(of: Sequences, other: Sequences, first: int) -> Sequences:
    """The tokens of `of`, from `first` on those of `other`."""
    mixed = Sequences(of.lengths, of.ratio, of.is_sparse)
    for name in ("q", "kv", "making", "index_making", "index_q", "index_weight"):
        ours, theirs = getattr(of, name)[0], getattr(other, name)[0]
        setattr(mixed, name, [torch.cat([ours[:first], theirs[first:]])])
    return mixed


def test_rows_are_rounded_before_they_are_read() -> None:
    of = Sequences([90], 4, is_sparse=True)
    at_once, by_one = Layer(of, torch.bfloat16), Layer(of, torch.bfloat16)
    expected = at_once.step([(0, 0, 90)])
    for p in range(90):
        got = by_one.step([(0, p, p + 1)])
        assert (got[0, p] - expected[0, p]).abs().max() < 1e-5


def test_of_equal_scores_the_first_are_chosen_and_what_is_not_seen_comes_last() -> None:
    rows = LayerCompressed(
        ratio=4, overlaps=True, rows_PBX=torch.zeros(2, 4, 2), making_SR2M=torch.zeros(1, 1, 2, 4)
    )
    rows.rows_PBX[1] = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    index = Index(q_THI=torch.ones(2, 1, 2), weight_TH=torch.ones(2, 1), top=3)
    span = Span(first=0, start=14, end=16, slot=0, valid_from=0, store_from=0, blocks_N=torch.tensor([1]))
    tile = Tile(span=span, start=14, end=16)
    is_seen = torch.tensor([[True, True, True, False], [True] * 4])
    assert choose(tile, rows, index, is_seen).tolist() == [[1, 0, 2], [3, 1, 0]]
    is_seen[0, 1:] = False
    assert choose(tile, rows, index, is_seen)[0, 0] == 0
