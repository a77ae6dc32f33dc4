"""What moves between the device and the stores: the terms that scheduler, runner and those who copy share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType, get_args

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.messages import CachedTokens, StoreId
from shoal.kvstore.block_hash import BlockKey

FetchId = NewType("FetchId", int)
"""Unique within one engine process."""

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

Place = Literal["own_store", "other_store"]
"""Of what was fetched: the engine's own node's store, or another node's."""

PLACES: tuple[Place, ...] = get_args(Place)


def tokens_by_place(places: Sequence[Place | None], block_size: int, num_tokens: int) -> CachedTokens:
    """places: of each block; None is the device, on which it was before. Of the last block those beyond
    `num_tokens` in all do not count."""
    counts = {place: places.count(place) * block_size for place in (None, *PLACES)}
    if places:
        counts[places[-1]] -= len(places) * block_size - num_tokens
    return CachedTokens(device=counts[None], own_store=counts["own_store"], other_store=counts["other_store"])


class Fallback(StrEnum):
    """Why a prefix that a store was said to have is computed after all."""

    DEADLINE = "deadline"
    STORE_LOST = "store_lost"
    CHECKSUM = "checksum"
    MISSING = "missing"
    """Something did not come, so that the boundary is nearer, or there is none."""
    NO_ROOM = "no_room"
    """The device's memory was in use."""
    EVICTED = "evicted"
    """It had come, and had to give way before its sequence was admitted."""
    COPY_FAILED = "copy_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block or a state segment of the device, and the name that its bytes have everywhere."""

    key: BlockKey
    """Of the block; of a segment `segment_key` of it."""
    parent: BlockKey
    """What it is of no use without: the block before a block, the block of a segment."""
    block: BlockId = NO_BLOCK
    segment: BlockId = NO_BLOCK
    """Exactly one of the two is given."""
    kept: bool = True
    """False for segments of boundaries to which nobody is likely to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRead:
    store_id: StoreId
    keys: tuple[BlockKey, ...]
    """Of blocks, parents first, then of segments."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What one sequence lacks, by the stores that are said to have it.

    Whoever takes it ends it by exactly one call of `landed` or `fetch_failed`, also if `land` gave no piece.
    """

    fetch_id: FetchId
    reads: tuple[StoreRead, ...]

    @property
    def num_bytes(self) -> int:
        return sum(read.num_bytes for read in self.reads)

    @property
    def asked_for(self) -> frozenset[tuple[BlockKey, StoreId]]:
        return frozenset((key, read.store_id) for read in self.reads for key in read.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """Since the engine began."""

    fallbacks: Mapping[Fallback, int]
    fetched_tokens: Mapping[Place, int]
    num_unsaved: int
    """Pieces that were to be saved and had to be evicted before anybody took them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """What a scheduler must know of the stores."""

    bytes_per_block: int
    bytes_per_segment: int
    worth: Callable[[int, int, int], bool]
    """(tokens, bytes of the own node's store, of others): are they fetched sooner than computed?"""
    write_policy: WritePolicy = "write_through"
    own: StoreId | None = None
    """The engine's own node's; None while there is none."""
