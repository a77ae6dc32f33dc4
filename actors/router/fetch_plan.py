"""Which stores a prompt's blocks and segments are to be fetched from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from shoal.actors.messages import EngineId, PrefixSource
from shoal.actors.router.whereabouts import Whereabouts
from shoal.kvstore.messages import StoreId

Holder = EngineId | StoreId


def plan_fetch(
    where: Whereabouts[Holder],
    blocks: Iterable[int],
    segments: Iterable[int],
    stores: Mapping[StoreId, int],
    own: StoreId | None,
) -> tuple[PrefixSource, ...]:
    """Few sources that together have what any has: the engine's own node's store as far as it goes, then
    whichever store has most of what is left.

    stores: the bits by which `where` knows them. Entries that no store has are left out.
    """
    left_blocks = {i: where.blocks[i] for i in blocks}
    left_segments = {i: where.segment(i) for i in segments}
    sources: list[PrefixSource] = []

    def has(store_id: StoreId) -> int:
        bit = stores[store_id]
        return sum(bool(held & bit) for left in (left_blocks, left_segments) for held in left.values())

    store_id = own if own in stores else None
    while left_blocks or left_segments:
        if store_id is None:
            store_id = max(stores, key=has, default=None)
            if store_id is None or not has(store_id):
                break
        taken_blocks = _take(left_blocks, stores[store_id])
        sources += _sources(store_id, taken_blocks, _take(left_segments, stores[store_id]))
        store_id = None
    return tuple(sources)


def _take(left: dict[int, int], bit: int) -> list[int]:
    taken = [i for i, held in left.items() if held & bit]
    for i in taken:
        del left[i]
    return taken


def _sources(store_id: StoreId, blocks: Sequence[int], segments: Sequence[int]) -> Iterator[PrefixSource]:
    """A source for each run of blocks, with their segments; an empty run for each segment beside them."""
    for first, end in _runs(blocks):
        within = tuple(i for i in segments if first <= i < end)
        yield PrefixSource(store_id=store_id, first=first, end=end, segments=within)
    beside = tuple(i for i in segments if i not in blocks)
    if beside:
        yield PrefixSource(store_id=store_id, first=beside[0], end=beside[0], segments=beside)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of ascending numbers: the first of each run of neighbours, and one more than its last."""
    gaps = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    starts = [0, *gaps, len(numbers)] if numbers else []
    for start, end in pairwise(starts):
        yield numbers[start], numbers[end - 1] + 1
