"""What a fetch brings, and that whatever is wrong with a store ends in computing, soon."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shoal.actors.engine.fetcher import DEADLINE_S, MAX_BYTES, MAX_FETCHES, PAUSE_S, Fetcher
from shoal.actors.engine.rates import Rates
from shoal.actors.engine.transfers import Fallback, Fetch, FetchId, Piece, StoreRead
from shoal.actors.messages import StoreId
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.checksum import checksum
from shoal.kvstore.messages import Extent, ReadExtent, Reading, StoredEntry
from shoal.kvstore.store import KVStore
from shoal.kvstore.transfer import BytesLost
from tests.engine.copies import BLOCK_BYTES, Clock, FakeCopies, Loop, Thread, a_block, content
from tests.kvstore.extents import block

OWN, OTHER = StoreId("own"), StoreId("other")


class FakeScheduler:
    def __init__(self) -> None:
        self.wanted: list[Fetch] = []
        self.room = 100
        self.landing: dict[FetchId, list[Piece]] = {}
        self.ended: dict[FetchId, Fallback | None] = {}

    def take_fetches(self) -> list[Fetch]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def land(self, fetch_id: FetchId, keys: Sequence[BlockKey]) -> list[Piece]:
        pieces = [a_block(key.decode()[0], int(key.decode()[1:])) for key in keys]
        self.landing[fetch_id] = sorted(pieces, key=lambda piece: piece.block)[: self.room]
        return self.landing[fetch_id]

    def landed(self, fetch_id: FetchId) -> None:
        assert fetch_id not in self.ended
        self.ended[fetch_id] = None

    def fetch_failed(self, fetch_id: FetchId, reason: Fallback) -> None:
        assert fetch_id not in self.ended
        self.ended[fetch_id] = reason


class FakeStore:
    """A store and the bytes behind its tickets, in one. What it does wrong is set by the test."""

    def __init__(self, clock: Clock, *paths: tuple[str, int]) -> None:
        self.clock = clock
        self.store: KVStore[np.ndarray] = KVStore(1 << 30, clock)
        self.error: Exception | None = None
        self.takes_s = 0.0
        self.damaged: set[BlockKey] = set()
        self.num_reads = 0
        for path, num_blocks in paths:
            self.put([block(path, i) for i in range(num_blocks)])

    def put(self, keys: Sequence[BlockKey]) -> None:
        data = np.concatenate([content(key, BLOCK_BYTES) for key in keys])
        parts = np.split(data, len(keys))
        entries = tuple(
            StoredEntry(
                key=key,
                parent=BlockKey(b"x"),
                offset=i * BLOCK_BYTES,
                size=BLOCK_BYTES,
                checksum=checksum(part),
            )
            for i, (key, part) in enumerate(zip(keys, parts, strict=True))
        )
        extent = Extent(extent_id=str(keys[0]), entries=entries, num_bytes=len(data))
        assert self.store.put_start(extent) is not None
        self.store.put_end(extent.extent_id, data)

    def read(self, keys: Sequence[BlockKey], timeout_s: float) -> Reading:
        self.num_reads += 1
        self.pass_time(timeout_s)
        return self.store.read(keys)

    def release(self, lease_id: int) -> None:
        self.store.release(lease_id)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        self.store.discard(keys)

    def pass_time(self, timeout_s: float) -> None:
        if self.takes_s > timeout_s:
            self.clock.now += max(0.0, timeout_s)
            raise TimeoutError("too slow")
        self.clock.now += self.takes_s
        if self.error is not None:
            raise self.error


class FakeTransfer:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.short = False
        self.damaged = False

    async def take_over(self, engine: object, extent: Extent, timeout_s: float) -> object:
        raise AssertionError("a reader takes nothing over")

    def fetch(self, tickets: Sequence[np.ndarray], timeout_s: float) -> list[np.ndarray]:
        if self.error is not None:
            raise self.error
        data = [ticket.copy() for ticket in tickets]
        if self.damaged:
            data[0][BLOCK_BYTES] ^= 1  # in the second block
        return [part[: BLOCK_BYTES + 1] for part in data] if self.short else data


class Desk:
    """A fetcher and all that is around it."""

    def __init__(self) -> None:
        self.clock, self.loop = Clock(), Loop()
        self.scheduler, self.device, self.transfer = FakeScheduler(), FakeCopies(), FakeTransfer()
        self.reads, self.copies = Thread(), Thread()
        self.own, self.other = FakeStore(self.clock, ("a", 4)), FakeStore(self.clock, ("b", 4))
        self.rates = Rates(lambda: 100.0, self.clock)
        self.fetcher = Fetcher(
            self.scheduler,
            self.device,
            self.transfer,
            self.rates,
            reads=self.reads,
            copies=self.copies,
            post=self.loop.post,
            clock=self.clock,
        )
        self.fetcher.set_stores({OWN: self.own, OTHER: self.other}, OWN)
        self._num_fetches = 0

    def fetch(self, *reads: tuple[StoreId, Sequence[BlockKey]], num_bytes: int = BLOCK_BYTES) -> FetchId:
        self._num_fetches += 1
        fetch = Fetch(
            fetch_id=FetchId(self._num_fetches),
            reads=tuple(StoreRead(store_id=s, keys=tuple(keys), num_bytes=num_bytes) for s, keys in reads),
        )
        self.scheduler.wanted.append(fetch)
        self.fetcher.advance()
        return fetch.fetch_id

    def finish(self) -> None:
        while self.reads.num_waiting or self.copies.num_waiting:
            (self.reads if self.reads.num_waiting else self.copies).run()
            self.loop.turn()

    def fetched(self, *reads: tuple[StoreId, Sequence[BlockKey]]) -> Fallback | None:
        """How a fetch ended: nothing wrong, or why it failed."""
        fetch_id = self.fetch(*reads)
        self.finish()
        for store in (self.own, self.other):
            store.store.check()
            assert not store.store._leases, "nothing is leased any more"
        return self.scheduler.ended[fetch_id]


def keys(path: str, num: int = 4, *, first: int = 0) -> list[BlockKey]:
    return [block(path, i) for i in range(first, num)]


def test_what_two_stores_have_is_copied_to_the_device() -> None:
    desk = Desk()
    assert desk.fetched((OWN, keys("a", 2)), (OTHER, keys("b", 3))) is None
    assert desk.device.device == {
        key: content(key, BLOCK_BYTES).tobytes() for key in [*keys("a", 2), *keys("b", 3)]
    }
    assert desk.fetcher.fetched_bytes == {"own_store": 2 * BLOCK_BYTES, "other_store": 3 * BLOCK_BYTES}
    assert not desk.fetcher.failures


def test_27_what_is_lacking_does_not_keep_the_rest_away() -> None:
    desk = Desk()
    desk.own.store.discard([block("a", 1)])
    assert desk.fetched((OWN, keys("a")), (StoreId("gone"), keys("c"))) is None
    assert desk.device.device.keys() == {block("a", i) for i in (0, 2, 3)}
    assert desk.fetcher.failures == {Fallback.MISSING: 1, Fallback.STORE_LOST: 1}


def test_nothing_at_all_is_a_failure() -> None:
    desk = Desk()
    assert desk.fetched((OWN, keys("c"))) is Fallback.MISSING
    assert desk.fetched((StoreId("gone"), keys("a"))) is Fallback.STORE_LOST


@pytest.mark.parametrize("error", [BytesLost("ActorDiedError"), TimeoutError()], ids=["dead", "silent"])
@pytest.mark.parametrize("when", ["asked", "read"])
def test_35_a_store_that_fails_is_not_asked_again_for_a_while(error: Exception, when: str) -> None:
    desk = Desk()
    if when == "asked":
        desk.other.error = error
    else:
        desk.transfer.error = error
    reason = Fallback.STORE_LOST if isinstance(error, BytesLost) else Fallback.DEADLINE
    assert desk.fetched((OTHER, keys("b"))) is reason
    desk.other.error = desk.transfer.error = None
    assert desk.fetched((OTHER, keys("b"))) is Fallback.STORE_LOST, "it would cost each request its deadline"
    assert desk.other.num_reads == 1
    assert desk.fetched((OWN, keys("a"))) is None
    desk.clock.now += PAUSE_S
    assert desk.fetched((OTHER, keys("b"))) is None


def test_a_store_that_failed_is_asked_again_however_often_others_are_told_that_it_is_passed_over() -> None:
    desk = Desk()
    desk.other.error = BytesLost("ActorDiedError")
    assert desk.fetched((OTHER, keys("b"))) is Fallback.STORE_LOST
    desk.other.error = None
    for _ in range(3):
        desk.clock.now += PAUSE_S / 4
        assert desk.fetched((OTHER, keys("b"))) is Fallback.STORE_LOST
    desk.clock.now += PAUSE_S / 4
    assert desk.fetched((OTHER, keys("b"))) is None


def test_a_slow_store_costs_no_more_than_the_deadline_and_nothing_of_what_the_own_one_has() -> None:
    desk = Desk()
    desk.other.takes_s = 3600.0
    assert desk.fetched((OTHER, keys("b")), (OWN, keys("a"))) is None
    assert desk.clock.now == DEADLINE_S and desk.device.device.keys() == set(keys("a"))
    desk.clock.now += PAUSE_S
    assert desk.fetched((OTHER, keys("b"))) is Fallback.DEADLINE


def test_waiting_for_others_counts_against_the_deadline() -> None:
    desk = Desk()
    first = desk.fetch((OWN, keys("a")), num_bytes=MAX_BYTES)
    second = desk.fetch((OWN, keys("a")))
    desk.clock.now = DEADLINE_S - 1
    desk.own.takes_s = 1.0
    desk.finish()
    assert desk.scheduler.ended == {first: None, second: Fallback.DEADLINE}


@pytest.mark.parametrize("what", ["damaged", "short"])
def test_34_damaged_bytes_never_reach_the_device_and_are_found_no_more(what: str) -> None:
    desk = Desk()
    setattr(desk.transfer, what, True)
    assert desk.fetched((OWN, keys("a"))) is None
    lost = {block("a", 1)} if what == "damaged" else {block("a", i) for i in (1, 2, 3)}
    assert desk.device.device.keys() == set(keys("a")) - lost
    assert set(desk.own.store.keys()) == set(keys("a")) - lost
    assert desk.fetcher.failures == {Fallback.CHECKSUM: 1}


def test_no_room_and_a_copy_that_fails_end_a_fetch() -> None:
    desk = Desk()
    desk.scheduler.room = 0
    assert desk.fetched((OWN, keys("a"))) is None
    assert not desk.device.device
    desk.scheduler.room = 3
    assert desk.fetched((OWN, keys("a"))) is None
    assert len(desk.device.device) == 3
    desk.device.failures = 1
    assert desk.fetched((OWN, keys("a"))) is Fallback.COPY_FAILED


def test_fetches_are_bounded_in_number_and_in_bytes_and_go_in_order() -> None:
    desk = Desk()
    for _ in range(MAX_FETCHES + 1):
        desk.fetch((OWN, keys("a")))
    assert desk.reads.num_waiting == MAX_FETCHES
    desk.finish()
    assert list(desk.scheduler.ended) == [1, 2, 3, 4, 5]
    desk.fetch((OWN, keys("a")), num_bytes=MAX_BYTES + 1)
    desk.fetch((OWN, keys("a")))
    assert desk.reads.num_waiting == 1, "a large one runs alone"
    desk.finish()
    assert desk.scheduler.ended == dict.fromkeys(range(1, 8))


def test_a_store_that_is_gone_while_a_fetch_waits_is_not_asked() -> None:
    desk = Desk()
    desk.fetch((OWN, keys("a")), num_bytes=MAX_BYTES)
    second = desk.fetch((OTHER, keys("b")))
    desk.fetcher.set_stores({OWN: desk.own}, OWN)
    desk.finish()
    assert desk.scheduler.ended[second] is Fallback.STORE_LOST


def test_rates_are_learnt_from_what_fetches_took() -> None:
    desk = Desk()
    before = desk.rates.bytes_per_s("own_store")
    desk.own.takes_s = 1.0
    assert desk.fetched((OWN, keys("a"))) is None
    assert desk.rates.bytes_per_s("own_store") < before
    assert desk.fetcher.seconds["own_store"] == 1.0


def test_an_entry_with_another_checksum_is_damaged() -> None:
    desk = Desk()
    reading = desk.own.store.read(keys("a", 1))
    (extent,) = reading.extents
    wrong = ReadExtent(
        entries=tuple(replace(entry, checksum=0) for entry in extent.entries), ticket=extent.ticket
    )
    desk.own.store.release(reading.lease_id)
    desk.own.read = lambda keys, timeout_s: replace(reading, extents=(wrong,))  # type: ignore[method-assign]
    assert desk.fetched((OWN, keys("a", 1))) is Fallback.CHECKSUM
