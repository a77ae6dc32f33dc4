"""An engine's connection to the stores: a saver, a fetcher, and the threads on which they copy and wait."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shoal.actors.engine.fetcher import MAX_FETCHES, CopiesIn, Fetcher, FetchesWhat
from shoal.actors.engine.rates import Rates
from shoal.actors.engine.saver import CopiesOut, Saver, SavesWhat
from shoal.actors.engine.staging import Staging
from shoal.actors.messages import EngineId, StoreId
from shoal.kvstore.messages import Extent
from shoal.kvstore.transfer import Store, Transfer

STAGING_BYTES = 64 << 20
"""Some extents; a store takes each over in milliseconds."""


class Scheduler(SavesWhat, FetchesWhat, Protocol):
    def use_store(self, own: StoreId | None) -> None:
        """The one of the engine's own node, from now on."""
        ...


class Device(CopiesOut, CopiesIn, Protocol):
    """The device's memory."""


class StoreLink:
    """All but `staging` belongs to the engine's loop thread."""

    def __init__(
        self,
        engine_id: EngineId,
        scheduler: Scheduler,
        device: Device,
        transfer: Transfer,
        rates: Rates,
        *,
        bytes_per_block: int,
        bytes_per_segment: int,
        post: Callable[[Callable[[], None]], None],
        offer: Callable[[Sequence[Extent]], None],
        clock: Callable[[], float],
    ) -> None:
        """post: do something on the loop's thread. offer: to the own store; the saver gets its answer."""
        self._scheduler = scheduler
        # One thread, so that copies take at most one core from the steps.
        copies = ThreadPoolExecutor(1, thread_name_prefix="engine-copies")
        reads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="engine-reads")
        self.staging = Staging(max(STAGING_BYTES, 2 * bytes_per_block, 2 * bytes_per_segment))
        self.saver = Saver(
            engine_id,
            scheduler,
            device,
            self.staging,
            bytes_per_block=bytes_per_block,
            bytes_per_segment=bytes_per_segment,
            copies=copies,
            post=post,
            offer=offer,
            clock=clock,
        )
        self.fetcher = Fetcher(
            scheduler, device, transfer, rates, reads=reads, copies=copies, post=post, clock=clock
        )

    def use_stores(self, stores: Mapping[StoreId, Store], own: StoreId | None) -> None:
        """Exactly these exist; `own` is the one of this node."""
        self._scheduler.use_store(own)
        self.saver.has_store = own is not None
        self.fetcher.set_stores(stores, own)

    def outstanding(self) -> dict[str, int]:
        """What moves, or waits to be moved: all 0 when idle."""
        return {
            "reads": self.fetcher.num_unfinished,
            "copies": int(self.saver.is_copying),
            "staged_bytes": self.staging.used_bytes,
        }

    def begin_fetches(self) -> None:
        self.fetcher.advance()

    def begin_saves(self) -> None:
        self.saver.advance()

    def forget_saves(self) -> None:
        self.saver.forget()
