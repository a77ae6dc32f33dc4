"""What a simulated engine holds: the real pools, prefix cache and saves, with nothing in the blocks."""

from collections.abc import Iterable, Sequence

from shoal.actors.engine.block_pool import Admission
from shoal.actors.engine.pools import Holding, Pools
from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.engine.saves import Occasion, Saves
from shoal.actors.engine.transfers import StoreView, tokens_by_place
from shoal.cluster.bench.trace.config import TraceConfig
from shoal.cluster.bench.trace.job import Job
from shoal.kvstore.block_hash import BlockKey, root_key
from shoal.kvstore.messages import StoreId

ROOT = root_key(b"trace", "")


class Memory:
    """As `Scheduler`, `Sharing` and `Fetches` use them, with two differences: a request claims at once the
    blocks of its output too, so that nobody is preempted; and a prompt is cached as a whole when it is
    computed, not chunk by chunk.
    """

    def __init__(self, config: TraceConfig, num_blocks: int, own: StoreId | None) -> None:
        self._block_size = config.block_size
        self._pools = Pools(
            num_blocks=num_blocks + 1,
            block_size=config.block_size,
            num_rows=config.speed.max_num_seqs + 1,
        )
        self._cache = self._pools.prefix_cache
        view = StoreView(
            bytes_per_block=config.bytes_per_block,
            bytes_per_segment=0,
            worth=lambda tokens, own_bytes, other_bytes: True,  # the engine decides, not these
            write_policy=config.write_policy,
            own=own,
        )
        self.saves = Saves(self._pools, view if own is not None else None)

    def path(self, job: Job) -> tuple[BlockKey, ...]:
        """Of the blocks that it need not compute if they are there."""
        return job.request.block_keys[: job.request.num_skippable(self._block_size)]

    def num_matched(self, job: Job) -> int:
        return len(self._cache.match(self.path(job)))

    def keep(self, job: Job) -> None:
        """Own for it what is there of its prefix."""
        matched = self._cache.match(self.path(job))
        self._cache.lock(matched)
        before, job.kept = job.kept, Holding(block_table=matched)
        self._pools.release(before)

    def let_go(self, job: Job) -> None:
        """Of what was kept for it."""
        self._pools.release(job.kept)

    def land(self, job: Job, keys: Iterable[BlockKey], own: Iterable[BlockKey]) -> list[BlockKey]:
        """Cache what has come for it as far as it goes on from what is there and has room, and keep it.

        own: what of it the own node's store has. Returns what was cached.
        """
        came, path = set(keys), self.path(job)
        self.keep(job)
        first = end = len(job.kept.block_table)
        while end < len(path) and path[end] in came:
            end += 1
        end = min(end, first + self._pools.num_available)
        landed = path[first:end]
        blocks = self._pools.claim_blocks(end - first)
        kept = self._cache.insert(self._parent(path, first), landed, blocks)
        assert kept == blocks, "one that was there has been matched"
        job.kept.block_table += blocks
        self.saves.stored(set(own).intersection(landed))
        self.saves.note(Occasion.CACHED, landed)
        return list(landed)

    def admission(self, job: Job) -> Admission:
        hit = self._cache.match(self.path(job))
        return self._pools.admission(job.num_prompt + job.num_left, hit=hit)

    def admit(self, job: Job) -> int:
        """Tokens that are left to compute."""
        path = self.path(job)
        hit = self._cache.match(path)
        job.holding = self._pools.claim(job.num_prompt + job.num_left, hit=hit)
        self._pools.release(job.kept)
        job.num_shared = len(hit)
        if job.hits is None:
            places = [job.fetched.get(key) for key in path[: len(hit)]]
            job.hits = tokens_by_place(places, self._block_size, len(hit) * self._block_size)
        self.saves.note(Occasion.SEEN_AGAIN, path[: len(hit)])
        return job.num_prompt - len(hit) * self._block_size

    def computed(self, job: Job) -> None:
        """The blocks of its prompt are complete."""
        keys, table, first = job.request.block_keys, job.holding.block_table, job.num_shared
        own = table[first : len(keys)]
        kept = self._cache.insert(self._parent(keys, first), keys[first:], own)
        table[first : len(keys)] = kept
        duplicates = [block for block, other in zip(own, kept, strict=True) if block != other]
        self._cache.unlock(duplicates)
        self.saves.note(Occasion.CACHED, keys[first:])

    def ended(self, job: Job) -> None:
        self.saves.note(Occasion.TURN_ENDED, job.request.block_keys)
        self._pools.release(job.holding)

    def take_changes(self) -> PrefixChanges:
        return self._cache.changes.take()

    def check(self, jobs: Iterable[Job]) -> None:
        """Every block is free, cached or a job's."""
        self._pools.check(holding for job in jobs for holding in (job.holding, job.kept))
        self.saves.check()

    def _parent(self, keys: Sequence[BlockKey], index: int) -> BlockKey:
        return keys[index - 1] if index else ROOT
