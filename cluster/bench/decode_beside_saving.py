"""How much slower an engine decodes while it saves what it computes."""

import random
import statistics
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from rich.console import Console
from rich.progress import track

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import EngineId, EngineRequest, RequestId, SamplingParams
from shoal.cluster.bench.engine_stream import INGRESS, EngineStream
from shoal.cluster.bench.two_nodes import actor_on
from shoal.kvstore.messages import StoreId

ROUNDS = 9
NUM_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 260
"""Few of a prompt: nearly all is decoded, and two blocks of each sequence fill up while it is."""
START_DEADLINE_S, TURN_DEADLINE_S = 300.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBesideSaving:
    tokens_per_s: float
    saving_tokens_per_s: float
    saved_bytes: int
    """In a turn."""
    cost: float
    """By how much slower, as a share: the median of ROUNDS pairs of neighbouring turns."""


class _Turns:
    """One engine that generates for a handful of requests at a time, the store in use or not."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stream = EngineStream(engine)
        self._ids = count()
        self._random = random.Random(0)

    def use_stores(self, stores: dict[StoreId, Any], own: StoreId | None) -> None:
        ray.get(
            self._engine.introduce.remote(None, frozenset({INGRESS}), stores, own), timeout=TURN_DEADLINE_S
        )

    def tokens_per_s(self) -> float:
        started = time.perf_counter()
        waiting = {self._submit() for _ in range(NUM_SEQS)}
        for chunk in self._stream.chunks(TURN_DEADLINE_S):
            if chunk.finish_reason is not None:
                waiting.remove(chunk.request_id)
                if not waiting:
                    break
        return NUM_SEQS * OUTPUT_TOKENS / (time.perf_counter() - started)

    def _submit(self) -> RequestId:
        request = EngineRequest(
            request_id=RequestId(str(next(self._ids))),
            attempt=1,
            prompt_token_ids=tuple(self._random.randrange(5, 100) for _ in range(PROMPT_TOKENS)),
            max_tokens=OUTPUT_TOKENS,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=0.0),
        )
        ray.get(self._engine.submit.remote(INGRESS, (request,)), timeout=TURN_DEADLINE_S)
        return request.request_id


def decode_beside_saving(
    config: EngineConfig, store: Any, store_id: StoreId, node: str, console: Console
) -> DecodeBesideSaving:
    """node: of the store."""
    engine = actor_on(node, EngineActor, EngineId("engine"), config)
    ray.get(engine.start.remote(), timeout=START_DEADLINE_S)
    turns = _Turns(engine)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    saved: list[int] = []
    for turn in track(range(2 * ROUNDS + 2), "decode", console=console):
        saves = bool(turn % 2)
        ray.get(engine.reset_prefix_cache.remote(), timeout=TURN_DEADLINE_S)
        turns.use_stores({store_id: store} if saves else {}, store_id if saves else None)
        ray.get(store.reset.remote(), timeout=TURN_DEADLINE_S)
        speed = turns.tokens_per_s()
        if saves:
            saved.append(ray.get(store.used_bytes.remote(), timeout=TURN_DEADLINE_S))
        if turn > 1:  # the first two warm up
            speeds[saves].append(speed)
    ray.kill(engine)
    return DecodeBesideSaving(
        tokens_per_s=round(statistics.median(speeds[False]), 1),
        saving_tokens_per_s=round(statistics.median(speeds[True]), 1),
        saved_bytes=max(saved),
        cost=round(statistics.median(1 - b / a for a, b in zip(*speeds.values(), strict=True)), 4),
    )
