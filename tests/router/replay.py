"""Replays a trace of requests on simulated engines: how much is hit, and how evenly work falls.

    python -m tests.router.replay TRACE.jsonl --tokens-per-s 6000

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

from shoal.actors.messages import EngineId, EngineReport, PlacementRequest, PrefixSnapshot, RequestId
from shoal.actors.router.placement import CheapestEngine
from shoal.kvstore.block_hash import KEY_BYTES, BlockKey

REPORT_S = 0.05
DRAW_S = 0.02
"""One output token."""


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
    first_token_s: tuple[float, ...]
    """Of each request, shortest first."""

    @property
    def imbalance(self) -> float:
        return max(self.computed_tokens) / mean(self.computed_tokens)

    def __str__(self) -> str:
        waits = self.first_token_s
        p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
        return (
            f"hit {100 * self.hit_share:.1f}%, computed tokens max / mean {self.imbalance:.2f}, "
            f"first token mean {mean(waits):.2f} s, p50 {p50:.2f} s, p99 {p99:.2f} s"
        )


@dataclass
class Engine:
    """Computes prompts one after the other and keeps every block; draws beside that without slowing down."""

    engine_id: EngineId
    held: set[BlockKey] = field(default_factory=set)
    queue: deque[Request] = field(default_factory=deque)
    num_requests: int = 0
    uncomputed_tokens: int = 0
    computed_tokens: int = 0
    sequence: int = 0
    received: list[tuple[RequestId, int]] = field(default_factory=list)
    stored: list[BlockKey] = field(default_factory=list)
    is_reporting: bool = False


class Replay:
    """Events in time order; each is a function that may plan others."""

    def __init__(self, *, num_engines: int, block_size: int, tokens_per_s: float) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._block_size = block_size
        self._tokens_per_s = tokens_per_s
        self._engines = {EngineId(f"engine-{i}"): Engine(EngineId(f"engine-{i}")) for i in range(num_engines)}
        self._placement = CheapestEngine(block_size=block_size, clock=lambda: self._now)
        self._placement.set_engines(self._engines)
        for engine_id in self._placement.take_snapshot_requests():
            self._placement.restore(PrefixSnapshot(engine_id=engine_id, sequence=0, block_keys=()))
        self._first_token_s: list[float] = []
        self._num_prompt_tokens = 0

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
        engine.queue.append(request)
        engine.num_requests += 1
        engine.uncomputed_tokens += request.num_prompt_tokens
        self._num_prompt_tokens += request.num_prompt_tokens
        self._report_soon(engine)
        if len(engine.queue) == 1:
            self._compute(engine)

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
        engine.stored += [key for key in request.block_keys if key not in engine.held]
        engine.held.update(request.block_keys)
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
        self._placement.report(
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
    options = parser.parse_args()
    requests = read_trace(options.trace, options.block_size)
    print(f"one cache for all: hit {100 * one_cache(requests, options.block_size):.1f}%")
    replay = Replay(
        num_engines=options.engines, block_size=options.block_size, tokens_per_s=options.tokens_per_s
    )
    print(replay.run(requests))


if __name__ == "__main__":
    main()
