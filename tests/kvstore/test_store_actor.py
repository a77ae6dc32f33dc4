"""The store's process without Ray: what it does with engines that give, refuse, die or hang."""

import asyncio
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from shoal.kvstore.actor import StoreActor, check_budget
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId
from tests.ingress.virtual_time import run_in_virtual_time
from tests.kvstore.extents import UNIT, block, blocks


class Answer:
    """What a remote call returns: settled, or never."""

    def __init__(self, outcome: np.ndarray | Exception | None) -> None:
        self._future: Future[np.ndarray] = Future()
        if isinstance(outcome, Exception):
            self._future.set_exception(outcome)
        elif outcome is not None:
            self._future.set_result(outcome)

    def future(self) -> Future[np.ndarray]:
        return self._future


class FakeEngine:
    """Answers each export with the next of these; None is silence."""

    def __init__(self, *outcomes: np.ndarray | Exception | None) -> None:
        self._outcomes = list(outcomes)
        self.asked: list[tuple[BlockKey, ...]] = []

    @property
    def export(self) -> "FakeEngine":
        return self

    def remote(self, extent_id: str, keys: tuple[BlockKey, ...]) -> Answer:
        self.asked.append(keys)
        return Answer(self._outcomes.pop(0))


def bytes_of(num_entries: int) -> np.ndarray:
    return np.zeros(blocks("a", 0, num_entries).num_bytes, dtype=np.uint8)


def a_store() -> StoreActor:
    return StoreActor(StoreId("store-a"), 100 * UNIT)


async def keys_of(store: StoreActor) -> tuple[BlockKey, ...]:
    await store.check()
    return (await store.snapshot()).block_keys


def test_what_an_engine_offers_is_asked_for_once_and_found() -> None:
    async def offered() -> None:
        store, engine = a_store(), FakeEngine(bytes_of(2), bytes_of(1))
        await store.offer(engine, [blocks("a", 0, 2)])
        await store.offer(engine, [blocks("a", 0, 3, by="again"), blocks("a", 0, 2, by="once more")])
        assert engine.asked == [(block("a", 0), block("a", 1)), (block("a", 2),)]
        reading = await store.read([block("a", 2), block("b", 0)])
        assert [entry.key for extent in reading.extents for entry in extent.entries] == [block("a", 2)]
        await store.release(reading.lease_id)
        assert await store.used_bytes() == 3 * UNIT

    run_in_virtual_time(offered())


@pytest.mark.parametrize("outcome", [ActorDiedError(), bytes_of(1), None], ids=["dead", "short", "silent"])
def test_31_an_extent_that_does_not_come_leaves_nothing_and_the_next_one_comes(
    outcome: np.ndarray | Exception | None,
) -> None:
    async def offered() -> None:
        store, engine = a_store(), FakeEngine(outcome, bytes_of(2))
        await store.offer(engine, [blocks("a", 0, 2), blocks("b", 0, 2)])
        assert await keys_of(store) == (block("b", 0), block("b", 1))
        assert await store.used_bytes() == 2 * UNIT

    run_in_virtual_time(offered())


def test_an_engine_that_hangs_keeps_nobody_else_waiting() -> None:
    async def offered() -> None:
        store = a_store()
        hanging = asyncio.create_task(store.offer(FakeEngine(None), [blocks("a", 0, 2)]))
        await asyncio.sleep(0)
        await store.offer(FakeEngine(bytes_of(2)), [blocks("a", 0, 2, by="other")])
        assert await keys_of(store) == (block("a", 0), block("a", 1))
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        assert await store.used_bytes() == 2 * UNIT

    run_in_virtual_time(offered())


def test_damaged_entries_and_a_reset_take_keys_away() -> None:
    async def offered() -> None:
        store = a_store()
        await store.offer(FakeEngine(bytes_of(3)), [blocks("a", 0, 3)])
        await store.discard([block("a", 1)])
        assert await keys_of(store) == (block("a", 0), block("a", 2))
        await store.reset()
        assert await keys_of(store) == () and await store.used_bytes() == 0

    run_in_virtual_time(offered())


class FakeRouter:
    def __init__(self) -> None:
        self.reports: list[Any] = []

    @property
    def report_store(self) -> "FakeRouter":
        return self

    def remote(self, report: Any) -> Answer:
        self.reports.append(report)
        return Answer(np.empty(0))


def test_reports_are_numbered_and_true_on_top_of_a_snapshot() -> None:
    async def reported() -> None:
        store, router = a_store(), FakeRouter()
        reporting = asyncio.create_task(store._reporter.run())
        await store.introduce([router])
        await asyncio.sleep(1)
        await store.offer(FakeEngine(bytes_of(2)), [blocks("a", 0, 2)])
        snapshot = await store.snapshot()
        await asyncio.sleep(1)
        await store.discard([block("a", 1)])
        await asyncio.sleep(1)
        reporting.cancel()
        assert (snapshot.sequence, snapshot.block_keys) == (1, (block("a", 0), block("a", 1)))
        assert [(r.sequence, r.stored, r.removed) for r in router.reports] == [
            (1, (), ()),
            (2, (block("a", 0), block("a", 1)), ()),
            (3, (), (block("a", 1),)),
        ]

    run_in_virtual_time(reported())


def test_a_store_that_gives_the_same_away_again_has_its_news_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node was to go, stayed, and is to go once more."""
    monkeypatch.setattr("shoal.kvstore.actor.copied", lambda extent, wanted, ticket, timeout_s: ticket)

    async def given() -> None:
        store, first = a_store(), (blocks("a", 0, 2), "ticket")
        await store.take_in([first])
        await store.take_in([first, (blocks("b", 0, 1), "ticket")])
        assert await keys_of(store) == (block("a", 0), block("a", 1), block("b", 0))

    asyncio.run(given())


def test_a_budget_beyond_what_the_node_has_is_refused_with_the_numbers() -> None:
    check_budget(6 << 30, object_store_bytes=10 << 30, shared_memory_bytes=6 << 30)
    with pytest.raises(ValueError) as refused:
        check_budget(7 << 30, object_store_bytes=10 << 30, shared_memory_bytes=20 << 30)
    assert str(refused.value) == (
        "--kv-store-memory 7GiB is more than 60% of this node's Ray object store (10GiB): lower it, or give "
        "Ray's --object-store-memory at least 11.7GiB"
    )
    with pytest.raises(ValueError, match=r"more than /dev/shm has on this node \(5GiB\)"):
        check_budget(6 << 30, object_store_bytes=10 << 30, shared_memory_bytes=5 << 30)
