"""A dispatcher over the router's index, a real engine and a store, in one process and without a model."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from shoal.actors.engine.account import Account, Turn
from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    FinishReason,
    PlacementRequest,
    PrefixSnapshot,
    TokenChunk,
)
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.members import Members
from shoal.actors.router.placement import Placer
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreInfo, StoreReport, StoreSnapshot
from shoal.kvstore.outstanding import Outstanding
from tests.engine.bench import Bench
from tests.fake_store import OWN, Stores, view
from tests.one_by_one import OneByOne

NODE = "node"


class RealEngine(OneByOne):
    """Serves one request after the other, and reports each to the index before the next one is placed."""

    def __init__(self, fingerprint: bytes, block_size: int, num_tokens: int) -> None:
        """The front door's tokens are below `num_tokens`, and what the engine draws is brought there."""
        self._fingerprint, self._block_size, self._num_tokens = fingerprint, block_size, num_tokens
        self._stores = Stores()
        self._members = Members(time.monotonic)
        self._members.set_stores([StoreInfo(store_id=OWN, node=NODE, budget_bytes=1 << 30)])
        self._placer = Placer(self._members, block_size=block_size, clock=time.monotonic)
        self._reported: set[BlockKey] = set()
        self._num_reports = 0
        self._num_engines = 0
        self.replace_engine()

    def replace_engine(self) -> None:
        """Another one, which has nothing but what the store has."""
        self._engine_id = EngineId(f"engine-{self._num_engines}")
        self._num_engines += 1
        self._account = Account(self._engine_id)
        self._bench = Bench(
            num_blocks=200,
            block_size=self._block_size,
            fingerprint=self._fingerprint,
            view=view(),
            stores=self._stores,
        )
        info = EngineInfo(
            engine_id=self._engine_id, node=NODE, backend="", memory="", fingerprint=self._fingerprint
        )
        self._members.set_engines([info])
        self._report()

    @asynccontextmanager
    async def _open(
        self,
        request: EngineRequest,
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        placement = self._placer.place(
            PlacementRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                num_prompt_tokens=request.num_tokens,
                block_keys=block_keys,
            )
        )
        assert placement is not None
        placed(PlacedBy.PREFIX if placement.expected_hit_tokens else PlacedBy.LOAD)
        chunk = self._serve(replace(request, sources=placement.sources, stop_token_ids=frozenset()))

        async def chunks() -> AsyncIterator[TokenChunk]:
            yield chunk

        yield chunks()

    def _serve(self, request: EngineRequest) -> TokenChunk:
        bench, name = self._bench, request.request_id
        bench.submit(request)
        while bench.engine.has_work:
            bench.carrier.run()
            bench.step()
        bench.carrier.run()
        self._report((request.request_id, request.attempt))
        return TokenChunk(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=tuple(token % self._num_tokens for token in bench.tokens[name]),
            cached_tokens=bench.cached_by_place[name],
            finish_reason=FinishReason.LENGTH,
        )

    def _report(self, *arrived: tuple[object, int]) -> None:
        changes = self._bench.engine.take_prefix_changes()
        turn = Turn(num_requests=0, uncomputed_tokens=0, tokens_per_s=1000.0, prefixes=changes)
        self._account.add(turn)
        self._members.report(self._account.take_report())
        held = self._stores.has[OWN].keys()
        self._num_reports += 1
        self._members.report_store(
            StoreReport(
                store_id=OWN,
                sequence=self._num_reports,
                stored=tuple(k for k in held if k not in self._reported),
            )
        )
        self._reported = set(held)
        for holder in self._members.take_snapshot_requests():
            self._members.restore(self._snapshot(holder))
        assert self._members.is_up_to_date

    def _snapshot(self, holder: Holder) -> PrefixSnapshot | StoreSnapshot:
        if holder == OWN:
            keys = tuple(self._reported)
            return StoreSnapshot(store_id=OWN, sequence=self._num_reports, block_keys=keys)
        return PrefixSnapshot(
            engine_id=self._engine_id,
            sequence=self._account.sequence,
            block_keys=self._bench.engine.prefix_keys(),
        )

    def ready(self) -> bool:
        return True

    async def reset_prefix_cache(self) -> bool:
        self._bench.engine.reset_prefix_cache()
        return True

    async def loads(self) -> dict[EngineId, EngineLoad]:
        return {}

    async def outstanding(self) -> Mapping[str, Outstanding | None]:
        return {self._engine_id: Outstanding(counts=self._bench.engine.outstanding())}
