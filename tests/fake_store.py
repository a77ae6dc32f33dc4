"""Stores without processes, and what carries pieces between them and an engine's device, step by step."""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shoal.actors.engine.scheduler import Scheduler
from shoal.actors.engine.store_link import Device
from shoal.actors.engine.transfers import Fallback, Fetch, Piece, StoreView, WritePolicy
from shoal.actors.messages import PrefixSource, StoreId
from shoal.kvstore.block_hash import BlockKey, segment_key

OWN, OTHER = StoreId("store-own"), StoreId("store-other")

Bytes = dict[BlockKey, bytes]


def always(tokens: int, own: int, other: int) -> bool:
    return True


def view(
    write_policy: WritePolicy = "write_through",
    *,
    worth: Callable[[int, int, int], bool] = always,
    own: StoreId | None = OWN,
) -> StoreView:
    """Every piece has one byte."""
    return StoreView(bytes_per_block=1, bytes_per_segment=1, worth=worth, write_policy=write_policy, own=own)


@dataclass
class Stores:
    """What each store has. They outlive engines."""

    has: defaultdict[StoreId, Bytes] = field(default_factory=lambda: defaultdict(dict))

    def sources(self, keys: Sequence[BlockKey]) -> tuple[PrefixSource, ...]:
        """Of a prompt's blocks, as a router would know them."""
        return tuple(
            PrefixSource(
                store_id=store_id,
                first=i,
                end=i + (key in held),
                segments=(i,) if segment_key(key) in held else (),
            )
            for store_id, held in self.has.items()
            for i, key in enumerate(keys)
        )


@dataclass
class Landing:
    fetch: Fetch
    pieces: list[Piece]
    bytes: Bytes


class SizedDevice(Device, Protocol):
    def num_bytes(self, piece: Piece) -> int: ...


class Carrier:
    """Copies when it is told to, as threads beside an engine do at any time."""

    def __init__(self, scheduler: Scheduler, device: SizedDevice, stores: Stores) -> None:
        self._scheduler = scheduler
        self._device = device
        self._stores = stores
        self.saving: list[list[Piece]] = []
        self.fetching: list[Fetch] = []
        self.landing: list[Landing] = []

    def take(self, max_bytes: int = 1 << 40) -> None:
        """What there is to be done."""
        if pieces := self._scheduler.take_saves(max_bytes):
            self.saving.append(pieces)
        self.fetching += self._scheduler.take_fetches()

    def save(self, index: int = 0, *, lose: bool = False) -> None:
        """Copy pieces out; if they are lost on their way, the device is done with them all the same."""
        pieces = self.saving.pop(index)
        for piece in pieces:
            rows = np.empty(self._device.num_bytes(piece), dtype=np.uint8)
            self._device.copy_out([piece], rows)
            if not lose:
                self._stores.has[OWN][piece.key] = rows.tobytes()
        self._scheduler.saved(pieces)
        if lose:
            self._scheduler.not_saved([piece.key for piece in pieces])

    def land(self, index: int = 0, *, without: Container[BlockKey] = ()) -> None:
        """Bytes have come, but for what the stores do not have, and for what is lost or wrong."""
        fetch = self.fetching.pop(index)
        held = {key: self._stores.has[read.store_id].get(key) for read in fetch.reads for key in read.keys}
        came = {key: rows for key, rows in held.items() if rows is not None and key not in without}
        self.landing.append(Landing(fetch, self._scheduler.land(fetch.fetch_id, tuple(came)), came))

    def fail(self, index: int = 0, reason: Fallback = Fallback.DEADLINE) -> None:
        self._scheduler.fetch_failed(self.fetching.pop(index).fetch_id, reason)

    def copy(self, index: int = 0, *, fails: bool = False) -> None:
        """Bytes that came go to the device; a copy that fails has spoilt what it was to fill."""
        landing = self.landing.pop(index)
        for piece in landing.pieces:
            rows = np.frombuffer(landing.bytes[piece.key], dtype=np.uint8)
            self._device.copy_in([piece], rows ^ 255 if fails else rows)
        if fails:
            self._scheduler.fetch_failed(landing.fetch.fetch_id, Fallback.COPY_FAILED)
        else:
            self._scheduler.landed(landing.fetch.fetch_id)

    def run(self) -> None:
        """All that there is to be done, at once."""
        self.take()
        while self.saving:
            self.save()
        while self.fetching:
            self.land()
        while self.landing:
            self.copy()
