"""A node's KV store as a process: a door to what it holds, and the owner of the bytes."""

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent, Found, Reading, StoreId, StoreInfo, StoreReport, StoreSnapshot
from shoal.kvstore.metrics import METRICS_INTERVAL_S, NO_LABELS, Labels, Metrics, name_for_people
from shoal.kvstore.object_store import ObjectStore, copied
from shoal.kvstore.outstanding import Outstanding
from shoal.kvstore.reporter import Reporter
from shoal.kvstore.sizes import format_size
from shoal.kvstore.store import KVStore, cost
from shoal.kvstore.store_metrics import store_metrics
from shoal.kvstore.transfer import BytesLost

logger = logging.getLogger(__name__)

TAKE_OVER_DEADLINE_S = 10.0
"""For one extent. An engine that hangs keeps its own offers waiting, and nobody else's."""

MAX_BUDGET_SHARE = 0.6
"""Of the node's object store. The rest is for what others keep there: copies that fetches leave on their
reader's node, objects that are being made, Ray's own. Over its size Ray would write to disk."""

SHARED_MEMORY = "/dev/shm"


class StoreActor:
    """Engines of its node offer; engines of all nodes read. It never waits for a reader, and knows none."""

    def __init__(self, store_id: StoreId, budget_bytes: int, labels: Labels = NO_LABELS) -> None:
        """labels: of its metrics."""
        self._store_id = store_id
        self._labels = labels
        self._store: KVStore[Any] = KVStore(budget_bytes, time.monotonic)
        self._transfer = ObjectStore()
        self._sequence = 0
        self._num_taken_in = 0
        self._reporter = Reporter(
            self._take_report, lambda router, report: router.report_store.remote(report)
        )
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return name_for_people(self._store_id, self._labels)

    async def start(self) -> StoreInfo:
        """Raises ValueError if the node has no room for the budget."""
        node = ray.get_runtime_context().get_node_id()
        check_budget(
            self._store.budget_bytes,
            object_store_bytes=_object_store_bytes(node),
            shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total,
        )
        if not self._tasks:  # whoever asks again, as a restarted supervisor does, starts nothing twice
            runs = (self._reporter.run(), self._publish_metrics())
            self._tasks = [asyncio.create_task(run) for run in runs]
        return StoreInfo(store_id=self._store_id, node=node, budget_bytes=self._store.budget_bytes)

    async def ping(self) -> None:
        """Answers while the process lives."""

    async def introduce(self, routers: Sequence[Any]) -> None:
        """Report to these routers, which may know nothing yet."""
        self._reporter.introduce(routers)

    async def offer(self, engine: Any, extents: Sequence[Extent]) -> None:
        """Take over what is lacking of what an engine has staged; returns when it needs to be staged no more.

        The engine must have started them under these ids; the store calls its `export`.
        """
        for extent in extents:
            wanted = self._store.put_start(extent)
            if wanted is not None:
                await self._take_over(engine, wanted)

    async def evacuate(self, to: Sequence[Any]) -> None:
        """Give other stores, on nodes that stay, what was used last: this node is to go. What builds upon
        something goes where that does. One that fails is passed over: its share is computed again."""
        shares: list[list[tuple[Extent, Any]]] = [[] for _ in to]
        where: dict[BlockKey, int] = {}
        for number, (extent, ticket) in enumerate(self._store.hottest(self._store.budget_bytes)):
            share = where.get(extent.parent, number % len(to))
            where |= dict.fromkeys(extent.keys, share)
            shares[share].append((extent, ticket))
        taken = await asyncio.gather(
            *(store.take_in.remote(share) for store, share in zip(to, shares, strict=True) if share),
            return_exceptions=True,
        )
        for error in taken:
            if isinstance(error, BaseException):
                logger.warning("a store did not take in what this one had: %s", type(error).__name__)

    async def take_in(self, extents: Sequence[tuple[Extent, Any]]) -> None:
        """Copy what another store gives away, the most wanted first, into at most half of our own room: what
        is here is wanted too."""
        left = self._store.budget_bytes // 2
        self._num_taken_in += 1  # a store that stayed after all may give the same again
        for extent, ticket in extents:
            left -= cost(extent)
            if left < 0:
                break
            named = replace(extent, extent_id=f"{self._store_id}/{self._num_taken_in}/{extent.extent_id}")
            wanted = self._store.put_start(named)
            if wanted is None:
                continue
            try:
                kept = await asyncio.to_thread(copied, extent, wanted, ticket, TAKE_OVER_DEADLINE_S)
            except (BytesLost, TimeoutError) as error:
                logger.warning("extent %s did not come: %s", extent.extent_id, error or type(error).__name__)
                self._store.put_abort(named.extent_id)
            except BaseException:
                self._store.put_abort(named.extent_id)
                raise
            else:
                self._store.put_end(named.extent_id, kept)
            self._reporter.has_news()

    async def find(self, keys: Sequence[BlockKey]) -> Found:
        """What is here of these blocks, and of their segments: a report before the router knows."""
        return self._store.find(keys)

    async def read(self, keys: Sequence[BlockKey]) -> Reading:
        """What is here of these keys of one path. To be released when the bytes have been read."""
        return self._store.read(keys)

    async def release(self, lease_id: int) -> None:
        self._store.release(lease_id)

    async def discard(self, keys: Sequence[BlockKey]) -> None:
        """A reader found bytes of these that are not those that were saved."""
        logger.error("%d entries of store %s are damaged and were dropped", len(keys), self._store_id)
        self._store.discard(keys)
        self._reporter.has_news()

    async def reset(self) -> None:
        """Forget everything."""
        self._store.reset()
        self._reporter.has_news()

    async def snapshot(self) -> StoreSnapshot:
        """Reports after its sequence are true on top of it."""
        return StoreSnapshot(store_id=self._store_id, sequence=self._sequence, block_keys=self._store.keys())

    async def used_bytes(self) -> int:
        """Of the budget, what is coming included."""
        return self._store.used_bytes

    async def outstanding(self) -> Outstanding:
        return self._store.outstanding()

    async def check(self) -> None:
        """Raises AssertionError if the books disagree with each other."""
        self._store.check()

    async def _take_over(self, engine: Any, extent: Extent) -> None:
        try:
            ticket = await self._transfer.take_over(engine, extent, TAKE_OVER_DEADLINE_S)
        except (BytesLost, TimeoutError) as error:
            logger.warning("extent %s did not come: %s", extent.extent_id, error or type(error).__name__)
            self._store.put_abort(extent.extent_id)
        except BaseException:
            self._store.put_abort(extent.extent_id)
            raise
        else:
            self._store.put_end(extent.extent_id, ticket)
        self._reporter.has_news()  # also of what was evicted for it

    def _take_report(self) -> StoreReport:
        self._sequence += 1
        stored, removed = self._store.changes.take()
        return StoreReport(store_id=self._store_id, sequence=self._sequence, stored=stored, removed=removed)

    async def _publish_metrics(self) -> None:
        metrics = Metrics(self._store_id, self._labels)
        while True:
            metrics.tell(store_metrics(self._store))
            await asyncio.sleep(METRICS_INTERVAL_S)


def check_budget(budget_bytes: int, *, object_store_bytes: int, shared_memory_bytes: int) -> None:
    """Raises ValueError, with the numbers, if a node cannot keep so much in memory."""
    size = format_size
    if budget_bytes > MAX_BUDGET_SHARE * object_store_bytes:
        raise ValueError(
            f"--kv-store-memory {size(budget_bytes)} is more than {MAX_BUDGET_SHARE:.0%} of this node's Ray "
            f"object store ({size(object_store_bytes)}): lower it, or give Ray's --object-store-memory at "
            f"least {size(int(budget_bytes / MAX_BUDGET_SHARE), up=True)}"
        )
    if budget_bytes > shared_memory_bytes:
        raise ValueError(
            f"--kv-store-memory {size(budget_bytes)} is more than {SHARED_MEMORY} has on this node "
            f"({size(shared_memory_bytes)}): enlarge that, or lower it"
        )


def _object_store_bytes(node: str) -> int:
    (resources,) = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]  # type: ignore[no-untyped-call]
    return int(resources.get("object_store_memory", 0))
