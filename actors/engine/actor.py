"""The engine's process: a door to its loop."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray

from shoal.actors.checkpoint_files import Fetch, as_it_is
from shoal.actors.engine.account import Account, Arrival, Turn
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.fingerprint import digest_weights
from shoal.actors.engine.loop import EngineLoop
from shoal.actors.engine.metrics import engine_metrics
from shoal.actors.engine.offers import Offers
from shoal.actors.engine.scheduler import Reply
from shoal.actors.engine.stopwatch import Stopwatch
from shoal.actors.engine.store_link import StoreLink
from shoal.actors.messages import (
    EngineHealth,
    EngineId,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    IngressId,
    PrefixSnapshot,
    RequestId,
    TokenBatch,
    TokenChunk,
)
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent, StoreId
from shoal.kvstore.metrics import METRICS_INTERVAL_S, NO_LABELS, Labels, Metrics, name_for_people
from shoal.kvstore.object_store import ObjectStore, RemoteStore
from shoal.kvstore.outstanding import Outstanding
from shoal.kvstore.reporter import Reporter

logger = logging.getLogger(__name__)

STALL_STEPS, LEAST_STALL_S = 20, 60.0
"""A loop that has not come round for this many of the largest step's time, or this long, hangs."""

T = TypeVar("T")


class _Outbox(asyncio.Queue[TokenBatch | None]):
    """What one stream of one ingress has yet to carry; None ends it."""

    streamed = False


