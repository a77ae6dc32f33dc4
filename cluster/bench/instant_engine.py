"""A cluster without its engines' work: our front door and router over an actor that answers at once."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from shoal.actors.engine.account import Account, Turn
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import (
    CachedTokens,
    DeploymentCard,
    DeploymentId,
    EngineId,
    EngineInfo,
    EngineRequest,
    FinishReason,
    HttpConfig,
    IngressId,
    IngressInfo,
    ModelCard,
    PrefixSnapshot,
    RequestId,
    StoreId,
    TokenBatch,
    TokenChunk,
)
from shoal.actors.router.actor import RouterActor
from shoal.cluster.bench.two_nodes import private_ray
from shoal.kvstore.reporter import Reporter

BLOCK_SIZE = 128
FINGERPRINT = b"an engine that computes nothing"
START_DEADLINE_S = 120.0
CALL_DEADLINE_S = 30.0
A_TOKEN = 1000
OBJECT_STORE_BYTES = 100 << 20
"""All that travels here travels inline."""


class InstantEngine:
    """Speaks and reports as `EngineActor` does: one token, and the request is done."""

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        self._account = Account(engine_id)
        self._reporter = Reporter(
            self._account.take_report, lambda router, report: router.report.remote(report)
        )
        self._outboxes: defaultdict[IngressId, asyncio.Queue[TokenBatch]] = defaultdict(asyncio.Queue)
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        node = ray.get_runtime_context().get_node_id()
        return EngineInfo(
            engine_id=self._engine_id, node=node, backend="none", memory="none", fingerprint=FINGERPRINT
        )

    async def introduce(
        self,
        router: Any,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[StoreId, Any],
        own_store: StoreId | None,
    ) -> None:
        self._reporter.introduce(router)
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._reporter.run())

    async def submit(self, ingress_id: IngressId, requests: Sequence[EngineRequest]) -> None:
        chunks = tuple(
            TokenChunk(
                request_id=request.request_id,
                attempt=request.attempt,
                token_ids=(A_TOKEN,),
                cached_tokens=CachedTokens(),
                finish_reason=FinishReason.LENGTH,
            )
            for request in requests
        )
        self._outboxes[ingress_id].put_nowait(TokenBatch(chunks=chunks))
        arrived = tuple((request.request_id, request.attempt) for request in requests)
        if self._account.add(Turn(num_requests=0, uncomputed_tokens=0, tokens_per_s=0.0, arrived=arrived)):
            self._reporter.has_news()

    async def abort(self, request_id: RequestId, attempt: int, submitted: None) -> None:
        """It is done already."""

    async def stream(self, ingress_id: IngressId) -> AsyncIterator[TokenBatch]:
        outbox = self._outboxes[ingress_id]
        yield TokenBatch(chunks=())
        while True:
            chunks = (await outbox.get()).chunks
            while not outbox.empty():  # one item a step, as an engine's
                chunks += outbox.get_nowait().chunks
            yield TokenBatch(chunks=chunks)

    async def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot(engine_id=self._engine_id, sequence=self._account.sequence, block_keys=())


class FrontDoor:
    """One ingress and one router, without a supervisor. Its actors end with it."""

    def __init__(self, model: ModelCard, num_engines: int) -> None:
        ids = [EngineId(f"engine-{index}") for index in range(num_engines)]
        self._engines = {engine_id: _actor(InstantEngine, engine_id) for engine_id in ids}
        self._router = _actor(RouterActor, model.block_size)
        self._served = DeploymentCard(deployment_id=DeploymentId("instant"), model=model, weight=1)
        self._ingress = _actor(IngressActor, HttpConfig(port=0), [self._served])

    def start(self) -> str:
        """The URL at which a request can be placed."""
        engines = self._engines
        infos = ray.get([engine.start.remote() for engine in engines.values()], timeout=START_DEADLINE_S)
        door: IngressInfo = ray.get(self._ingress.start.remote(), timeout=START_DEADLINE_S)
        members = list(zip(infos, engines.values(), strict=True))
        told = [
            self._router.set_members.remote(members, []),
            self._ingress.introduce.remote([(self._served, self._router, engines)], {}),
        ]
        heard_by = frozenset({door.ingress_id})
        told += [engine.introduce.remote(self._router, heard_by, {}, None) for engine in engines.values()]
        ray.get(told, timeout=CALL_DEADLINE_S)
        return door.url


@contextmanager
def front_door(model: ModelCard, num_engines: int) -> Iterator[str]:
    """In a private Ray; yields the URL."""
    with private_ray(object_store_bytes=OBJECT_STORE_BYTES):
        door = FrontDoor(model, num_engines)
        yield door.start()


def _actor(actor_class: type, *args: Any) -> Any:
    remote: Any = ray.remote(num_cpus=0)(actor_class)
    return remote.remote(*args)
