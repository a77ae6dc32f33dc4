"""Replays a trace of requests on simulated engines: how much is hit, and how evenly work falls.

    python -m tests.router.replay TRACE.jsonl --tokens-per-s 6000 --engines-per-node 2

A line of the trace is one request: {"timestamp": ms, "input_length": tokens, "output_length": tokens,
"hash_ids": [one a block of 512 tokens]}.
"""

import argparse
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from statistics import mean

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    PrefixSource,
    RequestId,
)
from shoal.actors.router.members import Members
from shoal.actors.router.placement import CheapestEngine
from shoal.kvstore.block_hash import KEY_BYTES, BlockKey
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot

REPORT_S = 0.05
DRAW_S = 0.02
"""One output token."""
OWN_FETCH_RATE, OTHER_FETCH_RATE = 100.0, 10.0
"""So many tokens are fetched from the own node's store, or from another's, while one is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    arrives_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    hit_share: float
    """Of all prompt tokens."""
    computed_tokens: tuple[int, ...]
    """By each engine."""
    fetched_share: float
    """Of all prompt tokens: hits that stores brought."""
    first_token_s: tuple[float, ...]
    """Of each request, shortest first."""

    @property
    def imbalance(self) -> float:
        return max(self.computed_tokens) / mean(self.computed_tokens)

    def __str__(self) -> str:
        waits = self.first_token_s
        p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
        return (
            f"hit {100 * self.hit_share:.1f}% (fetched {100 * self.fetched_share:.1f}%), "
            f"computed tokens max / mean {self.imbalance:.2f}, "
            f"first token mean {mean(waits):.2f} s, p50 {p50:.2f} s, p99 {p99:.2f} s"
        )


@dataclass
class Engine:
    """Computes prompts one after the other and keeps every block; draws beside that without slowing down."""

    engine_id: EngineId
    node: str
    held: set[BlockKey] = field(default_factory=set)
    queue: deque[Request] = field(default_factory=deque)
    num_requests: int = 0
    uncomputed_tokens: int = 0
    computed_tokens: int = 0
    sequence: int = 0
    received: list[tuple[RequestId, int]] = field(default_factory=list)
    stored: list[BlockKey] = field(default_factory=list)
    is_reporting: bool = False


@dataclass
class Store:
    """A node's: keeps every block that its engines computed or fetched."""

    store_id: StoreId
    node: str
    held: set[BlockKey] = field(default_factory=set)
    sequence: int = 0

    def report(self, keys: Iterable[BlockKey]) -> StoreReport:
        new = tuple(key for key in keys if key not in self.held)
        self.held.update(new)
        self.sequence += 1
        return StoreReport(store_id=self.store_id, sequence=self.sequence, stored=new)


