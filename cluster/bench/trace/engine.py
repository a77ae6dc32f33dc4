"""A simulated engine: a queue, the memory it draws on, and the speed at which it computes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from shoal.actors.engine.account import Account, Turn
from shoal.actors.engine.block_pool import Admission
from shoal.actors.engine.fetch_plan import Offers, plan_fetch
from shoal.actors.engine.transfers import Piece
from shoal.actors.messages import EngineId, EngineInfo, EngineReport
from shoal.cluster.bench.trace.compute import Compute
from shoal.cluster.bench.trace.config import REPORT_INTERVAL_S, TraceConfig
from shoal.cluster.bench.trace.job import Job
from shoal.cluster.bench.trace.memory import Memory
from shoal.cluster.bench.trace.node import Node
from shoal.cluster.bench.trace.timeline import Timeline
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.messages import Extent, StoredEntry, StoreId

EVERYTHING = 1 << 62
RULE = BoundaryRule()


class SimulatedEngine:
    """Prompts are computed in order of arrival, those that wait for a fetch being passed over.

    Everything that it does later it has planned on the timeline; nothing of that happens once it is dead.
    """

    def __init__(
        self,
        engine_id: EngineId,
        node: Node,
        config: TraceConfig,
        *,
        num_blocks: int,
        timeline: Timeline,
        stores: Mapping[StoreId, Node],
        tell: Callable[[EngineReport], None],
        on_end: Callable[[Job], None],
    ) -> None:
        self.engine_id = engine_id
        self.node = node
        self.joined_at = timeline.now
        self.left_at: float | None = None
        self.computed_tokens = 0
        self.num_requests = 0
        self.fetched_bytes = 0
        self._config = config
        self._timeline = timeline
        self._stores = stores
        self._tell = tell
        self._on_end = on_end
        self._memory = Memory(config, num_blocks, node.store_id if config.has_stores else None)
        self._compute: Compute[Job] = Compute(config.speed)
        self._waiting: list[Job] = []
        self._keeping: dict[Job, None] = {}  # of those that wait, for whom something is kept
        self._running: dict[Job, None] = {}
        self._uncomputed_waiting = 0
        self._account = Account(engine_id)
        self._arrived: list[Job] = []
        self._is_reporting = self._is_saving = False
        self._wake_number = 0
        self._extent_ids = (f"{engine_id}/{number}" for number in count(1))

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine_id=self.engine_id, node=self.node.name, backend="simulated", memory="", fingerprint=b""
        )

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: Job) -> None:
        self.num_requests += 1
        job.engine_id = self.engine_id
        self._arrived.append(job)
        self._waiting.append(job)
        self._uncomputed_waiting += job.num_uncomputed
        if self._config.has_stores:
            self._begin_fetch(job)
        self._go_on()

    def die(self) -> list[Job]:
        """What is left to do, by somebody else; nobody hears of this engine again."""
        self.left_at = now = self._timeline.now
        jobs = [job.again(job.num_drawn) for job in self._waiting]
        for job in self._running:
            left = math.ceil(self._compute.left_to_draw(job, now))
            jobs.append(job.again(job.request.num_output_tokens - left if left else job.num_drawn))
        self._waiting, self._keeping, self._running = [], {}, {}
        return jobs

    def check(self) -> None:
        self._memory.check([*self._waiting, *self._running])

    # Computing

    def _go_on(self) -> None:
        """Begin with the next prompt if none is being computed, and plan the next end."""
        if not self._compute.is_computing:
            self._admit()
            self._plan_wake()
        self._report_soon()

    def _plan_wake(self) -> None:
        self._wake_number += 1
        if (when := self._compute.next_at()) is not None:
            self._timeline.at(when, partial(self._wake, self._wake_number))

    def _wake(self, number: int) -> None:
        if number != self._wake_number or self.left_at is not None:
            return
        now = self._timeline.now
        computed, drawn = self._compute.take_ended(now)
        if computed is not None:
            self._memory.computed(computed)
            if computed.first_token_at is None:
                computed.first_token_at = now
            if computed.num_left > 1:
                self._compute.draw(computed, computed.num_left - 1, computed.num_prompt, now)
            else:
                self._end(computed)
        if drawn is not None:
            self._end(drawn)
        if not self._compute.is_computing:
            self._admit()
        self._plan_wake()
        self._save()
        self._report_soon()

    def _end(self, job: Job) -> None:
        del self._running[job]
        self._memory.ended(job)
        self._on_end(job)

    def _admit(self) -> None:
        if self._compute.num_drawing >= self._config.speed.max_num_seqs:
            return
        job = next((job for job in self._waiting if not job.is_fetching), None)
        if job is None or not self._fits(job):
            return
        self._waiting.remove(job)
        self._keeping.pop(job, None)
        self._uncomputed_waiting -= job.num_uncomputed
        num_tokens = self._memory.admit(job)
        self.computed_tokens += num_tokens
        self._running[job] = None
        self._compute.compute(job, num_tokens, self._timeline.now)

    def _fits(self, job: Job) -> bool:
        """Those behind it give up what is kept for them, the last first, if that helps."""
        behind = [other for other in self._keeping if other is not job]
        while self._memory.admission(job) is not Admission.OK:
            if not behind:
                return False
            other = behind.pop()
            self._memory.let_go(other)
            del self._keeping[other]
        return True

    # Fetching and saving

    def _begin_fetch(self, job: Job) -> None:
        own = self.node.store_id
        offers = Offers.of(job.sources, own)
        path, num_matched = self._memory.path(job), self._memory.num_matched(job)
        for asked in (offers, offers.only(own)):
            plan = plan_fetch(
                RULE, asked, num_blocks=len(path), num_matched=num_matched, has_segment=lambda _: False
            )
            if plan.blocks and self._is_worth(plan.blocks):
                self._fetch(job, {path[i]: store for i, store in plan.blocks.items()})
                return

    def _is_worth(self, blocks: Mapping[int, StoreId]) -> bool:
        """Are they fetched sooner than computed, as far as the engine can know?"""
        config = self._config
        num_own = sum(store == self.node.store_id for store in blocks.values())
        num_other = len(blocks) - num_own
        seconds = config.own_link.seconds(num_own * config.bytes_per_block) if num_own else 0.0
        seconds += config.other_link.seconds(num_other * config.bytes_per_block) if num_other else 0.0
        return seconds < len(blocks) * config.block_size / config.speed.prefill_tokens_per_s

    def _fetch(self, job: Job, wanted: Mapping[BlockKey, StoreId]) -> None:
        seconds, leases, came = 0.0, [], dict[BlockKey, StoreId]()
        for store_id in dict.fromkeys(wanted.values()):
            node = self._stores[store_id]
            lease_id, keys = node.read([key for key, store in wanted.items() if store == store_id])
            leases.append((node, lease_id))
            came |= dict.fromkeys(keys, store_id)
            num_bytes = len(keys) * self._config.bytes_per_block
            self.fetched_bytes += num_bytes
            is_own = node is self.node
            takes = self._config.own_link.seconds(num_bytes) if is_own else self.node.receive(num_bytes)
            seconds = max(seconds, takes)
        self._memory.keep(job)
        self._keeping[job] = None
        job.is_fetching = True
        num_promised = (self._memory.num_matched(job) + len(came)) * self._config.block_size
        self._uncomputed_waiting -= num_promised
        job.num_promised = num_promised
        self._timeline.after(seconds, partial(self._landed, job, came, leases))

    def _landed(self, job: Job, came: Mapping[BlockKey, StoreId], leases: Iterable[tuple[Node, int]]) -> None:
        for node, lease_id in leases:
            node.store.release(lease_id)
        if self.left_at is not None:
            return
        own = self.node.store_id
        landed = self._memory.land(job, came, [key for key, store in came.items() if store == own])
        job.fetched |= {key: "own_store" if came[key] == own else "other_store" for key in landed}
        job.is_fetching = False
        self._keeping[job] = None
        self._save()
        self._go_on()

    def _save(self) -> None:
        """One batch after the other, beside the steps."""
        if self._is_saving or not self._config.has_stores:
            return
        pieces = self._memory.saves.take(EVERYTHING)
        if pieces:
            self._is_saving = True
            extents = [self._extent(piece) for piece in pieces]
            wanted = [extent for extent in extents if self.node.store.put_start(extent) is not None]
            seconds = self._config.own_link.seconds(len(wanted) * self._config.bytes_per_block)
            self._timeline.after(seconds, partial(self._saved, pieces, wanted))

    def _saved(self, pieces: Sequence[Piece], extents: Sequence[Extent]) -> None:
        """What an engine that is dead by now had begun to save has not come."""
        for extent in extents:
            if self.left_at is None:
                self.node.store.put_end(extent.extent_id, None)
            else:
                self.node.store.put_abort(extent.extent_id)
        self.node.has_news()
        self._memory.saves.end(pieces)
        self._is_saving = False
        if self.left_at is None:
            self._save()
            self._go_on()

    def _extent(self, piece: Piece) -> Extent:
        size = self._config.bytes_per_block
        entry = StoredEntry(key=piece.key, parent=piece.parent, offset=0, size=size, checksum=0)
        return Extent(extent_id=next(self._extent_ids), entries=(entry,), num_bytes=size)

    # Reporting

    def _report_soon(self) -> None:
        if not self._is_reporting:
            self._is_reporting = True
            self._timeline.after(REPORT_INTERVAL_S, self._report)

    def _report(self) -> None:
        self._is_reporting = False
        if self.left_at is not None:
            return
        arrived, self._arrived = self._arrived, []
        computing = self._compute.left_tokens(self._timeline.now)
        config = self._config
        turn = Turn(
            num_requests=len(self._waiting) + len(self._running),
            uncomputed_tokens=self._uncomputed_waiting + int(computing),
            tokens_per_s=config.speed.prefill_tokens_per_s,
            own_fetch_tokens_per_s=config.own_link.bytes_per_s / config.bytes_per_token,
            other_fetch_tokens_per_s=config.other_link.bytes_per_s / config.bytes_per_token,
            arrived=tuple((job.request_id, job.attempt) for job in arrived),
            prefixes=self._memory.take_changes(),
        )
        if self._account.add(turn):
            self._tell(self._account.take_report())
