"""The two nodes of `bench reuse`: an engine and a store on each, as a cluster has them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any

import ray
from ray.exceptions import RayTaskError

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import (
    CachedTokens,
    EngineId,
    EngineInfo,
    EngineRequest,
    PrefixSource,
    RequestId,
    SamplingParams,
    StoreId,
    TokenChunk,
)
from shoal.cluster.bench.engine_stream import CALL_DEADLINE_S, INGRESS, EngineStream
from shoal.cluster.bench.reuse import Answer, ReuseError, TwoNodes
from shoal.cluster.bench.two_nodes import actor_on, two_nodes
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.block_hash import extend_keys, root_key, segment_key
from shoal.kvstore.sizes import format_size

OBJECT_STORE_BYTES, BUDGET_BYTES = 1 << 30, 512 << 20
START_DEADLINE_S, ANSWER_DEADLINE_S = 300.0, 300.0
POLL_S = 0.02
OUTPUT_TOKENS = 4


class RayEngine:
    """Implements Engine; asks one request at a time."""

    def __init__(self, name: str, node: str, config: EngineConfig) -> None:
        self._actor = actor_on(node, EngineActor, EngineId(name), config)
        self._ids = count()

    def start(self) -> EngineInfo:
        """Raises ReuseError with what the engine says of the configuration."""
        try:
            info: EngineInfo = ray.get(self._actor.start.remote(), timeout=START_DEADLINE_S)
        except RayTaskError as error:
            if not isinstance(error.cause, ValueError):
                raise
            raise ReuseError(str(error.cause)) from error
        self._stream = EngineStream(self._actor)
        return info

    def use_stores(self, stores: dict[StoreId, Any], own: StoreId) -> None:
        introduced = self._actor.introduce.remote(None, frozenset({INGRESS}), stores, own)
        ray.get(introduced, timeout=CALL_DEADLINE_S)

    def ask(self, prompt: Sequence[int], sources: tuple[PrefixSource, ...] = ()) -> Answer:
        request = EngineRequest(
            request_id=RequestId(str(next(self._ids))),
            attempt=1,
            prompt_token_ids=tuple(prompt),
            max_tokens=OUTPUT_TOKENS,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=0.0),
            logprobs=0,
            sources=sources,
        )
        started = time.perf_counter()
        self._actor.submit.remote(INGRESS, (request,))
        chunks = [(time.perf_counter() - started, chunk) for chunk in self._chunks(request.request_id)]
        ttft_s, first = next((at, chunk) for at, chunk in chunks if chunk.token_ids)
        return Answer(
            ttft_s=ttft_s,
            token_ids=tuple(token for _, chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(token.logprob for _, chunk in chunks for token in chunk.logprobs),
            cached=first.cached_tokens or CachedTokens(),
        )

    def _chunks(self, request_id: RequestId) -> Iterator[TokenChunk]:
        """Until the last. Raises EngineFailed."""
        for chunk in self._stream.chunks(ANSWER_DEADLINE_S):
            if chunk.request_id == request_id:
                yield chunk
                if chunk.finish_reason is not None:
                    return

    def forget(self) -> None:
        ray.get(self._actor.reset_prefix_cache.remote(), timeout=CALL_DEADLINE_S)


class RayStore:
    """Implements Store."""

    def __init__(self, name: str, node: str) -> None:
        self.store_id = StoreId(name)
        self.actor = actor_on(node, StoreActor, self.store_id, BUDGET_BYTES)

    def start(self, info: EngineInfo, block_size: int) -> None:
        """info: of an engine that saves to it, whose keys it will be asked for."""
        self._root = root_key(info.fingerprint, "")
        self._block_size = block_size
        self._rule = info.rule
        ray.get(self.actor.start.remote(), timeout=CALL_DEADLINE_S)

    def sources(self, prompt: Sequence[int]) -> tuple[PrefixSource, ...]:
        """Waits until it has all blocks, and the segments with which all but the last can be reused."""
        keys = extend_keys(self._root, prompt, self._block_size)
        needed = set(self._rule.segments_at(len(keys) - 1))
        deadline = time.monotonic() + CALL_DEADLINE_S
        while True:
            snapshot = ray.get(self.actor.snapshot.remote(), timeout=CALL_DEADLINE_S)
            held = frozenset(snapshot.block_keys)
            end = sum(1 for _ in takewhile(held.__contains__, keys))
            segments = tuple(i for i in range(end) if segment_key(keys[i]) in held)
            if end == len(keys) and needed <= set(segments):
                return (PrefixSource(store_id=self.store_id, first=0, end=end, segments=segments),)
            if time.monotonic() > deadline:
                raise ReuseError(f"{end} of {len(keys)} blocks were saved within {CALL_DEADLINE_S:.0f} s")
            time.sleep(POLL_S)

    def forget(self) -> None:
        ray.get(self.actor.reset.remote(), timeout=CALL_DEADLINE_S)


@contextmanager
def started(config: EngineConfig, prompt_tokens: int) -> Iterator[TwoNodes]:
    """A private Ray. Raises ReuseError if a store is too small for the prefix of so long a prompt."""
    with two_nodes(OBJECT_STORE_BYTES) as (node, other_node):
        engines = [RayEngine("here", node, config), RayEngine("there", other_node, config)]
        infos = [engine.start() for engine in engines]
        _check_budget(infos[0], prompt_tokens // config.block_size)
        stores = [RayStore("store", node), RayStore("other-store", other_node)]
        actors = {store.store_id: store.actor for store in stores}
        for engine, info, store in zip(engines, infos, stores, strict=True):
            store.start(info, config.block_size)
            engine.use_stores(actors, store.store_id)
        yield TwoNodes(here=engines[0], store=stores[0], there=engines[1], other_store=stores[1])


def _check_budget(info: EngineInfo, num_blocks: int) -> None:
    needed = num_blocks * (info.block_bytes + info.segment_bytes)
    if needed > BUDGET_BYTES:
        raise ReuseError(f"the prefix takes {format_size(needed)}, a store here {format_size(BUDGET_BYTES)}")
