"""Who may be placed on and fetched from, and what each holds. Plain state; the clock is injected."""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from shoal.actors.messages import EngineId, EngineInfo, EngineReport, PrefixSnapshot
from shoal.actors.router.engine_view import EngineView
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.fleet import Fleet
from shoal.actors.router.prefix_feed import PrefixFeed
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.directory import Directory
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot

GRACE_S = 30.0
"""What is known of a member that is away is kept so long. A supervisor that restarts then costs nothing,
where all prefixes would have to be asked for again. One that is really gone takes up some memory."""


class Members:
    """Engines and stores, by what the supervisor names; and their reports, by what they say themselves.

        unknown ──named──▶ PRESENT ──not named──▶ AWAY ──for GRACE_S──▶ unknown
                              ▲                    │
                              └───────named────────┘

    PRESENT is what may be placed on or fetched from. AWAY loses that alone: its reports are followed on, so
    that it is known in full when it comes back. Of the unknown nothing is kept and nothing is heard.
    """

    def __init__(self, clock: Callable[[], float], directory: Directory[Holder] | None = None) -> None:
        self._clock = clock
        self.directory: Directory[Holder] = Directory() if directory is None else directory
        self.engines: dict[EngineId, EngineView] = {}
        """Those that are present."""
        self.fleet = Fleet.of(())
        """The same."""
        self.stores: dict[str, StoreId] = {}
        """Likewise, by node: each has one."""
        self._views: dict[EngineId, EngineView] = {}
        self._feeds: dict[Holder, PrefixFeed[Holder]] = {}
        self._away: dict[Holder, float] = {}  # since when
        self._rules: dict[BoundaryRule, BoundaryRule] = {}
        self.num_snapshots = 0
        """That were asked for, since the beginning."""

    @property
    def present(self) -> list[Holder]:
        return [*self.engines, *self.stores.values()]

    def set_engines(self, infos: Iterable[EngineInfo]) -> None:
        """Exactly these may be placed on."""
        wanted = {info.engine_id: info for info in infos}
        now, before = self._clock(), list(self.engines.values())
        used = sum(view.recent(now)[0] for view in before) / max(1, len(before))
        for new in sorted(wanted.keys() - self._views.keys()):
            self._views[new] = EngineView(self._with_shared_rule(wanted[new]))
            self._views[new].pretend(used, now)
        self._change(self.engines.keys(), wanted.keys(), self._views.keys())
        self.engines = {engine_id: view for engine_id, view in self._views.items() if engine_id in wanted}
        self.fleet = Fleet.of(tuple(self.engines.values()))

    def set_stores(self, infos: Iterable[StoreInfo]) -> None:
        """Exactly these, one a node, may be fetched from."""
        before, self.stores = self.stores, {info.node: info.store_id for info in infos}
        known = self._feeds.keys() - self._views.keys()
        self._change(set(before.values()), set(self.stores.values()), known)

    def report(self, report: EngineReport) -> None:
        """Take an engine's account."""
        if view := self._views.get(report.engine_id):
            view.report(report)
            self._feeds[report.engine_id].report(report)

    def report_store(self, report: StoreReport) -> None:
        if feed := self._feeds.get(report.store_id):
            feed.report(report)

    def take_snapshot_requests(self) -> list[Holder]:
        """Who is to be asked for a snapshot now; `restore` or `give_up` must follow for each."""
        for holder in self.directory.take_cut():
            self._feeds[holder].doubt()
        asked = [holder for holder in self.present if self._feeds[holder].take_request()]
        self.num_snapshots += len(asked)
        return asked

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
        for view in self.engines.values():
            view.forget_old(now)
        return {engine_id: view.num_requests for engine_id, view in self.engines.items()}

    @property
    def is_up_to_date(self) -> bool:
        """Whether all that those present have said was heard, and kept. If not, hits may be overlooked."""
        present = self.present
        has_all = self.directory.cut.isdisjoint(present)
        return has_all and all(self._feeds[holder].following for holder in present)

    def held(self) -> dict[Holder, frozenset[BlockKey]]:
        """What each engine and store is known to hold, if its reports are followed without a gap."""
        return {
            holder: self.directory.keys_of(holder) for holder in self.present if self._feeds[holder].following
        }

    def check(self) -> None:
        """Raise AssertionError if something is kept of one who is unknown, or the books disagree."""
        self.directory.check()
        known = self._feeds.keys()
        assert set(self.present) | self._away.keys() == known
        assert not self._away.keys() & set(self.present)
        assert self.engines.items() <= self._views.items() and self._views.keys() <= known
        assert all(holder in known for holder in self.directory.holders)

    def _with_shared_rule(self, info: EngineInfo) -> EngineInfo:
        """Equal rules become one object, so that to compare them costs a placement nothing."""
        return replace(info, rule=self._rules.setdefault(info.rule, info.rule))

    def _change(self, before: Set[Holder], now: Set[Holder], known: Set[Holder]) -> None:
        """known: all of that kind, those that are away among them."""
        self._away |= dict.fromkeys(before - now, self._clock())
        for holder in sorted(now):
            self._away.pop(holder, None)
            if holder not in self._feeds:
                self._feeds[holder] = PrefixFeed(holder, self.directory)
        for holder in [holder for holder in known if holder in self._away]:
            if self._clock() - self._away[holder] >= GRACE_S:
                self._forget(holder)

    def _forget(self, holder: Holder) -> None:
        del self._away[holder], self._feeds[holder]
        self._views.pop(EngineId(holder), None)
        self.directory.forget(holder)
