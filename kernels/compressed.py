"""Attention to a window of rows and, behind it, to rows that stand for several tokens each: plain torch.

This is the state of DeepSeek V4. Each token has one row, key and value of all heads alike, of which a ring
keeps the last ones. Every `ratio` tokens, a stretch, become one compressed row, which stays in a block: the
sum of their values, weighted by a softmax of their gates. Where stretches overlap a row is made of two, its
own and the one before. A query sees its window and the rows of all stretches that have ended; if it is to
choose among these, the ones that its index scores highest.

Letters beside those of backend.py: R rows of a ring, X what a row has, M values of a token before they are
compressed, W compressed rows, I size of an index row, C rows of a segment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.backend import Rows

TILE_ROWS = 64
TILE_SCORES = 1 << 24
"""A tile of queries has so many rows at most, and so many scores if it has several."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """The rows of one sequence in a step: they are neighbours, and those of positions start to end - 1."""

    first: int
    """Of the step's rows."""
    start: int
    end: int
    slot: int
    valid_from: int
    store_from: int
    blocks_N: Tensor
    """int64: the sequence's block table"""

    def rows(self, start: int, end: int) -> slice:
        """Of the step, those of positions start to end - 1."""
        return slice(self.first + start - self.start, self.first + end - self.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWindow:
    slots_SRD: Tensor
    """The row of position p lies at p % R."""
    segments_KCD: Tensor | None
    """The last C rows before a boundary, in order of their positions. None: the layer is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCompressed:
    ratio: int
    """Divides the tokens of a block."""
    overlaps: bool
    """Whether a row is made of two stretches; then M is twice the size of a row, first what a token gives to
    the stretch after its own."""
    rows_PBX: Tensor
    """Row w of a sequence is row w % B of its block w // B."""
    making_SR2M: Tensor
    """float32, values and gates of the last tokens, in a ring: what the next rows will be made of."""

    @property
    def num_tokens(self) -> int:
        """Of which a row is made."""
        return self.ratio * (1 + self.overlaps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerKept:
    """All that a layer keeps."""

    window: LayerWindow
    compressed: LayerCompressed | None = None
    index: LayerCompressed | None = None
    """By which queries choose compressed rows: as many, made of the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """By what each query chooses `top` compressed rows, if there are more."""

    q_THI: Tensor
    weight_TH: Tensor
    """A row's score is the sum over heads of weight * max(0, q @ its index row)."""
    top: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queries:
    q_THD: Tensor
    scale: float
    window: int
    """A row at position p sees positions p - window + 1 to p."""
    sinks_H: Tensor
    """float32, of each head a logit that takes its share of the softmax and has no value"""
    index: Index | None = None
    """None sees all compressed rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRows:
    """What the stretches that end in a step are to be made of, those of all its sequences."""

    making_WK2M: Tensor
    """Of each one's tokens; before the sequence's first there are values of 0, gates of minus infinity."""
    position_W: Tensor
    """int64: of each stretch's first token"""
    block_W: Tensor
    offset_W: Tensor
    """int64: where the rows go"""


def spans_of(rows: Rows) -> tuple[Span, ...]:
    rings = rows.needed_rings
    sequence_S, count_S = torch.unique_consecutive(rows.sequence_T, return_counts=True)
    starts, slots, valid_from = (x.tolist() for x in (rings.start_S, rings.slot_S, rings.valid_from_S))
    store_from = [0] * len(starts) if rows.store_from_S is None else rows.store_from_S.tolist()
    table_SN, first, spans = rows.table_SN.long(), 0, []
    for sequence, count in zip(sequence_S.tolist(), count_S.tolist(), strict=True):
        start = starts[sequence]
        spans.append(
            Span(
                first=first,
                start=start,
                end=start + count,
                slot=slots[sequence],
                valid_from=valid_from[sequence],
                store_from=store_from[sequence],
                blocks_N=table_SN[sequence],
            )
        )
        first += count
    return tuple(spans)


def restore(window: LayerWindow, rows: Rows) -> None:
    """Copy the segments that the step restores to the rings, as far as these reach back from its rows."""
    if window.segments_KCD is None:
        return
    rings, num_rows = rows.needed_rings, window.slots_SRD.shape[1]
    for sequence, boundary, segment in rings.restores_C3.tolist():
        start, first = int(rings.start_S[sequence]), boundary - window.segments_KCD.shape[1]
        position_N = torch.arange(max(0, first, start - num_rows), min(boundary, start))
        ring_RD = window.slots_SRD[int(rings.slot_S[sequence])]
        ring_RD[position_N % num_rows] = window.segments_KCD[segment, position_N - first]


def capture(window: LayerWindow, own_TD: Tensor, rows: Rows, spans: Sequence[Span]) -> None:
    """Fill the segments that the step names, from the ring as it was before and the step's own rows."""
    if window.segments_KCD is None:
        return
    by_slot = {span.slot: span for span in spans}
    rings = rows.needed_rings
    for sequence, boundary, segment in rings.captures_C3.tolist():
        span = by_slot[int(rings.slot_S[sequence])]
        into_CD = window.segments_KCD[segment]
        kept = min(boundary, len(into_CD))
        into_CD[: len(into_CD) - kept] = 0  # before the first position
        into_CD[len(into_CD) - kept :] = last_rows(window.slots_SRD, own_TD, span, boundary - kept, boundary)


def commit(ring_SRX: Tensor, own_TX: Tensor, spans: Sequence[Span]) -> None:
    """Write each sequence's last rows of the step to its ring."""
    num_rows = ring_SRX.shape[1]
    for span in spans:
        first = max(span.start, span.end - num_rows)
        position_N = torch.arange(first, span.end)
        ring_SRX[span.slot, position_N % num_rows] = own_TX[span.rows(first, span.end)]


def last_rows(ring_SRX: Tensor, own_TX: Tensor, span: Span, first: int, end: int) -> Tensor:
    """Of positions first to end - 1, from the ring what lies before the step's."""
    own_NX = own_TX[span.rows(max(first, span.start), max(end, span.start))]
    if first >= span.start:
        return own_NX
    position_N = torch.arange(first, min(span.start, end)) % ring_SRX.shape[1]
    return torch.cat([ring_SRX[span.slot, position_N], own_NX])


def new_rows(compressed: LayerCompressed, own_T2M: Tensor, spans: Sequence[Span]) -> NewRows | None:
    """None if no stretch ends in the step whose row is not there already."""
    ratio, rows_per_block = compressed.ratio, compressed.rows_PBX.shape[1]
    making, rows, blocks = [], [], []
    for span in spans:
        first, end = max(span.start, span.store_from) // ratio, span.end // ratio
        if first < end:
            row_W = torch.arange(first, end)
            making.append(_making(compressed, own_T2M, span, row_W))
            rows.append(row_W)
            blocks.append(span.blocks_N[row_W // rows_per_block])
    if not rows:
        return None
    row_W = torch.cat(rows)
    return NewRows(
        making_WK2M=torch.cat(making),
        position_W=row_W * ratio,
        block_W=torch.cat(blocks),
        offset_W=row_W % rows_per_block,
    )


def _making(compressed: LayerCompressed, own_T2M: Tensor, span: Span, row_W: Tensor) -> Tensor:
    """[W, K, 2, M], K tokens of each row."""
    ratio, num_tokens = compressed.ratio, compressed.num_tokens
    end = int(row_W[-1] + 1) * ratio
    begin = int(row_W[0] + 1) * ratio - num_tokens
    token_N2M = last_rows(compressed.making_SR2M, own_T2M, span, max(0, begin), end)
    if begin < 0:
        nothing = token_N2M.new_zeros(-begin, *token_N2M.shape[1:])
        nothing[:, 1] = -torch.inf
        token_N2M = torch.cat([nothing, token_N2M])
    return token_N2M.unfold(0, num_tokens, ratio).movedim(-1, 1)


def compress(making_WK2M: Tensor, bias_KM: Tensor, *, overlaps: bool) -> Tensor:
    """The rows, [W, X], before they are normed. bias_KM: added to the gates, by place in the stretch."""
    value_WKM, gate_WKM = making_WK2M.unbind(2)
    if not overlaps:
        return _weighted(value_WKM, gate_WKM + bias_KM)
    ratio, size = bias_KM.shape[0], bias_KM.shape[1] // 2
    gate_WKM = gate_WKM + bias_KM.repeat(2, 1)
    value_WKX, gate_WKX = (
        torch.cat([x[:, :ratio, :size], x[:, ratio:, size:]], dim=1) for x in (value_WKM, gate_WKM)
    )
    return _weighted(value_WKX, gate_WKX)


def _weighted(value_WKX: Tensor, gate_WKX: Tensor) -> Tensor:
    return (value_WKX * gate_WKX.softmax(1)).sum(1)


def attend(queries: Queries, own_TD: Tensor, kept: LayerKept, spans: Sequence[Span]) -> Tensor:
    """float32 [T, H, D]: softmax(scale * q @ k.T) @ k over what each row sees, one head's k being all heads'.

    That are rows of its own sequence: those in its window, and the compressed ones of stretches that ended at
    its position or before.
    """
    out_THD = torch.empty_like(queries.q_THD)
    for span in spans:
        for tile in _tiles(span, kept.compressed, num_heads=out_THD.shape[1]):
            keys = [_in_window(tile, own_TD, kept.window, queries.window)]
            if kept.compressed is not None and tile.end >= kept.compressed.ratio:
                keys.append(_ended(tile, kept.compressed, kept.index, queries.index))
            out_THD[tile.rows] = _over(queries, tile, keys)
    return out_THD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """Some neighbouring rows of a span."""

    span: Span
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return self.span.rows(self.start, self.end)

    @property
    def position_T1(self) -> Tensor:
        return torch.arange(self.start, self.end)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Keys:
    """What a tile attends to."""

    k_ND: Tensor
    """float32, the same rows for all of the tile, or [T, N, D]"""
    is_seen_TN: Tensor


def _tiles(span: Span, compressed: LayerCompressed | None, *, num_heads: int) -> Iterator[Tile]:
    num_keys = span.end // compressed.ratio if compressed is not None else 0
    size = max(1, min(TILE_ROWS, TILE_SCORES // (num_heads * max(1, num_keys))))
    for start in range(span.start, span.end, size):
        yield Tile(span=span, start=start, end=min(span.end, start + size))


def _in_window(tile: Tile, own_TD: Tensor, window: LayerWindow, size: int) -> _Keys:
    first = max(0, tile.start + 1 - size)
    if window.segments_KCD is None:  # then nobody has restored what lies before
        first = max(first, tile.span.valid_from)
    position_N = torch.arange(first, tile.end)
    return _Keys(
        k_ND=last_rows(window.slots_SRD, own_TD, tile.span, first, tile.end).float(),
        is_seen_TN=(position_N <= tile.position_T1) & (position_N > tile.position_T1 - size),
    )


def _ended(
    tile: Tile, compressed: LayerCompressed, index_rows: LayerCompressed | None, index: Index | None
) -> _Keys:
    num_seen_T1, num_ended = (tile.position_T1 + 1) // compressed.ratio, tile.end // compressed.ratio
    row_N = torch.arange(num_ended)
    if index is not None and index_rows is not None and num_ended > index.top:
        row_N = choose(tile, index_rows, index, row_N < num_seen_T1)
    return _Keys(k_ND=_rows_of(compressed, tile.span, row_N), is_seen_TN=row_N < num_seen_T1)


def choose(tile: Tile, rows: LayerCompressed, index: Index, is_seen_TN: Tensor) -> Tensor:
    """int64 [T, top]: of each query the rows with the highest scores, of equal ones the first. Behind them
    come rows that it does not see, if it sees fewer."""
    k_NI = _rows_of(rows, tile.span, torch.arange(is_seen_TN.shape[1]))
    score_THN = (index.q_THI[tile.rows] @ k_NI.T).relu_()
    score_TN = (score_THN * index.weight_TH[tile.rows, :, None]).sum(1)
    score_TN = score_TN.masked_fill(~is_seen_TN, -torch.inf)
    return score_TN.sort(dim=-1, descending=True, stable=True).indices[:, : index.top]


def _rows_of(compressed: LayerCompressed, span: Span, row: Tensor) -> Tensor:
    rows_per_block = compressed.rows_PBX.shape[1]
    return compressed.rows_PBX[span.blocks_N[row // rows_per_block], row % rows_per_block].float()


def _over(queries: Queries, tile: Tile, keys: Sequence[_Keys]) -> Tensor:
    q_THD = queries.q_THD[tile.rows]
    scores = [
        (q_THD @ some.k_ND.mT * queries.scale).masked_fill(~some.is_seen_TN[:, None], -torch.inf)
        for some in keys
    ]
    sink_TH1 = queries.sinks_H[:, None].expand(len(q_THD), -1, 1)
    weights_THN = torch.cat([*scores, sink_TH1], dim=-1).softmax(-1)
    out_THD, first = torch.zeros_like(q_THD), 0
    for some, score_THN in zip(keys, scores, strict=True):
        out_THD += weights_THN[:, :, first : first + score_THN.shape[2]] @ some.k_ND
        first += score_THN.shape[2]
    return out_THD