class Replay:
    """Events in time order; each is a function that may plan others."""

    def __init__(
        self, *, num_engines: int, block_size: int, tokens_per_s: float, engines_per_node: int = 0
    ) -> None:
        """engines_per_node: each node has a store; 0 is without stores."""
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._block_size = block_size
        self._tokens_per_s = tokens_per_s
        nodes = [f"node-{i // (engines_per_node or 1)}" for i in range(num_engines)]
        engines = [Engine(EngineId(f"engine-{i}"), node) for i, node in enumerate(nodes)]
        stores = [Store(StoreId(f"store of {node}"), node) for node in sorted(set(nodes))]
        self._engines = {engine.engine_id: engine for engine in engines}
        self._stores = {store.node: store for store in stores if engines_per_node}
        self._members = Members(lambda: self._now)
        self._placement = CheapestEngine(self._members, block_size=block_size, clock=lambda: self._now)
        self._introduce()
        self._first_token_s: list[float] = []
        self._num_prompt_tokens = 0
        self._fetched_tokens = 0

    def _introduce(self) -> None:
        self._members.set_engines(
            EngineInfo(engine_id=engine.engine_id, node=engine.node, backend="", memory="", fingerprint=b"")
            for engine in self._engines.values()
        )
        self._members.set_stores(
            StoreInfo(store_id=store.store_id, node=node, budget_bytes=1)
            for node, store in self._stores.items()
        )
        self._members.take_snapshot_requests()
        for engine_id in self._engines:
            self._members.restore(PrefixSnapshot(engine_id=engine_id, sequence=0, block_keys=()))
        for store in self._stores.values():
            self._members.restore(StoreSnapshot(store_id=store.store_id, sequence=0, block_keys=()))

    def run(self, requests: Iterable[Request]) -> Outcome:
        for request in requests:
            self._at(request.arrives_s, partial(self._arrive, request))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        computed = tuple(engine.computed_tokens for engine in self._engines.values())
        return Outcome(
            hit_share=1 - sum(computed) / self._num_prompt_tokens,
            computed_tokens=computed,
            fetched_share=self._fetched_tokens / self._num_prompt_tokens,
            first_token_s=tuple(sorted(self._first_token_s)),
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ids), event))

    def _arrive(self, request: Request) -> None:
        request_id = RequestId(f"r{next(self._ids)}")
        placed = self._placement.place(
            PlacementRequest(
                request_id=request_id,
                attempt=1,
                num_prompt_tokens=request.num_prompt_tokens,
                block_keys=request.block_keys,
            )
        )
        assert placed is not None
        engine = self._engines[placed.engine_id]
        engine.received.append((request_id, 1))
        engine.num_requests += 1
        engine.uncomputed_tokens += request.num_prompt_tokens
        self._num_prompt_tokens += request.num_prompt_tokens
        self._report_soon(engine)
        fetch_s = self._fetch(engine, request, placed.sources)
        self._at(self._now + fetch_s, partial(self._enqueue, engine, request))

    def _fetch(self, engine: Engine, request: Request, sources: Iterable[PrefixSource]) -> float:
        """How long it takes; what is fetched counts as held from now on."""
        seconds = 0.0
        by_id = {store.store_id: store for store in self._stores.values()}
        for source in sources:
            store = by_id[source.store_id]
            keys = [k for k in request.block_keys[source.first : source.end] if k not in engine.held]
            assert store.held.issuperset(keys)
            rate = OWN_FETCH_RATE if store.node == engine.node else OTHER_FETCH_RATE
            seconds += len(keys) * self._block_size / (rate * self._tokens_per_s)
            self._fetched_tokens += len(keys) * self._block_size
            self._hold(engine, keys)
        return seconds

    def _enqueue(self, engine: Engine, request: Request) -> None:
        engine.queue.append(request)
        if len(engine.queue) == 1:
            self._compute(engine)

    def _hold(self, engine: Engine, keys: Sequence[BlockKey]) -> None:
        engine.stored += [key for key in keys if key not in engine.held]
        engine.held.update(keys)
        if store := self._stores.get(engine.node):
            report = store.report(keys)
            self._at(self._now + REPORT_S, partial(self._members.report_store, report))

    def _compute(self, engine: Engine) -> None:
        request = engine.queue[0]
        hit = sum(1 for _ in takewhile(engine.held.__contains__, request.block_keys))
        hit = min(hit, (request.num_prompt_tokens - 1) // self._block_size)
        computed = request.num_prompt_tokens - hit * self._block_size
        engine.computed_tokens += computed
        self._at(self._now + computed / self._tokens_per_s, partial(self._computed, engine))

    def _computed(self, engine: Engine) -> None:
        request = engine.queue.popleft()
        self._first_token_s.append(self._now - request.arrives_s)
        engine.uncomputed_tokens -= request.num_prompt_tokens
        self._hold(engine, request.block_keys)
        self._at(self._now + DRAW_S * request.num_output_tokens, partial(self._finished, engine))
        self._report_soon(engine)
        if engine.queue:
            self._compute(engine)

    def _finished(self, engine: Engine) -> None:
        engine.num_requests -= 1
        self._report_soon(engine)

    def _report_soon(self, engine: Engine) -> None:
        if not engine.is_reporting:
            engine.is_reporting = True
            self._at(self._now + REPORT_S, partial(self._report, engine))

    def _report(self, engine: Engine) -> None:
        engine.is_reporting = False
        engine.sequence += 1
        received, engine.received = engine.received, []
        stored, engine.stored = engine.stored, []
        self._members.report(
            EngineReport(
                engine_id=engine.engine_id,
                sequence=engine.sequence,
                num_requests=engine.num_requests,
                uncomputed_tokens=engine.uncomputed_tokens,
                tokens_per_s=self._tokens_per_s,
                received=tuple(received),
                stored=tuple(stored),
            )
        )


def one_cache(requests: Sequence[Request], block_size: int) -> float:
    """The share that one engine with room for everything would hit, however long it took."""
    return Replay(num_engines=1, block_size=block_size, tokens_per_s=1e12).run(requests).hit_share


def read_trace(path: Path, block_size: int) -> list[Request]:
    requests = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        complete = fields["input_length"] // block_size
        keys = tuple(BlockKey(i.to_bytes(KEY_BYTES, "little")) for i in fields["hash_ids"][:complete])
        requests.append(
            Request(
                arrives_s=fields["timestamp"] / 1e3,
                num_prompt_tokens=fields["input_length"],
                num_output_tokens=fields["output_length"],
                block_keys=keys,
            )
        )
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=512, help="tokens that a hash id stands for")
    parser.add_argument(
        "--tokens-per-s", type=float, default=8000.0, help="prompt tokens that an engine computes"
    )
    parser.add_argument("--engines-per-node", type=int, default=0, help="with a store a node; 0: no stores")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.block_size)
    print(f"one cache for all: hit {100 * one_cache(requests, options.block_size):.1f}%")
    replay = Replay(
        num_engines=options.engines,
        block_size=options.block_size,
        tokens_per_s=options.tokens_per_s,
        engines_per_node=options.engines_per_node,
    )
    print(replay.run(requests))


if __name__ == "__main__":
    main()
