"""A simulated machine: the host memory that its engines share, and its way to the other ones."""

from collections.abc import Callable, Sequence

from shoal.cluster.bench.trace.config import REPORT_INTERVAL_S, TraceConfig
from shoal.cluster.bench.trace.timeline import Timeline
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport
from shoal.kvstore.store import ENTRY_BYTES, KVStore


class Node:
    """Its store is the real one, without bytes behind the tickets. What other nodes send comes in turn."""

    def __init__(
        self,
        name: str,
        config: TraceConfig,
        num_store_blocks: int,
        timeline: Timeline,
        tell: Callable[[StoreReport], None],
    ) -> None:
        budget_bytes = num_store_blocks * (config.bytes_per_block + ENTRY_BYTES)
        self.name = name
        self.store_id = StoreId(f"store-{name}")
        self.store: KVStore[None] = KVStore(budget_bytes, lambda: timeline.now)
        self._timeline = timeline
        self._tell = tell
        self._link = config.other_link
        self._busy_until = 0.0
        self._sequence = 0
        self._is_reporting = False

    @property
    def info(self) -> StoreInfo:
        return StoreInfo(store_id=self.store_id, node=self.name, budget_bytes=self.store.budget_bytes)

    def receive(self, num_bytes: int) -> float:
        """In so many seconds that much has come from another node, behind what was asked for before."""
        begins_at = max(self._timeline.now, self._busy_until)
        self._busy_until = begins_at + self._link.seconds(num_bytes)
        return self._busy_until - self._timeline.now

    def read(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockKey]]:
        """A lease, and what is there."""
        reading = self.store.read(keys)
        return reading.lease_id, [entry.key for extent in reading.extents for entry in extent.entries]

    def has_news(self) -> None:
        if self.store.changes and not self._is_reporting:
            self._is_reporting = True
            self._timeline.after(REPORT_INTERVAL_S, self._report)

    def _report(self) -> None:
        self._is_reporting = False
        self._sequence += 1
        stored, removed = self.store.changes.take()
        report = StoreReport(store_id=self.store_id, sequence=self._sequence, stored=stored, removed=removed)
        self._tell(report)
