"""Reads from the stores what the scheduler's sequences lack, and copies it onto the device."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from shoal.actors.engine.rates import Rates
from shoal.actors.engine.store_reads import Outcome, read_all
from shoal.actors.engine.transfers import Fallback, Fetch, FetchId, Piece, Place
from shoal.actors.messages import StoreId
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.transfer import Store, Transfer

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 10.0
"""From when the scheduler named a fetch until its bytes are here; then its sequence is computed."""

MAX_FETCHES = 4
"""At a time: each has a thread that waits."""

MAX_BYTES = 256 << 20
"""At a time. A larger fetch runs alone."""

PAUSE_S = 5.0
"""A store that was lost or too slow is not asked for so long, or each request would wait for it."""


class FetchesWhat(Protocol):
    """The scheduler, which owns the device's blocks and segments."""

    def take_fetches(self) -> list[Fetch]: ...

    def land(self, fetch_id: FetchId, keys: Sequence[BlockKey]) -> list[Piece]:
        """Room for these, as far as they are of use and there is any; it stays until the fetch has ended."""
        ...

    def landed(self, fetch_id: FetchId) -> None:
        """The bytes of all that `land` gave are there."""
        ...

    def fetch_failed(self, fetch_id: FetchId, reason: Fallback) -> None: ...


class CopiesIn(Protocol):
    """The device's memory, on a thread of the copies' own, while steps run."""

    def copy_in(self, pieces: Sequence[Piece], data: np.ndarray) -> None:
        """data: uint8, their bytes, one piece behind the other."""
        ...


class Fetcher:
    """Some fetches at a time, the others in order behind them; no step waits for any.

        scheduler ──take_fetches──▶ read, verify ──land──▶ copy ──landed──▶ an ordinary hit
                                     │ nothing      │ no room  │ failed
                                     └──────────────┴──────────┴──fetch_failed──▶ computed instead

    Reads wait on the fetches' threads, copies on the copies' own; the rest is the engine's loop thread's.
    """

    def __init__(
        self,
        scheduler: FetchesWhat,
        device: CopiesIn,
        transfer: Transfer,
        rates: Rates,
        *,
        reads: Executor,
        copies: Executor,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """reads: has MAX_FETCHES threads. post: do something on the loop's thread."""
        self._scheduler = scheduler
        self._device = device
        self._transfer = transfer
        self._rates = rates
        self._reads = reads
        self._copies = copies
        self._post = post
        self._clock = clock
        self._stores: Mapping[StoreId, Store] = {}
        self._own: StoreId | None = None
        self._queue: deque[tuple[Fetch, float]] = deque()  # with the time at which it must be here
        self._in_flight: dict[FetchId, Fetch] = {}
        self._paused_until: dict[StoreId, float] = {}
        self.num_landed = 0
        """Fetches that brought something."""
        self.fetched_bytes: Counter[Place] = Counter()
        self.seconds: dict[Place, float] = {"own_store": 0.0, "other_store": 0.0}
        """Of reading, verifying and copying; fetches that run together count each."""
        self.failures: Counter[Fallback] = Counter()
        """Of reads that did not bring all that they should have."""

    @property
    def num_unfinished(self) -> int:
        """Fetches under way, and those that wait behind them."""
        return len(self._in_flight) + len(self._queue)

    def set_stores(self, stores: Mapping[StoreId, Store], own: StoreId | None) -> None:
        """Exactly these can be read; `own` is the one of this node."""
        self._stores, self._own = dict(stores), own
        self._paused_until = {s: until for s, until in self._paused_until.items() if s in stores}

    def advance(self) -> None:
        """Begin what is wanted and fits beside what is under way."""
        now = self._clock()
        self._queue.extend((fetch, now + DEADLINE_S) for fetch in self._scheduler.take_fetches())
        while self._queue and self._fits(self._queue[0][0]):
            fetch, until = self._queue.popleft()
            self._in_flight[fetch.fetch_id] = fetch
            stores = {
                store_id: store
                for store_id, store in self._stores.items()
                if self._paused_until.get(store_id, now) <= now
            }
            read = partial(
                read_all, fetch, stores, self._transfer, own=self._own, until=until, clock=self._clock
            )
            self._then(self._reads.submit(read), partial(self._read, fetch))

    def _fits(self, fetch: Fetch) -> bool:
        if not self._in_flight:
            return True
        others = sum(other.num_bytes for other in self._in_flight.values())
        return len(self._in_flight) < MAX_FETCHES and others + fetch.num_bytes <= MAX_BYTES

    def _read(self, fetch: Fetch, reading: Future[list[Outcome]]) -> None:
        outcomes, now = reading.result(), self._clock()
        for outcome in outcomes:
            if outcome.failure is not None:
                self.failures[outcome.failure] += 1
            # One that is passed over already is so no longer for that: steady requests would never ask it.
            is_paused = self._paused_until.get(outcome.store_id, now) > now
            if outcome.failure in (Fallback.STORE_LOST, Fallback.DEADLINE) and not is_paused:
                self._paused_until[outcome.store_id] = now + PAUSE_S
        data = {key: part for outcome in outcomes for key, part in outcome.data.items()}
        if not data:
            failures = (outcome.failure for outcome in outcomes if outcome.failure is not None)
            self._end(fetch, outcomes, next(failures, Fallback.MISSING))
            return
        pieces = self._scheduler.land(fetch.fetch_id, tuple(data))
        if not pieces:  # the scheduler has counted why
            self._end(fetch, outcomes, None)
            return
        copying = self._copies.submit(self._copy, [(piece, data[piece.key]) for piece in pieces])
        self._then(copying, partial(self._copied, fetch, outcomes))

    def _copy(self, pieces: Sequence[tuple[Piece, np.ndarray]]) -> float:
        """On the copies' thread; how long it took."""
        started = self._clock()
        for piece, data in pieces:
            self._device.copy_in([piece], data)
        return self._clock() - started

    def _copied(self, fetch: Fetch, outcomes: Sequence[Outcome], copying: Future[float]) -> None:
        if (error := copying.exception()) is not None:
            logger.error("a copy onto the device failed", exc_info=error)
            self._end(fetch, outcomes, Fallback.COPY_FAILED)
            return
        total = sum(outcome.num_bytes for outcome in outcomes)
        for outcome in outcomes:
            place: Place = "own_store" if outcome.store_id == self._own else "other_store"
            seconds = outcome.seconds + copying.result() * outcome.num_bytes / max(1, total)
            if outcome.failure is None:
                self._rates.measure(place, outcome.num_bytes, seconds)
            self.fetched_bytes[place] += outcome.num_bytes
            self.seconds[place] += seconds
        self.num_landed += 1
        self._end(fetch, outcomes, None)

    def _end(self, fetch: Fetch, outcomes: Sequence[Outcome], reason: Fallback | None) -> None:
        del self._in_flight[fetch.fetch_id]
        for outcome in outcomes:
            outcome.release()
        if reason is None:
            self._scheduler.landed(fetch.fetch_id)
        else:
            self._scheduler.fetch_failed(fetch.fetch_id, reason)
        self.advance()

    def _then(self, work: Future[T], done: Callable[[Future[T]], None]) -> None:
        """Take what work came to, on the loop's thread."""
        work.add_done_callback(lambda ended: self._post(partial(done, ended)))
