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
from shoal.actors.router.engine_view import UNMEASURED_TOKENS_PER_S, EngineView
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.outlook import Outlook
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


class CheapestEngine:
    """Places where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT · tokens to compute there + a fetch weight · tokens to fetch there
                      + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more, or
    fetching it; then another engine has it too. Among equals the one placed on longest ago is next.

    An engine's report is some milliseconds old. What was placed since is known from our own notes: without
    them a burst would go where the last report was lowest, and would see nothing of the prefix it shares.
    """

    def __init__(self, *, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
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
        prospects = {engine: outlook.of(engine) for engine in engines}
        fastest = max(e.tokens_per_s for e in self._engines.values()) or UNMEASURED_TOKENS_PER_S

        def rank(engine: EngineView) -> tuple[float, int]:
            tokens = prospects[engine].tokens + engine.standing_tokens(now)
            return 1e3 * tokens / engine.believed_tokens_per_s(fastest, now), engine.last_placed

        engine = min(engines, key=rank)
        self._num_placed += 1
        engine.last_placed = self._num_placed
        chosen = prospects[engine]
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

    @property
    def is_up_to_date(self) -> bool:
        """Whether what nobody is known to hold nobody holds."""
        return all(feed.following for feed in self._feeds.values())

    def held(self) -> dict[Holder, frozenset[BlockKey]]:
        """What each engine and store is known to hold, if its reports are followed without a gap."""
        return {h: self._directory.keys_of(h) for h, feed in self._feeds.items() if feed.following}

    def _forget(self, holder: Holder) -> None:
        del self._feeds[holder]
        self._directory.forget(holder)