class EngineActor:
    """Requests come in one call each; tokens go out on one stream an ingress, one item a step."""

    def __init__(
        self,
        engine_id: EngineId,
        config: EngineConfig,
        labels: Labels = NO_LABELS,
        fetch: Fetch = as_it_is,
    ) -> None:
        """labels: of its metrics. fetch: from config.checkpoint to a folder of this node."""
        self._engine_id = engine_id
        self._labels = labels
        self._config = config
        self._fetch = fetch
        self._doing = ""
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._loop: EngineLoop | None = None
        self._outboxes: defaultdict[IngressId, _Outbox] = defaultdict(_Outbox)
        self._account = Account(engine_id)
        self._reporter = Reporter(
            self._account.take_report, lambda router, report: router.report.remote(report)
        )
        self._arrived: list[Arrival] = []  # the loop's thread alone has it
        self._num_requests = self._uncomputed_tokens = 0
        self._stores: dict[StoreId, Any] = {}
        self._own_store: StoreId | None = None

    def __repr__(self) -> str:
        return name_for_people(self._engine_id, self._labels)

    async def start(self) -> EngineInfo:
        """Load the model; returns when the engine can serve. Raises ValueError for what no retry can mend.

        Whoever asks again meanwhile, as a restarted supervisor does, waits for the same start.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineInfo:
        stopwatch = Stopwatch(time.monotonic)
        folder = await asyncio.to_thread(self._fetch, self._config.checkpoint, self._tell)
        self._config = replace(self._config, checkpoint=folder)
        self._tell("loading the weights")
        stopwatch.lap("files")
        # Beside the imports, which have the GIL: hashing needs neither that nor torch.
        digest = ThreadPoolExecutor(1).submit(digest_weights, self._config)
        from shoal.actors.engine.build import build_engine  # noqa: PLC0415  (torch takes seconds)

        stopwatch.lap("imports")
        built = await asyncio.to_thread(build_engine, self._config, digest)
        self._stalled_after_s = max(LEAST_STALL_S, STALL_STEPS * built.largest_step_s)
        self._events = asyncio.get_running_loop()
        self._built = built
        self._loop = EngineLoop(built.engine, self._deliver)
        self._offers = Offers(ray.get_runtime_context().current_actor, self._answered)
        self._link = StoreLink(
            self._engine_id,
            built.scheduler,
            built.device,
            ObjectStore(),
            built.rates,
            bytes_per_block=built.layout.blocks.num_bytes,
            bytes_per_segment=built.layout.segments.num_bytes,
            post=self._loop.post,
            offer=lambda extents: self._call_soon(self._offers.begin, extents),
            clock=time.monotonic,
        )
        built.engine.connect(self._link)
        self._loop.start()
        runs = (self._reporter.run(), self._publish_metrics())
        self._tasks = [asyncio.create_task(run) for run in runs]
        return EngineInfo(
            engine_id=self._engine_id,
            node=ray.get_runtime_context().get_node_id(),
            backend=built.backend.name,
            memory=built.memory.describe(),
            fingerprint=built.fingerprint,
            content=built.content,
            rule=built.layout.rule,
            block_bytes=built.memory.block_bytes,
            segment_bytes=built.memory.segment_bytes,
            took_s=(*stopwatch.laps, *built.took_s),
        )

    async def doing(self) -> str:
        """What its start is at, for people. Answers while the event loop turns, be it ready or not."""
        return self._doing

    def _tell(self, doing: str) -> None:
        self._doing = doing

    async def introduce(
        self,
        router: Any,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[StoreId, Any],
        own_store: StoreId | None,
    ) -> None:
        """Report to this router, which may know nothing yet; only these ingresses still listen, and exactly
        these stores can be read. To the own one, that of this node, is saved."""
        self._reporter.introduce([] if router is None else [router])
        self._use_stores(stores, own_store)
        for gone in self._outboxes.keys() - ingress_ids:
            self._outboxes.pop(gone).put_nowait(None)
            self._started.do(partial(Engine.abort_all, reply_to=gone))

    def _use_stores(self, stores: Mapping[StoreId, Any], own_store: StoreId | None) -> None:
        """An id never means two processes: what has the same ids is the same."""
        if stores.keys() == self._stores.keys() and own_store == self._own_store:
            return
        self._stores, self._own_store = dict(stores), own_store
        self._offers.store = stores.get(own_store) if own_store else None
        remote = {store_id: RemoteStore(actor) for store_id, actor in stores.items()}
        self._started.post(partial(self._link.use_stores, remote, own_store))

    async def export(self, extent_id: str, keys: Sequence[BlockKey]) -> np.ndarray:
        """uint8: what is staged of an extent, to the store that calls and then owns it. KeyError."""
        return self._link.staging.export(extent_id, keys)

    def _answered(self, extents: Sequence[Extent], taken: bool) -> None:
        self._started.post(partial(self._link.saver.offered, extents, taken=taken))

    async def submit(self, ingress_id: IngressId, requests: Sequence[EngineRequest]) -> None:
        """The choices of one prompt in one call, so that none is behind by a step."""

        def arrive(engine: Engine) -> Sequence[Reply]:
            self._arrived += [(request.request_id, request.attempt) for request in requests]
            return engine.submit(requests, ingress_id)

        self._started.do(arrive)

    async def abort(self, request_id: RequestId, attempt: int, submitted: None) -> None:
        """`submitted` is the result of the submit: Ray runs calls of an async actor in any order, but none
        before its arguments are there."""
        self._started.do(lambda engine: engine.abort(request_id, attempt))

    async def stream(self, ingress_id: IngressId) -> AsyncIterator[TokenBatch]:
        """Every chunk for one ingress, until the engine ends or the ingress streams anew.

        An empty batch comes first. What is submitted behind it is answered on this stream. Ray keeps no order
        between the two calls, and one that another takes the place of may still swallow what it is given.
        """
        if self._outboxes[ingress_id].streamed:
            self._outboxes.pop(ingress_id).put_nowait(None)
        outbox = self._outboxes[ingress_id]
        outbox.streamed = True
        yield self._batch(())
        while (batch := await outbox.get()) is not None:
            yield batch

    async def health(self) -> EngineHealth:
        stalled = self._started.seconds_since_beat > self._stalled_after_s
        return EngineHealth(
            num_requests=self._num_requests,
            stalled=stalled,
            uncomputed_tokens=self._uncomputed_tokens,
            tokens_per_s=self._built.runner.tokens_per_s,
            drafts=self._built.scheduler.draft_counts(),
        )

    async def load(self, ingress_id: IngressId) -> EngineLoad:
        """Of this ingress's requests; at once, whatever the step takes."""
        load, usage = self._built.scheduler.load(ingress_id), self._built.scheduler.pools.usage()
        return EngineLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting + load.num_fetching,
            kv_usage=usage.share_of_blocks,
            drafts=self._built.scheduler.draft_counts(ingress_id),
        )

    async def snapshot(self) -> PrefixSnapshot:
        """All cached prefixes. Reports after its sequence are true on top of it, even if older than it."""
        sequence = self._account.sequence

        def read(engine: Engine) -> tuple[BlockKey, ...]:
            self._deliver((), engine.num_requests)  # changes before and after are not to cancel each other
            return engine.prefix_keys()

        keys = await self._ask(read)
        return PrefixSnapshot(engine_id=self._engine_id, sequence=sequence, block_keys=keys)

    async def reset_prefix_cache(self) -> None:
        await self._ask(Engine.reset_prefix_cache)

    async def outstanding(self) -> Outstanding:
        num_unsent = sum(outbox.qsize() for outbox in self._outboxes.values())

        def look(engine: Engine) -> Outstanding:
            counts = {**engine.outstanding(), **self._link.outstanding(), "unsent_batches": num_unsent}
            return Outstanding.of(counts, engine.check)

        return await self._ask(look)

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        """What the engine answers between two steps."""
        answer: asyncio.Future[T] = self._events.create_future()

        def settle(result: T) -> None:
            if not answer.done():  # else whoever asked has left
                answer.set_result(result)

        def command(engine: Engine) -> Sequence[Reply]:
            self._events.call_soon_threadsafe(settle, question(engine))
            return ()

        self._started.do(command)
        return await answer

    @property
    def _started(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError(f"{self._engine_id} has not been started")
        return self._loop

    def _deliver(self, replies: Sequence[Reply], num_requests: int) -> None:
        """On the loop's thread: hand a turn's outcome to the event loop, in one piece."""
        engine = self._built.engine
        arrived, self._arrived = self._arrived, []
        turn = Turn(
            num_requests=num_requests,
            uncomputed_tokens=engine.uncomputed_tokens,
            tokens_per_s=self._built.runner.tokens_per_s,
            own_fetch_tokens_per_s=self._built.fetch_tokens_per_s("own_store"),
            other_fetch_tokens_per_s=self._built.fetch_tokens_per_s("other_store"),
            arrived=tuple(arrived),
            prefixes=engine.take_prefix_changes(),
        )
        self._call_soon(self._publish, replies, turn)

    def _call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """On the event loop, from the loop's thread."""
        self._events.call_soon_threadsafe(call, *args)

    def _publish(self, replies: Sequence[Reply], turn: Turn) -> None:
        by_ingress: defaultdict[IngressId, list[TokenChunk]] = defaultdict(list)
        for reply in replies:
            by_ingress[reply.to].append(reply.chunk)
        for ingress_id, chunks in by_ingress.items():
            self._outboxes[ingress_id].put_nowait(self._batch(chunks))
        self._num_requests, self._uncomputed_tokens = turn.num_requests, turn.uncomputed_tokens
        if self._account.add(turn):
            self._reporter.has_news()

    def _batch(self, chunks: Sequence[TokenChunk]) -> TokenBatch:
        return TokenBatch(chunks=tuple(chunks), store_id=self._own_store)

    async def _publish_metrics(self) -> None:
        metrics, built = Metrics(self._engine_id, self._labels), self._built
        while True:
            metrics.tell(
                engine_metrics(
                    backend=built.backend.name,
                    engine=built.engine,
                    scheduler=built.scheduler,
                    runner=built.runner,
                    saver=self._link.saver,
                    fetcher=self._link.fetcher,
                )
            )
            await asyncio.sleep(METRICS_INTERVAL_S)
