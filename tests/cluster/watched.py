"""Engines and stores whose work can be held at a point, and looked at: the real actors, no front door."""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from shoal.actors.engine import fetcher
from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.engine import Engine
from shoal.actors.messages import (
    CachedTokens,
    EngineId,
    EngineInfo,
    EngineRequest,
    IngressId,
    PrefixSource,
    RequestId,
    SamplingParams,
    TokenChunk,
)
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent, Reading, StoreId
from shoal.kvstore.object_store import ObjectStore
from shoal.kvstore.transfer import Ticket

HELD_DEADLINE_S = 60.0
"""Nothing is held for longer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: CachedTokens = field(compare=False)

    @classmethod
    def of(cls, chunks: Sequence[TokenChunk]) -> "Answer":
        assert all(chunk.error is None for chunk in chunks), chunks
        (cached,) = [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
        return cls(
            tokens=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(said.logprob for chunk in chunks for said in chunk.logprobs),
            cached=cached,
        )


def request(name: str, prompt: Sequence[int], sources: Sequence[PrefixSource] = ()) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=1,
        prompt_token_ids=tuple(prompt),
        max_tokens=12,
        stop_token_ids=frozenset(),
        sampling=SamplingParams(temperature=0.0),
        logprobs=0,
        sources=tuple(sources),
    )


class HeldTransfer(ObjectStore):
    """Between a store's answer and its bytes the first who comes can be held."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.has_arrived = threading.Event()

    def hold(self) -> None:
        self._goes_on.clear()
        self.has_arrived.clear()

    def let_go(self) -> None:
        self._goes_on.set()

    def fetch(self, tickets: Sequence[Ticket], timeout_s: float) -> list[np.ndarray]:
        self.has_arrived.set()
        assert self._goes_on.wait(HELD_DEADLINE_S)
        return super().fetch(tickets, timeout_s)


class WatchedEngine(EngineActor):
    """Fetches whatever it is offered, be it sooner computed, and waits for it as long as it is told."""

    def __init__(self, engine_id: EngineId, config: EngineConfig, fetch_deadline_s: float) -> None:
        super().__init__(engine_id, config)
        fetcher.DEADLINE_S = fetch_deadline_s
        self._transfer = HeldTransfer()

    async def start(self) -> EngineInfo:
        info = await super().start()
        self._built.rates._tokens_per_s = lambda: 0.0
        self._link.fetcher._transfer = self._transfer
        return info

    async def use_stores(self, stores: Mapping[StoreId, Any], own: StoreId | None) -> None:
        self._use_stores(stores, own)

    async def answer(self, asked: EngineRequest) -> Answer:
        ingress_id = IngressId(asked.request_id)
        chunks: list[TokenChunk] = []
        await self.submit(ingress_id, (asked,))
        async for batch in self.stream(ingress_id):
            chunks += batch.chunks
            if chunks and chunks[-1].finish_reason is not None:
                break
        del self._outboxes[ingress_id]
        return Answer.of(chunks)

    async def hold_transfer(self) -> None:
        self._transfer.hold()

    async def transfer_is_held(self) -> None:
        """Returns when it is."""
        assert await asyncio.to_thread(self._transfer.has_arrived.wait, HELD_DEADLINE_S)

    async def let_transfer_go(self) -> None:
        self._transfer.let_go()

    async def held(self) -> dict[str, int]:
        """What is owned by anybody but the prefix cache, or is under way; empty if nothing is."""
        return await self._ask(self._held)

    def _held(self, engine: Engine) -> dict[str, int]:
        engine.check()
        saves = self._built.scheduler._saves
        counts = {
            **engine.outstanding(),
            **self._link.outstanding(),
            "wanted in the store": len(saves._wanted) if self._link.saver.has_store else 0,
        }
        return {name: count for name, count in counts.items() if count}

    async def fallbacks(self) -> dict[str, int]:
        """By reason, since this was last asked."""
        counts = self._built.scheduler._fetches.fallbacks
        said = {str(reason): count for reason, count in counts.items()}
        counts.clear()
        return said

    async def unsaved(self) -> dict[str, int]:
        """Bytes lost by reason, since the engine began."""
        return dict(self._link.saver.lost_bytes)

    async def pid(self) -> int:
        return os.getpid()


class HeldStore(StoreActor):
    """Can be held before it takes an extent over, and before it answers a read."""

    def __init__(self, store_id: StoreId, budget_bytes: int) -> None:
        super().__init__(store_id, budget_bytes)
        self._let_pass: dict[str, int] = {}
        self._goes_on: dict[str, asyncio.Event] = {}
        self._has_arrived: dict[str, asyncio.Event] = {}

    async def hold(self, point: str, let_pass: int = 0) -> None:
        """point: "save" or "read". So many go on before the first is held."""
        self._let_pass[point] = let_pass
        self._goes_on[point], self._has_arrived[point] = asyncio.Event(), asyncio.Event()

    async def is_held(self, point: str) -> None:
        """Returns when it is."""
        await asyncio.wait_for(self._has_arrived[point].wait(), HELD_DEADLINE_S)

    async def let_go(self, point: str) -> None:
        self._goes_on[point].set()

    async def read(self, keys: Sequence[BlockKey]) -> Reading:
        await self._pass("read")
        return await super().read(keys)

    async def held(self) -> dict[str, int]:
        """Leases, and extents that are coming; empty if there are none."""
        outstanding = await self.outstanding()
        assert not outstanding.broken, outstanding
        return {name: count for name, count in outstanding.counts.items() if count}

    async def pid(self) -> int:
        return os.getpid()

    async def raylet_pid(self) -> int:
        """Of the process that is its node."""
        return os.getppid()

    async def _take_over(self, engine: Any, extent: Extent) -> None:
        await self._pass("save")
        await super()._take_over(engine, extent)

    async def _pass(self, point: str) -> None:
        if point not in self._goes_on:
            return
        if self._let_pass[point]:
            self._let_pass[point] -= 1
            return
        self._has_arrived[point].set()
        await asyncio.wait_for(self._goes_on[point].wait(), HELD_DEADLINE_S)


class Filler:
    """Another job, which fills its node's object store with what it goes on using."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def fill(self, num_bytes: int, object_bytes: int) -> None:
        for _ in range(num_bytes // object_bytes):
            self._held.append(ray.get(ray.put(np.zeros(object_bytes, dtype=np.uint8))))

    def empty(self) -> None:
        self._held.clear()
