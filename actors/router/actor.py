"""The router's process: a door to placement. One call a request; no token passes through."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from shoal.actors.messages import EngineId, EngineInfo, EngineReport, PlacementReply, PlacementRequest
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.members import Members
from shoal.actors.router.metrics import router_metrics
from shoal.actors.router.placement import Placer
from shoal.actors.router.policies import RoutingPolicyName, routing_policy
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within
from shoal.kvstore.messages import StoreInfo, StoreReport
from shoal.kvstore.metrics import METRICS_INTERVAL_S, NO_LABELS, Labels, Metrics, name_for_people

logger = logging.getLogger(__name__)

SNAPSHOT_DEADLINE_S = 10.0
"""An engine answers between two steps. Who does not is asked again when somebody is next heard of."""


class RouterActor:
    """Holds nothing that cannot be told again: after a restart, members, loads and prefixes arrive anew."""

    def __init__(
        self, block_size: int, policy: RoutingPolicyName = "cost", labels: Labels = NO_LABELS
    ) -> None:
        """labels: of its metrics."""
        self._labels = labels
        self._members = Members(time.monotonic)
        self._placer = Placer(
            self._members, block_size=block_size, clock=time.monotonic, policy=routing_policy(policy)
        )
        self._actors: dict[Holder, Any] = {}
        self._fingerprints: frozenset[bytes] = frozenset()
        self._asking: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return name_for_people(f"router of {self._labels.get('model_name', 'one model')}", self._labels)

    async def start(self) -> None:
        """Ready as soon as it answers."""
        if self._publishing is None:  # a restarted supervisor asks again
            self._publishing = asyncio.create_task(self._publish_metrics())

    async def ping(self) -> None:
        """Answers while the process lives."""

    async def place(self, request: PlacementRequest) -> PlacementReply | None:
        """None when no engine is ready but those that the request excludes."""
        placed = self._placer.place(request)
        if placed is None:
            return None
        return PlacementReply(
            engine_id=placed.engine_id,
            sources=placed.sources,
            hit_tokens=placed.expected_hit_tokens,
            is_up_to_date=self._members.is_up_to_date,
            fingerprints=self._fingerprints,
        )

    async def report(self, report: EngineReport) -> None:
        self._members.report(report)
        self._ask_for_snapshots()

    async def report_store(self, report: StoreReport) -> None:
        self._members.report_store(report)
        self._ask_for_snapshots()

    async def set_members(
        self, engines: Sequence[tuple[EngineInfo, Any]], stores: Sequence[tuple[StoreInfo, Any]]
    ) -> None:
        """Exactly these, each with its actor, may be placed on and fetched from."""
        self._actors = {info.engine_id: actor for info, actor in engines}
        self._fingerprints = frozenset(info.fingerprint for info, _ in engines)
        self._actors |= {info.store_id: actor for info, actor in stores}
        self._members.set_engines(info for info, _ in engines)
        self._members.set_stores(info for info, _ in stores)
        self._ask_for_snapshots()

    async def loads(self) -> dict[EngineId, int]:
        return self._members.loads()

    async def held(self) -> dict[Holder, frozenset[BlockKey]]:
        """What is known of the prefixes of each engine and store that is followed without a gap."""
        return self._members.held()

    def _ask_for_snapshots(self) -> None:
        for holder in self._members.take_snapshot_requests():
            task = asyncio.create_task(self._ask(holder, self._actors[holder]))
            self._asking.add(task)  # the event loop itself holds tasks only weakly
            task.add_done_callback(self._asking.discard)

    async def _ask(self, holder: Holder, actor: Any) -> None:
        try:
            snapshot = await within(SNAPSHOT_DEADLINE_S, actor.snapshot.remote())
        except (RayError, TimeoutError) as error:
            logger.warning("no snapshot from %s: %s", holder, type(error).__name__)
            self._members.give_up(holder)
        else:
            self._members.restore(snapshot)
            self._ask_for_snapshots()

    async def _publish_metrics(self) -> None:
        metrics = Metrics("router", self._labels)
        while True:
            metrics.tell(router_metrics(self._members))
            await asyncio.sleep(METRICS_INTERVAL_S)
