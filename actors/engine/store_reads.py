"""What one fetch reads from the stores: on a thread of its own, which may wait until the fetch's deadline."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shoal.actors.engine.transfers import Fallback, Fetch, StoreRead
from shoal.actors.messages import StoreId
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.checksum import checksum
from shoal.kvstore.messages import ReadExtent
from shoal.kvstore.transfer import BytesLost, Store, Transfer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one read from one store."""

    store_id: StoreId
    data: dict[BlockKey, np.ndarray] = field(default_factory=dict)
    """uint8 of each entry that came and is what was saved."""
    seconds: float = 0.0
    failure: Fallback | None = None
    """Why something is lacking, if anything is."""
    release: Callable[[], None] = lambda: None
    """To be called when the data has been read, or will not be."""

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self.data.values())


def read_all(
    fetch: Fetch,
    stores: Mapping[StoreId, Store],
    transfer: Transfer,
    *,
    own: StoreId | None,
    until: float,
    clock: Callable[[], float],
) -> list[Outcome]:
    """One outcome a read. `until` is a time of the clock; never raises for what a store does or is.

    The own node's store comes first: another that is silent may use up the time.
    """
    left = partial(_left, until, clock)
    reads = sorted(fetch.reads, key=lambda read: read.store_id != own)
    return [_read(read, stores.get(read.store_id), transfer, left, clock) for read in reads]


def _left(until: float, clock: Callable[[], float]) -> float:
    return until - clock()


def _read(
    wanted: StoreRead,
    store: Store | None,
    transfer: Transfer,
    left: Callable[[], float],
    clock: Callable[[], float],
) -> Outcome:
    outcome = Outcome(store_id=wanted.store_id)
    if store is None:
        outcome.failure = Fallback.STORE_LOST
        return outcome
    started = clock()
    try:
        _fill(outcome, wanted.keys, store, transfer, left)
    except (BytesLost, TimeoutError) as error:
        logger.warning("store %s cannot be read: %s", wanted.store_id, error)
        outcome.failure = Fallback.STORE_LOST if isinstance(error, BytesLost) else Fallback.DEADLINE
    outcome.seconds = clock() - started
    return outcome


def _fill(
    outcome: Outcome,
    keys: Sequence[BlockKey],
    store: Store,
    transfer: Transfer,
    left: Callable[[], float],
) -> None:
    reading = store.read(keys, left())
    outcome.release = lambda: store.release(reading.lease_id)
    extents = transfer.fetch([extent.ticket for extent in reading.extents], left())
    for extent, data in zip(reading.extents, extents, strict=True):
        outcome.data.update(_entries(extent, data))
    if outcome.data.keys() != set(keys):
        outcome.failure = Fallback.MISSING
    said = {entry.key for extent in reading.extents for entry in extent.entries}
    if damaged := said - outcome.data.keys():
        outcome.failure = Fallback.CHECKSUM
        store.discard(tuple(damaged))


def _entries(extent: ReadExtent, data: np.ndarray) -> Iterator[tuple[BlockKey, np.ndarray]]:
    """Those that are what was saved."""
    for entry in extent.entries:
        part = data[entry.offset : entry.offset + entry.size]
        if part.nbytes == entry.size and checksum(part) == entry.checksum:
            yield entry.key, part
