"""Whole engines with a store between them, over real threads: what one has computed is another's hit."""

import queue
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shoal.actors.engine.rates import Rates
from shoal.actors.engine.store_link import StoreLink
from shoal.actors.engine.transfers import StoreView, WritePolicy
from shoal.actors.messages import CachedTokens, EngineId, PrefixSource, RequestId
from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.messages import Extent, Reading
from shoal.kvstore.store import KVStore
from tests.engine.bench import Bench, a_request
from tests.engine.copies import Clock
from tests.fake_runner import generate
from tests.fake_store import OTHER, OWN, always

PROMPT = list(range(100, 126))
"""Six blocks of four tokens and a half."""
BLOCK_BYTES = 16
"""Four tokens; of a segment, their state."""


class Node:
    """A store and the bytes behind its tickets, without processes."""

    def __init__(self, budget_bytes: int = 1 << 20) -> None:
        self.store: KVStore[np.ndarray] = KVStore(budget_bytes, Clock())

    def take(self, extents: Sequence[Extent], export: Callable[..., np.ndarray]) -> None:
        for extent in extents:
            if (wanted := self.store.put_start(extent)) is not None:
                self.store.put_end(wanted.extent_id, export(wanted.extent_id, wanted.keys).copy())
        self.store.check()

    def read(self, keys: Sequence[BlockKey], timeout_s: float) -> Reading:
        return self.store.read(keys)

    def release(self, lease_id: int) -> None:
        self.store.release(lease_id)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        raise AssertionError("nothing is damaged here")


class Memory:
    async def take_over(self, engine: object, extent: Extent, timeout_s: float) -> object:
        raise AssertionError("the node does")

    def fetch(self, tickets: Sequence[np.ndarray], timeout_s: float) -> list[np.ndarray]:
        return list(tickets)


class Linked:
    """An engine that saves to its node, and reads from it and from another."""

    def __init__(self, name: str, own: Node, other: Node, policy: WritePolicy = "write_through") -> None:
        view = StoreView(
            bytes_per_block=BLOCK_BYTES, bytes_per_segment=BLOCK_BYTES, worth=always, write_policy=policy
        )
        self.bench = Bench(window=6, num_blocks=40, num_segments=40, view=view)
        self._own = own
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.link = StoreLink(
            EngineId(name),
            self.bench.scheduler,
            self.bench.runner,
            Memory(),
            Rates(lambda: 0.0, Clock()),
            bytes_per_block=BLOCK_BYTES,
            bytes_per_segment=BLOCK_BYTES,
            post=self._posted.put,
            offer=self._offer,
            clock=Clock(),
        )
        self.link.use_stores({OWN: own, OTHER: other}, OWN)
        self.bench.engine.connect(self.link)

    def _offer(self, extents: Sequence[Extent]) -> None:
        self._own.take(extents, self.link.staging.export)
        self._posted.put(lambda: self.link.saver.offered(extents, taken=True))

    def submit(self, name: str, prompt: list[int], *, at: Sequence[tuple[PrefixSource, ...]] = ()) -> None:
        sources = tuple(source for where in at for source in where)
        self.bench.submit(a_request(name, prompt, 3, sources=sources))

    def run(self) -> None:
        """Until nothing is to be computed, and what became cached is saved."""
        engine = self.bench.engine
        while engine.has_work:
            if engine.can_step:
                self.bench.step()
            self._turn(wait=engine.has_work and not engine.can_step)
        engine.step()
        while self.link.saver.is_copying or self.link.staging.used_bytes:
            self._turn(wait=True)
        engine.check()

    def _turn(self, *, wait: bool) -> None:
        try:
            if wait:
                self.bench.engine.step()  # begins what is to be fetched
                self._posted.get(timeout=30)()
            while True:
                self._posted.get_nowait()()
        except queue.Empty:
            assert not wait or self._posted.empty()

    def sources(self, node: Node, name: str) -> tuple[PrefixSource, ...]:
        keys = self.bench.keys(PROMPT)
        segments = [segment_key(key) in node.store for key in keys]
        return tuple(
            PrefixSource(
                store_id=OWN if name == "own" else OTHER,
                first=i,
                end=i + (key in node.store),
                segments=(i,) * segments[i],
            )
            for i, key in enumerate(keys)
        )


@pytest.mark.parametrize("place", ["own", "other"])
def test_what_one_engine_computed_is_a_hit_of_another(place: str) -> None:
    here, there = Node(), Node()
    first = Linked("first", here, there)
    first.submit("it", PROMPT)
    first.run()
    assert len(here.store) == 14, "seven blocks, with what was drawn, and their state"
    second = Linked("second", here, there) if place == "own" else Linked("second", there, here)
    second.submit("it", PROMPT, at=[second.sources(here, place)])
    assert not second.bench.engine.can_step and second.bench.engine.has_work
    second.run()
    assert second.bench.tokens["it"] == generate(PROMPT, 3)
    expected = CachedTokens(own_store=24) if place == "own" else CachedTokens(other_store=24)
    assert second.bench.cached_by_place["it"] == expected
    assert place == "own" or len(there.store) >= 7, "what came from elsewhere is saved here too"
    assert second.bench.drained()


def test_others_run_while_a_prefix_is_fetched() -> None:
    here, there = Node(), Node()
    first = Linked("first", here, there)
    first.submit("it", PROMPT)
    first.run()
    second = Linked("second", here, there)
    second.submit("fetching", PROMPT, at=[second.sources(here, "own")])
    second.submit("computing", [1, 2, 3])
    assert second.bench.engine.can_step
    second.run()
    assert second.bench.tokens == {
        "fetching": generate(PROMPT, 3),
        "computing": generate([1, 2, 3], 3),
    }


def test_an_engine_whose_request_is_aborted_while_it_fetches_is_left_with_nothing() -> None:
    here, there = Node(), Node()
    first = Linked("first", here, there)
    first.submit("it", PROMPT)
    first.run()
    second = Linked("second", here, there)
    second.submit("gone", PROMPT, at=[second.sources(here, "own")])
    second.bench.engine.step()
    second.bench.engine.abort(RequestId("gone"), 1)
    second.submit("stays", [1, 2, 3])
    while second.bench.scheduler.num_fetches:
        second._turn(wait=True)
    second.run()
    assert second.bench.tokens["stays"] == generate([1, 2, 3], 3) and not second.bench.tokens["gone"]
    assert second.bench.drained()


def test_a_store_that_holds_all_has_nothing_copied_to_it_twice() -> None:
    here, there = Node(), Node()
    for name in ("first", "second"):
        linked = Linked(name, here, there)
        linked.submit("it", PROMPT, at=[linked.sources(here, "own")])
        linked.run()
    assert linked.link.saver.saved_bytes == 2 * BLOCK_BYTES, "the seventh block, and its state"
    assert here.store.counts.duplicate_extents == 2, "which it had not asked for"


def test_a_reset_reaches_what_is_on_its_way_to_the_store() -> None:
    here = Node()
    linked = Linked("it", here, Node())
    linked.submit("it", PROMPT)
    while linked.bench.engine.has_work:
        linked.bench.step()
    assert linked.link.saver.is_copying
    linked.bench.engine.reset_prefix_cache()
    linked.run()
    assert len(here.store) == 0
    assert linked.bench.drained()
