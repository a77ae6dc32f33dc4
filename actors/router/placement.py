"""Where a request goes. Plain state and arithmetic; the clock is injected."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    PrefixSource,
)
from shoal.actors.router.engine_view import EngineView
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.outlook import Outlook
from shoal.actors.router.policies import CheapestEngine, RoutingPolicy
from shoal.actors.router.prefix_feed import PrefixFeed
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId
    expected_hit_tokens: int
    """Tokens of the prompt that the engine need not compute: it holds them, or fetches them."""
    sources: tuple[PrefixSource, ...] = ()


class Placer:
    """Sends each request to an engine that the policy chooses, by what all are known to hold and to do.

    An engine's report is some milliseconds old. What was placed since is known from our own notes: without
    them a burst would go where the last report was lowest, and would see nothing of the prefix it shares.
    """

    def __init__(
        self, *, block_size: int, clock: Callable[[], float], policy: RoutingPolicy | None = None
    ) -> None:
        """policy: the cheapest engine unless another is named."""
        self._block_size = block_size
        self._clock = clock
        self._policy = policy or CheapestEngine()
        self._directory: Directory[Holder] = Directory()
        self._engines: dict[EngineId, EngineView] = {}
        self._stores: dict[str, StoreId] = {}
        """By node: each has one."""
        self._feeds: dict[Holder, PrefixFeed[Holder]] = {}
        self._num_placed = 0

    def set_engines(self, infos: Iterable[EngineInfo]) -> None:
        """Exactly these may be placed on. What is known of those that stay is kept, of the others nothing."""
        wanted = {info.engine_id: info for info in infos}
        for gone in self._engines.keys() - wanted:
            del self._engines[gone]
            self._forget(gone)
        for new in sorted(wanted.keys() - self._engines.keys()):
            self._engines[new] = EngineView(wanted[new])
            self._feeds[new] = PrefixFeed(new, self._directory)

    def set_stores(self, infos: Iterable[StoreInfo]) -> None:
        """Exactly these, one a node, may be fetched from; the same holds."""
        before, self._stores = self._stores, {info.node: info.store_id for info in infos}
        for gone in set(before.values()).difference(self._stores.values()):
            self._forget(gone)
        for new in set(self._stores.values()).difference(before.values()):
            self._feeds[new] = PrefixFeed(new, self._directory)

    def place(self, request: PlacementRequest) -> Placement | None:
        """None when there is no engine but those that the request excludes."""
        now = self._clock()
        engines = [e for engine_id, e in self._engines.items() if engine_id not in request.exclude]
        if not engines:
            return None
        for engine in engines:
            engine.forget_old(now)
        outlook = Outlook(request, self._directory, self._stores, self._block_size)
        engine = self._policy.choose(engines, outlook, now)
        self._num_placed += 1
        engine.last_placed = self._num_placed
        chosen = outlook.of(engine)
        engine.note(request, chosen.num_on_device, outlook.computed_tokens(chosen.resume), now)
        return Placement(
            engine_id=engine.engine_id,
            expected_hit_tokens=chosen.resume.start * self._block_size,
            sources=outlook.sources(engine, chosen.resume),
        )

    def report(self, report: EngineReport) -> None:
        """Take an engine's account. An engine that may not be placed on has none."""
        if engine := self._engines.get(report.engine_id):
            engine.report(report)
            self._feeds[report.engine_id].report(report)

    def report_store(self, report: StoreReport) -> None:
        if feed := self._feeds.get(report.store_id):
            feed.report(report)

    def take_snapshot_requests(self) -> list[Holder]:
        """Who is to be asked for a snapshot now; `restore` or `give_up` must follow for each."""
        return [holder for holder, feed in self._feeds.items() if feed.take_request()]

    def restore(self, snapshot: PrefixSnapshot | StoreSnapshot) -> None:
        holder = snapshot.engine_id if isinstance(snapshot, PrefixSnapshot) else snapshot.store_id
        if feed := self._feeds.get(holder):
            feed.restore(snapshot)

    def give_up(self, holder: Holder) -> None:
        """No snapshot came; it may be asked for again."""
        if feed := self._feeds.get(holder):
            feed.give_up()

    def loads(self) -> dict[EngineId, int]:
        """Requests counted on each engine now."""
        now = self._clock()
        for engine in self._engines.values():
            engine.forget_old(now)
        return {engine_id: engine.num_requests for engine_id, engine in self._engines.items()}

    def held(self) -> dict[Holder, frozenset[BlockKey]]:
        """What each engine and store is known to hold, if its reports are followed without a gap."""
        return {h: self._directory.keys_of(h) for h, feed in self._feeds.items() if feed.following}

    def _forget(self, holder: Holder) -> None:
        del self._feeds[holder]
        self._directory.forget(holder)
