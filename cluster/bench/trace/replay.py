"""A trace of requests on simulated engines, placed by the real router: no process, no model, no waiting."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from shoal.actors.messages import EngineId, PlacementRequest, PrefixSnapshot, RequestId
from shoal.actors.router.members import Members
from shoal.actors.router.placement import Placer
from shoal.actors.router.policies import routing_policy
from shoal.cluster.bench.trace.config import TraceConfig
from shoal.cluster.bench.trace.engine import SimulatedEngine
from shoal.cluster.bench.trace.job import Job, Served, served
from shoal.cluster.bench.trace.node import Node
from shoal.cluster.bench.trace.outcome import EngineWork, Outcome
from shoal.cluster.bench.trace.schedule import Event
from shoal.cluster.bench.trace.timeline import Timeline
from shoal.cluster.bench.trace.traces import TracedRequest, num_distinct_blocks, one_cache_hit_tokens
from shoal.kvstore.messages import StoreId, StoreSnapshot

MAX_UNBOUNDED_BLOCKS = 20_000_000
"""Of all engines together: a block costs this process some 40 bytes."""


class Replay:
    def __init__(
        self, requests: Sequence[TracedRequest], config: TraceConfig, schedule: Sequence[Event] = ()
    ) -> None:
        """Raises ValueError for a request that no engine could hold, or a schedule of engines that are not
        there."""
        self._requests = requests
        self._config = config
        self._schedule = schedule
        self._distinct = num_distinct_blocks(requests)
        self._num_blocks = self._blocks_of_an_engine()
        self._timeline = Timeline()
        self._members = Members(lambda: self._timeline.now)
        self._placer = Placer(
            self._members,
            block_size=config.block_size,
            clock=lambda: self._timeline.now,
            policy=routing_policy(config.policy),
        )
        self._nodes: list[Node] = []
        self._stores: dict[StoreId, Node] = {}
        self._engines: dict[EngineId, SimulatedEngine] = {}
        self._draining: set[EngineId] = set()
        self._homeless: list[Job] = []
        self._served: list[Served] = []
        self._num_replaced = 0
        self._check_schedule()

    def run(self, on_served: Callable[[int], None] = lambda num_served: None) -> Outcome:
        began = time.perf_counter()
        self._join(self._config.num_engines)
        for event in self._schedule:
            self._timeline.at(event.at_s, partial(self._change, event))
        for number, request in enumerate(self._requests):
            job = Job(request=request, request_id=RequestId(f"r{number}"))
            self._timeline.at(request.arrives_s, partial(self._place, job))
        while self._timeline.step():
            on_served(len(self._served))
        return self._outcome(time.perf_counter() - began)

    def check(self) -> None:
        """Raise AssertionError if a block has been lost anywhere."""
        for engine in self._engines.values():
            if engine.left_at is None:
                engine.check()
        for node in self._nodes:
            node.store.check()

    def _place(self, job: Job) -> None:
        placed = self._placer.place(
            PlacementRequest(
                request_id=job.request_id,
                attempt=job.attempt,
                num_prompt_tokens=job.num_prompt,
                block_keys=job.request.block_keys,
            )
        )
        if placed is None:
            self._homeless.append(job)
            return
        job.sources = placed.sources
        self._engines[placed.engine_id].add(job)

    def _ended(self, job: Job) -> None:
        self._served.append(served(job, self._timeline.now))
        engine_id = job.engine_id
        if engine_id in self._draining and self._engines[engine_id].is_idle:
            self._draining.remove(engine_id)
            self._engines[engine_id].die()

    # Members

    def _change(self, event: Event) -> None:
        if event.change == "join":
            self._join(event.count)
            return
        engine = self._engines[EngineId(f"engine-{event.engine}")]
        if engine.left_at is not None:
            return
        if event.change == "drain" and not engine.is_idle:
            self._draining.add(engine.engine_id)
            self._introduce()
            return
        jobs = engine.die()
        self._introduce()
        self._num_replaced += len(jobs)
        for job in jobs:
            self._place(job)

    def _join(self, count: int) -> None:
        for _ in range(count):
            number = len(self._engines)
            engine = SimulatedEngine(
                EngineId(f"engine-{number}"),
                self._node(number // self._config.engines_per_node),
                self._config,
                num_blocks=self._num_blocks,
                timeline=self._timeline,
                stores=self._stores,
                tell=self._members.report,
                on_end=self._ended,
            )
            self._engines[engine.engine_id] = engine
        self._introduce()
        homeless, self._homeless = self._homeless, []
        for job in homeless:
            self._place(job)

    def _node(self, number: int) -> Node:
        if number == len(self._nodes):
            num_blocks = self._config.num_store_blocks
            num_blocks = self._distinct if num_blocks is None else num_blocks
            node = Node(
                f"node-{number}", self._config, max(1, num_blocks), self._timeline, self._members.report_store
            )
            self._nodes.append(node)
            if self._config.has_stores:
                self._stores[node.store_id] = node
        return self._nodes[number]

    def _introduce(self) -> None:
        ready = [e for e in self._engines.values() if e.left_at is None and e.engine_id not in self._draining]
        self._members.set_engines(engine.info for engine in ready)
        self._members.set_stores(node.info for node in self._stores.values())
        for holder in self._members.take_snapshot_requests():
            self._members.restore(self._snapshot(holder))

    def _snapshot(self, holder: str) -> PrefixSnapshot | StoreSnapshot:
        """Each is asked when it is new."""
        if (node := self._stores.get(StoreId(holder))) is not None:
            return StoreSnapshot(store_id=node.store_id, sequence=0, block_keys=())
        return PrefixSnapshot(engine_id=EngineId(holder), sequence=0, block_keys=())

    # Before and after

    def _blocks_of_an_engine(self) -> int:
        config = self._config
        longest = max(r.num_prompt_tokens + r.num_output_tokens for r in self._requests)
        needed = -(-longest // config.block_size)
        if config.num_blocks is not None:
            if config.num_blocks < needed:
                raise ValueError(f"--blocks {config.num_blocks}: the longest request needs {needed}")
            return config.num_blocks
        num_engines = config.num_engines + sum(e.count for e in self._schedule if e.change == "join")
        num_blocks = self._distinct + needed * 16 + 4 * config.speed.max_num_seqs
        if num_blocks * num_engines > MAX_UNBOUNDED_BLOCKS:
            raise ValueError(
                f"{num_engines} engines with room for all {self._distinct:,} blocks of the trace take too "
                "much memory to simulate: choose --blocks"
            )
        return num_blocks

    def _check_schedule(self) -> None:
        num_engines = self._config.num_engines
        for event in self._schedule:
            if event.change == "join":
                num_engines += event.count
            elif event.engine >= num_engines:
                raise ValueError(
                    f"--schedule: at {event.at_s:g} s there is no engine {event.engine}, only 0 to "
                    f"{num_engines - 1}"
                )

    def _outcome(self, wall_s: float) -> Outcome:
        now = self._timeline.now
        return Outcome(
            policy=self._config.policy,
            num_prompt_tokens=sum(request.num_prompt_tokens for request in self._requests),
            ceiling_tokens=one_cache_hit_tokens(self._requests, self._config.block_size),
            served=tuple(self._served),
            num_unserved=len(self._homeless),
            engines=tuple(
                EngineWork(
                    engine_id=engine.engine_id,
                    alive_s=(now if engine.left_at is None else engine.left_at) - engine.joined_at,
                    num_requests=engine.num_requests,
                    computed_tokens=engine.computed_tokens,
                    fetched_bytes=engine.fetched_bytes,
                )
                for engine in self._engines.values()
            ),
            num_replaced=self._num_replaced,
            evicted_store_bytes=sum(node.store.counts.evicted_bytes for node in self._stores.values()),
            simulated_s=now,
            wall_s=wall_s,
        )
