"""The store against a small model: whatever happens, what is found is what was put, and the books agree."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent
from shoal.kvstore.store import KVStore, cost
from tests.kvstore.extents import UNIT, block, blocks, segment, segments

BUDGET = 6
LEASE_S = 10.0

paths = st.sampled_from(["a", "a:b", "c"])
indices = st.integers(0, 4)


class StoreMachine(RuleBasedStateMachine):
    coming = Bundle("coming")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store: KVStore[Extent] = KVStore(BUDGET * UNIT, lambda: self.now, lease_s=LEASE_S)
        self.num_offered = self.offered_before_reset = 0
        self.reported: set[BlockKey] = set()
        self.leased: dict[int, tuple[float, set[str]]] = {}

    @rule(target=coming, path=paths, first=indices, length=st.integers(1, 3), of=st.sampled_from("bsi"))
    def offer(self, path: str, first: int, length: int, of: str) -> Any:
        self.num_offered += 1
        if of == "b":
            extent = blocks(path, first, first + length, by=f"engine {self.num_offered}")
        else:
            extent = segments(path, range(first, first + length), kept=of == "s")
        extent = _named(extent, f"{self.num_offered}")
        lacking = [key for key in extent.keys if key not in self.store]
        evicted_before, used_before = self.store.counts.evicted_bytes, self.store.used_bytes
        wanted = self.store.put_start(extent)
        if wanted is None:
            assert not lacking or self.store.counts.refused_extents
            assert self.store.counts.evicted_bytes == evicted_before, "room was made for nobody"
            return multiple()
        assert list(wanted.keys) == lacking
        if self.store.counts.evicted_bytes > evicted_before:
            assert used_before + cost(wanted) > self.store.budget_bytes, "there was room"
            assert self.store.used_bytes > self.store.budget_bytes - 3 * UNIT, "more went than was needed"
        return wanted

    @rule(extent=consumes(coming), whole=st.booleans())
    def end(self, extent: Extent, whole: bool) -> None:
        before = self.store.keys()
        if whole:
            self.store.put_end(extent.extent_id, extent)
            if int(extent.extent_id) <= self.offered_before_reset:
                assert self.store.keys() == before, "what was made before a reset is found after it"
        else:
            self.store.put_abort(extent.extent_id)

    @rule(path=paths, first=indices, length=st.integers(1, 5))
    def read(self, path: str, first: int, length: int) -> None:
        wanted = [block(path, i) for i in range(first, first + length)]
        here = self.store.find(wanted)
        assert [wanted[i] for i in here.blocks] == [key for key in wanted if key in self.store]
        assert [first + i for i in here.segments] == [
            i for i in range(first, first + length) if segment(path, i) in self.store
        ]
        reading = self.store.read(wanted)
        found = [entry.key for extent in reading.extents for entry in extent.entries]
        assert sorted(found) == sorted(key for key in wanted if key in self.store)
        self.leased[reading.lease_id] = (
            self.now + LEASE_S,
            {extent.ticket.extent_id for extent in reading.extents},
        )

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        lease_id = (*self.leased, 99)[min(which, len(self.leased))]
        self.leased.pop(lease_id, None)
        self.store.release(lease_id)

    @rule(path=paths, index=indices)
    def discard(self, path: str, index: int) -> None:
        self.store.discard([block(path, index)])
        assert block(path, index) not in self.store
        self.leased.clear()  # what is discarded is gone, leased or not

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.leased.clear()
        self.offered_before_reset = self.num_offered

    @rule()
    def report(self) -> None:
        stored, removed = self.store.changes.take()
        assert not set(stored) & set(removed)
        self.reported.update(stored)
        self.reported.difference_update(removed)
        assert self.reported == set(self.store.keys())

    @invariant()
    def the_books_agree(self) -> None:
        self.store.check()

    @invariant()
    def what_is_found_is_what_was_put(self) -> None:
        for held in self.store._held.values():
            assert held.extent.entries == held.ticket.entries

    @invariant()
    def what_is_leased_stays(self) -> None:
        for until, extent_ids in self.leased.values():
            assert until <= self.now or extent_ids <= self.store._held.keys()


def _named(extent: Extent, name: str) -> Extent:
    return Extent(extent_id=name, entries=extent.entries, num_bytes=extent.num_bytes, kept=extent.kept)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStoreMachine = StoreMachine.TestCase
