"""Who is known, and what of them: worked examples, then any history of reports, absences and answers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.actors.messages import EngineId, EngineInfo, EngineReport, PrefixSnapshot
from shoal.actors.router.fetch_plan import Holder
from shoal.actors.router.members import GRACE_S, Members
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot

A, B = EngineId("engine-a"), EngineId("engine-b")
STORE = StoreId("store")


def keys(text: str) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(letter.encode()) for letter in text)


def engines(*ids: EngineId) -> list[EngineInfo]:
    return [EngineInfo(engine_id=i, node="n", backend="", memory="", fingerprint=b"") for i in ids]


def stores(*ids: StoreId) -> list[StoreInfo]:
    return [StoreInfo(store_id=i, node=f"node of {i}", budget_bytes=1) for i in ids]


@dataclass
class Sender:
    """An engine or a store, and what it has said."""

    name: Holder
    is_store: bool
    held: set[BlockKey] = field(default_factory=set)
    sequence: int = 0

    def report(self, stored: str = "", removed: str = "") -> EngineReport | StoreReport:
        self.sequence += 1
        self.held = (self.held | set(keys(stored))) - set(keys(removed))
        if self.is_store:
            return StoreReport(
                store_id=StoreId(self.name),
                sequence=self.sequence,
                stored=keys(stored),
                removed=keys(removed),
            )
        return EngineReport(
            engine_id=EngineId(self.name),
            sequence=self.sequence,
            num_requests=0,
            uncomputed_tokens=0,
            tokens_per_s=0.0,
            received=(),
            stored=keys(stored),
            removed=keys(removed),
        )

    def snapshot(self) -> PrefixSnapshot | StoreSnapshot:
        block_keys = tuple(sorted(self.held))
        if self.is_store:
            return StoreSnapshot(store_id=StoreId(self.name), sequence=self.sequence, block_keys=block_keys)
        return PrefixSnapshot(engine_id=EngineId(self.name), sequence=self.sequence, block_keys=block_keys)


def hear(members: Members, report: EngineReport | StoreReport) -> None:
    if isinstance(report, StoreReport):
        members.report_store(report)
    else:
        members.report(report)


class Cluster:
    """Members who answer at once, and a clock that only the test moves."""

    def __init__(self, *senders: Sender, max_entries: int = 1000) -> None:
        self.now = 0.0
        self.senders = {sender.name: sender for sender in senders}
        self.members = Members(lambda: self.now, Directory(max_entries))
        self.name(*self.senders)

    def name(self, *names: Holder) -> None:
        named = [self.senders[name] for name in names]
        self.members.set_engines(engines(*(EngineId(s.name) for s in named if not s.is_store)))
        self.members.set_stores(stores(*(StoreId(s.name) for s in named if s.is_store)))
        self.answer()

    def hear(self, name: Holder, stored: str = "", removed: str = "") -> None:
        hear(self.members, self.senders[name].report(stored, removed))
        self.answer()

    def answer(self) -> None:
        while asked := self.members.take_snapshot_requests():
            for name in asked:
                self.members.restore(self.senders[name].snapshot())
        self.members.check()


def test_case_08_a_moment_of_absence_costs_no_snapshot() -> None:
    cluster = Cluster(Sender(A, is_store=False), Sender(STORE, is_store=True))
    cluster.hear(A, "ab")
    cluster.hear(STORE, "a")
    cluster.name()
    assert (cluster.members.present, cluster.members.held()) == ([], {})
    cluster.now += GRACE_S - 1
    cluster.name()
    cluster.hear(A, "c", removed="b")
    cluster.name(A, STORE)
    assert cluster.members.held() == {A: set(keys("ac")), STORE: set(keys("a"))}
    assert cluster.members.num_snapshots == 2, "one each, at the beginning"


def test_case_12_who_is_away_for_longer_leaves_nothing() -> None:
    cluster = Cluster(Sender(A, is_store=False), Sender(B, is_store=False), Sender(STORE, is_store=True))
    for name in (A, B, STORE):
        cluster.hear(name, "ab")
    cluster.name(B)
    cluster.now += GRACE_S
    cluster.name(B)
    assert cluster.members.directory.holders == {B}
    cluster.hear(A, "c")
    cluster.members.restore(cluster.senders[A].snapshot())
    cluster.members.give_up(A)
    assert cluster.members.directory.holders == {B}, "nor is it heard"
    cluster.name(A, B, STORE)
    assert cluster.members.held()[A] == set(keys("abc")), "until it is named again: then it is asked"


def test_who_comes_and_goes_does_not_stretch_its_grace() -> None:
    cluster = Cluster(Sender(A, is_store=False))
    cluster.hear(A, "a")
    cluster.name()
    for _ in range(3):
        cluster.now += GRACE_S / 3
        cluster.name()
    assert cluster.members.directory.holders == set()


def test_nobody_is_asked_while_it_is_away() -> None:
    cluster = Cluster(Sender(A, is_store=False))
    cluster.name()
    cluster.senders[A].report("a")  # is lost
    cluster.hear(A, "b")
    assert cluster.members.num_snapshots == 1
    cluster.name(A)
    assert cluster.members.num_snapshots == 2
    assert cluster.members.held()[A] == set(keys("ab"))


def test_a_report_of_an_unknown_engine_or_store_is_not_heard() -> None:
    cluster = Cluster(Sender(A, is_store=False))
    hear(cluster.members, Sender(B, is_store=False).report("ab"))
    hear(cluster.members, Sender(STORE, is_store=True).report("ab"))
    cluster.members.check()
    assert cluster.members.held() == {A: set()}


def test_whose_keys_found_no_room_is_asked_once_when_there_is_room_again() -> None:
    cluster = Cluster(Sender(A, is_store=False), Sender(B, is_store=False), max_entries=8)
    cluster.hear(A, "abcdefg")
    cluster.hear(B, "xyz")
    assert cluster.members.held() == {A: set(keys("abcde")), B: set(keys("xyz"))}, "the longest gave way"
    assert not cluster.members.is_up_to_date, "what is known is true, but not all"
    before = cluster.members.num_snapshots
    cluster.hear(A, removed="a")
    assert cluster.members.held()[A] == set(keys("bcdef"))
    assert cluster.members.num_snapshots == before + 1
    cluster.hear(B, removed="xyz")
    cluster.hear(B, "u")
    assert cluster.members.held()[A] == set(keys("bcdefg"))
    assert cluster.members.num_snapshots == before + 2
    assert cluster.members.is_up_to_date


NAMES: list[Holder] = [A, B, STORE]
WHICH = st.sampled_from(NAMES)
KEYS = st.sampled_from("abcdef")


class AnyHistory(RuleBasedStateMachine):
    """Reports are lost, late, said twice; members vanish and return; answers come when they come, or never.

    Each fault may cost one snapshot, and nothing else does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.members = Members(lambda: self.now)
        self.senders = {name: Sender(name, name == STORE) for name in NAMES}
        self.in_flight: defaultdict[Holder, list[EngineReport | StoreReport]] = defaultdict(list)
        self.asked: dict[Holder, PrefixSnapshot | StoreSnapshot | None] = {}
        self.away: dict[Holder, float] = {}
        self.ever_held: defaultdict[Holder, set[BlockKey]] = defaultdict(set)
        self.num_excuses = 0
        self.name(NAMES)

    @rule(which=WHICH, key=KEYS, stored=st.booleans())
    def says(self, which: Holder, key: str, stored: bool) -> None:
        said = self.senders[which].report(key, "") if stored else self.senders[which].report("", key)
        self.in_flight[which].append(said)
        self.ever_held[which] |= self.senders[which].held

    @rule(which=WHICH, place=st.integers(0, 3))
    def is_heard(self, which: Holder, place: int) -> None:
        if waiting := self.in_flight[which]:
            place %= len(waiting)
            self.num_excuses += place > 0
            self._hear(waiting.pop(place))

    @rule(which=WHICH, place=st.integers(0, 3))
    def is_heard_and_will_be_again(self, which: Holder, place: int) -> None:
        if waiting := self.in_flight[which]:
            place %= len(waiting)
            self.num_excuses += place > 0
            self._hear(waiting[place])

    @rule(which=WHICH)
    def is_lost(self, which: Holder) -> None:
        if waiting := self.in_flight[which]:
            self.num_excuses += 1
            waiting.pop(0)

    @precondition(lambda self: self.asked)
    @rule(which=WHICH)
    def looks_at_itself(self, which: Holder) -> None:
        if self.asked.get(which, ...) is None:
            self.asked[which] = self.senders[which].snapshot()

    @precondition(lambda self: any(self.asked.values()))
    @rule(which=WHICH)
    def answers(self, which: Holder) -> None:
        if (snapshot := self.asked.get(which)) is not None:
            del self.asked[which]
            self.members.restore(snapshot)
            self._ask()

    @precondition(lambda self: self.asked)
    @rule(which=WHICH)
    def does_not_answer(self, which: Holder) -> None:
        if which in self.asked:
            del self.asked[which]
            self.num_excuses += 1
            self.members.give_up(which)
            self._ask()

    @rule(names=st.lists(WHICH, unique=True), after_s=st.sampled_from([0.0, 1.0, GRACE_S / 2, GRACE_S]))
    def are_named(self, names: list[Holder], after_s: float) -> None:
        self.now += after_s
        self.name(names)

    @rule(which=WHICH)
    def a_stranger_is_not_heard(self, which: Holder) -> None:
        stranger = Sender(EngineId(f"{which}-before"), which == STORE)
        before = self.members.directory.size
        self._hear(stranger.report("abc"))
        self.members.restore(stranger.snapshot())
        assert self.members.directory.size == before

    @invariant()
    def the_books_are_right_and_nothing_is_made_up(self) -> None:
        self.members.check()
        for name, held in self.members.held().items():
            assert held <= self.ever_held[name]

    def teardown(self) -> None:
        self.name(NAMES)
        for name, sender in self.senders.items():
            for report in self.in_flight[name]:
                self._hear(report)
            self._hear(sender.report())
        for _ in range(3):
            for name in list(self.asked):
                del self.asked[name]
                self.members.restore(self.senders[name].snapshot())
            self._ask()
        assert not self.asked
        assert self.members.held() == {name: sender.held for name, sender in self.senders.items()}
        assert self.members.num_snapshots <= len(NAMES) + self.num_excuses

    def name(self, names: Iterable[Holder]) -> None:
        for name in NAMES:
            if name in names:
                self.away.pop(name, None)
            elif self.now - self.away.setdefault(name, self.now) >= GRACE_S:
                self.num_excuses += 1  # it will have to be asked anew
                self.asked.pop(name, None)
        self.members.set_engines(engines(*(EngineId(name) for name in names if name != STORE)))
        self.members.set_stores(stores(*(StoreId(name) for name in names if name == STORE)))
        self._ask()

    def _hear(self, report: EngineReport | StoreReport) -> None:
        hear(self.members, report)
        self._ask()

    def _ask(self) -> None:
        for name in self.members.take_snapshot_requests():
            assert name not in self.asked, "asked twice at a time"
            self.asked[name] = None


AnyHistory.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
