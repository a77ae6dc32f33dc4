"""The supervisor over fake processes and a fake clock: what it starts, replaces, adopts and ends."""

from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineHealth,
    EngineId,
    EngineInfo,
    HttpConfig,
    IngressAccount,
    IngressId,
    IngressInfo,
    ModelCard,
)
from shoal.cluster.autoscaler import AutoscalingConfig
from shoal.cluster.processes import Doorway, EngineProcess, Introduction, RouterProcess, StoreProcess
from shoal.cluster.spec import ClusterSpec, DeploymentSpec
from shoal.cluster.stores import EVACUATION_S
from shoal.cluster.supervisor import ADOPTION_DEADLINE_S, LEASE_TICKS, RoleCounts, Supervisor, Wish
from shoal.cluster.watch import PING_DEADLINE_S, PULSE_DEADLINE_S, START_TIMEOUT_S
from shoal.kvstore.messages import StoreId, StoreInfo


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class FakeProcess:
    def __init__(self, process_id: str, info: object) -> None:
        self.process_id = process_id
        self.info = info
        self.started: Future[Any] = Future()
        self.pings: list[Future[bool]] = []
        self.killed = False
        self.hangs = False
        self.num_refusals = 0
        """So often it cannot be ended."""
        self.told: list[object] = []

    def start(self) -> Future[Any]:
        return self.started

    def become_ready(self) -> None:
        self.started.set_result(self.info)

    def ping(self) -> Future[bool]:
        self.pings.append(Future())
        return self.pings[-1]

    def pulse(self) -> Future[Any]:
        pulse: Future[Any] = Future()
        if not self.hangs:
            pulse.set_result(None)
        return pulse

    def kill(self) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise RuntimeError("the control store is away")
        self.killed = True


class FakeEngine(FakeProcess):
    health: EngineHealth | None = None

    def has_room(self) -> bool:
        return not self.hangs

    def introduce(
        self,
        router: RouterProcess,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[str, StoreProcess],
        own_store: str | None,
    ) -> None:
        self.told.append((router.process_id, set(ingress_ids), sorted(stores), own_store))

    def has(self, num_requests: int) -> None:
        """Its next ping is answered by that."""
        self.health = EngineHealth(num_requests=num_requests, stalled=False)


class FakeStore(FakeProcess):
    def __init__(self, process_id: str, node: str) -> None:
        store_id = StoreId(process_id)
        super().__init__(process_id, StoreInfo(store_id=store_id, node=node, budget_bytes=1 << 30))
        self.node = node

    def is_on(self, node: str) -> bool:
        return node == self.node

    def introduce(self, routers: Sequence[RouterProcess]) -> None:
        self.told.append([router.process_id for router in routers])

    def evacuate(self, to: Sequence[StoreProcess]) -> Future[Any]:
        self.evacuated_to = [store.process_id for store in to]
        self.is_empty: Future[Any] = Future()
        return self.is_empty


class FakeRouter(FakeProcess):
    def set_members(
        self,
        engines: Sequence[tuple[EngineInfo, EngineProcess]],
        stores: Sequence[tuple[StoreInfo, StoreProcess]],
    ) -> None:
        assert [info.engine_id for info, _ in engines] == [process.process_id for _, process in engines]
        assert [info.store_id for info, _ in stores] == [process.process_id for _, process in stores]
        self.told.append([process.process_id for _, process in (*engines, *stores)])


class FakeIngress(FakeProcess):
    stopped: float | None = None
    """With that grace."""
    account: IngressAccount | None = None
    unread: Mapping[DeploymentId, str] = MappingProxyType({})
    """Why it cannot serve these."""
    is_first = True

    def introduce(self, deployments: Sequence[Introduction], stores: Mapping[str, StoreProcess]) -> None:
        self.heard = {told.card.deployment_id: told for told in deployments}
        first = deployments[0]
        router = first.router.process_id if first.router else None
        self.told.append((router, sorted(first.engines), first.card.model.fingerprint))
        self.stores = sorted(stores)
        can_place = {known for known, told in self.heard.items() if told.engines}
        self.account = IngressAccount(can_place=frozenset(can_place - self.unread.keys()), unread=self.unread)

    def stop(self, grace_s: float) -> Future[Any]:
        self.stopped = grace_s
        self.has_ended: Future[Any] = Future()
        if self.ends_at_once:
            self.has_ended.set_result(None)
        return self.has_ended

    ends_at_once = True


@dataclass
class FakeLauncher:
    engines: list[FakeEngine] = field(default_factory=list)
    routers: list[FakeRouter] = field(default_factory=list)
    ingresses: list[FakeIngress] = field(default_factory=list)
    stores: list[FakeStore] = field(default_factory=list)
    to_adopt: list[FakeEngine] = field(default_factory=list)
    to_adopt_of: dict[DeploymentId, list[FakeEngine]] = field(default_factory=dict)
    stores_to_adopt: list[FakeStore] = field(default_factory=list)
    router_to_adopt: FakeRouter | None = None
    ingresses_to_adopt: dict[str, FakeIngress] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=lambda: ["n"])
    """Of the engines, in turn."""
    labelled: list[str] = field(default_factory=list)
    """Nodes that are to have an ingress."""
    failures: int = 0
    room: int = 99
    """For engines with an index below this. The others are not heard of."""
    known: Set[DeploymentId] = frozenset()
    leaving: Set[str] = frozenset()
    begun_with: list[DeploymentId] = field(default_factory=list)
    """What the latest ingress was made with."""

    def engine(self, deployment: DeploymentSpec, index: int) -> FakeEngine:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the name is still taken")
        is_plain = deployment.model.name == "m" and not deployment.labels
        name = f"{'engine' if is_plain else deployment.deployment_id}-{index}-{len(self.engines)}"
        nodes = [node for node in self.nodes if node not in self.leaving] or self.nodes
        self.engines.append(an_engine(name, nodes[index % len(nodes)]))
        self.engines[-1].hangs = index >= self.room
        return self.engines[-1]

    def router(self, deployment: DeploymentSpec) -> FakeRouter:
        self.routers.append(FakeRouter("router", None))
        return self.routers[-1]

    def ingress(self, doorway: Doorway, models: Sequence[DeploymentCard], *, is_first: bool) -> FakeIngress:
        self.begun_with = [card.deployment_id for card in models]
        self.ingresses.append(an_ingress(doorway.name, f"id-{len(self.ingresses)}", doorway.node or "n"))
        self.ingresses[-1].is_first = is_first
        return self.ingresses[-1]

    def store(self, node: str) -> FakeStore:
        self.stores.append(FakeStore(f"store-{node}-{len(self.stores)}", node))
        return self.stores[-1]

    def adopt_engines(self, deployment: DeploymentSpec) -> list[FakeEngine]:
        return self.to_adopt_of.get(deployment.deployment_id, self.to_adopt)

    def adopt_router(self, deployment: DeploymentSpec) -> FakeRouter | None:
        return self.router_to_adopt

    def adopt_ingresses(self) -> dict[str, FakeIngress]:
        return self.ingresses_to_adopt

    def adopt_stores(self) -> list[FakeStore]:
        return self.stores_to_adopt

    def end_others(self, known: Set[DeploymentId]) -> None:
        self.known = set(known)

    def look(self, leaving: Set[str]) -> None:
        self.leaving = leaving

    def doorways(self, spec: ClusterSpec) -> list[Doorway]:
        if spec.ingress_labels:
            return [Doorway(name=f"ingress-{node}", http=spec.http[0], node=node) for node in self.labelled]
        return [Doorway(name=f"ingress-{i}", http=http) for i, http in enumerate(spec.http)]

    def lacking(self, deployment: DeploymentSpec) -> str:
        return f"waits for {deployment.engine.threads} CPU"


def an_engine(name: str, node: str = "n") -> FakeEngine:
    info = EngineInfo(engine_id=EngineId(name), node=node, backend="b", memory="m", fingerprint=b"f")
    return FakeEngine(name, info)


def an_ingress(name: str, ingress_id: str, node: str = "n") -> FakeIngress:
    return FakeIngress(name, IngressInfo(ingress_id=IngressId(ingress_id), url="http://x", node=node))


def a_deployment(
    name: str = "m",
    num_engines: int = 2,
    *,
    autoscaling: AutoscalingConfig | None = None,
    labels: Mapping[str, str] | None = None,
) -> DeploymentSpec:
    return DeploymentSpec(
        model=ModelCard(name=name, checkpoint="c", max_model_len=64, block_size=16, fingerprint=b""),
        engine=EngineConfig(checkpoint="c", max_model_len=64, memory_bytes=1 << 20, threads=1),
        num_engines=num_engines,
        autoscaling=autoscaling,
        labels=labels or {},
    )


@dataclass
class Cluster:
    num_engines: int = 2
    num_ingresses: int = 1
    with_stores: bool = False
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    clock: Clock = field(default_factory=Clock)
    deployments: tuple[DeploymentSpec, ...] = ()
    ingress_labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = ClusterSpec(
            name="test",
            deployments=self.deployments or (a_deployment(num_engines=self.num_engines),),
            kv_store_bytes=None if self.with_stores else 0,
            http=tuple(HttpConfig(port=8000 + i) for i in range(self.num_ingresses)),
            ingress_labels=self.ingress_labels,
        )
        self.supervisor = Supervisor(Wish(spec=self.spec), self.launcher, clock=self.clock)

    @property
    def processes(self) -> tuple[FakeProcess, ...]:
        launcher = self.launcher
        return (*launcher.routers, *launcher.ingresses, *launcher.engines, *launcher.stores)

    def tick(self, *, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.supervisor.tick()

    def all_ready(self) -> None:
        self.tick()
        for process in self.processes:
            if not process.started.done() and not process.killed:
                process.become_ready()
        self.tick()

    def all_answer(self) -> None:
        for process in self.processes:
            for ping in process.pings:
                if not ping.done():
                    ping.set_result(True)

    def passes(self, seconds: float) -> None:
        """All answer their pings meanwhile, and whoever starts becomes ready."""
        for _ in range(int(2 * seconds)):
            self.all_answer()
            for process in self.processes:
                if not process.started.done() and not process.killed and not process.hangs:
                    process.become_ready()
            self.tick(after_s=0.5)

    def phases(self) -> dict[str, list[str]]:
        """By model."""
        return {
            deployment.model: [str(engine.phase) for engine in deployment.engines]
            for deployment in self.supervisor.status().deployments
        }


def test_a_cluster_is_ready_when_the_ingress_and_every_engine_are() -> None:
    cluster = Cluster()
    cluster.tick()
    assert [engine.process_id for engine in cluster.launcher.engines] == ["engine-0-0", "engine-1-1"]
    cluster.launcher.ingresses[0].become_ready()
    cluster.launcher.routers[0].become_ready()
    cluster.launcher.engines[0].become_ready()
    cluster.tick()
    assert not cluster.supervisor.status().ready
    cluster.launcher.engines[1].become_ready()
    cluster.tick()
    assert cluster.supervisor.status().ready


def test_everybody_is_told_of_everybody_who_is_ready() -> None:
    cluster = Cluster()
    cluster.all_ready()
    names = ["engine-0-0", "engine-1-1"]
    assert cluster.launcher.routers[0].told[-1] == names
    assert cluster.launcher.ingresses[0].told[-1] == ("router", names, b"f")
    assert cluster.launcher.engines[0].told[-1] == ("router", {"id-0"}, [], None)


def test_an_ingress_that_is_ready_before_the_engines_hears_later_what_names_their_prefixes() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    cluster.launcher.routers[0].become_ready()
    cluster.launcher.ingresses[0].become_ready()
    cluster.tick()
    assert cluster.launcher.ingresses[0].told[-1] == ("router", [], b"")
    cluster.launcher.engines[0].become_ready()
    cluster.tick()
    assert cluster.launcher.ingresses[0].told[-1] == ("router", ["engine-0-0"], b"f")


def test_while_the_router_is_away_the_others_are_told_of_each_other() -> None:
    """A new engine is placed on blindly, and saves and fetches."""
    cluster = with_stores("east", "west")
    router, (ingress,) = cluster.launcher.routers[0], cluster.launcher.ingresses
    cluster.tick(after_s=1.0)
    router.pings[0].set_exception(RuntimeError("actor died"))
    cluster.launcher.engines[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.all_answer()
    cluster.tick()
    told = len(router.told)
    assert ingress.told[-1] == ("router", ["engine-1-1"], b"f"), "nobody goes on waiting for the other"
    cluster.tick(after_s=1.0)
    replaced = cluster.launcher.engines[2]
    replaced.become_ready()
    cluster.all_answer()
    cluster.tick()
    assert len(cluster.launcher.routers) == 2, "its successor is on its way"
    assert ingress.told[-1] == ("router", ["engine-0-2", "engine-1-1"], b"f")
    stores = ["store-east-0", "store-west-1"]
    assert replaced.told[-1] == ("router", {"id-0"}, stores, "store-east-0")
    assert len(router.told) == told and cluster.launcher.routers[1].told == [], "neither can hear it"
    cluster.launcher.routers[1].become_ready()
    cluster.tick()
    assert cluster.launcher.routers[1].told == [["engine-0-2", "engine-1-1", *stores]]


def test_a_router_that_a_restarted_supervisor_finds_hung_keeps_nobody_from_the_others() -> None:
    launcher = left_by_another()
    cluster = Cluster(num_ingresses=2, launcher=launcher)
    router, first = launcher.router_to_adopt, launcher.to_adopt[0]
    assert router is not None
    for process in (*launcher.to_adopt, *launcher.ingresses_to_adopt.values()):
        process.become_ready()
    cluster.tick(after_s=ADOPTION_DEADLINE_S)
    assert first.told == []
    cluster.tick(after_s=0.5)
    assert router.told == []
    assert first.told == [("router", {"old-0", "old-1"}, [], None)]


def test_before_the_first_router_is_ready_nobody_is_told_of_anybody() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    cluster.launcher.engines[0].become_ready()
    cluster.launcher.ingresses[0].become_ready()
    cluster.tick()
    assert cluster.launcher.engines[0].told == []
    assert cluster.launcher.ingresses[0].told == [(None, [], b"f")], "no engine, as yet"


def test_an_engine_that_dies_is_replaced_under_a_new_name_after_a_pause() -> None:
    cluster = Cluster()
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.tick()
    assert cluster.launcher.engines[0].killed
    assert cluster.launcher.routers[0].told[-1] == ["engine-1-1"], "no longer placed on"
    cluster.tick()
    assert len(cluster.launcher.engines) == 2, "not before the pause is over"
    cluster.tick(after_s=1.0)
    assert cluster.launcher.engines[2].process_id == "engine-0-2"


def test_who_is_wanted_ready_and_lost_is_counted_by_role() -> None:
    cluster = Cluster(with_stores=True)
    cluster.all_ready()
    cluster.tick()
    cluster.launcher.stores[0].become_ready()
    cluster.tick(after_s=1.0)
    assert cluster.supervisor.counts() == {
        "router": RoleCounts(wanted=1, ready=1, failures=0),
        "ingress": RoleCounts(wanted=1, ready=1, failures=0),
        "engine": RoleCounts(wanted=2, ready=2, failures=0),
        "store": RoleCounts(wanted=1, ready=1, failures=0),
    }
    cluster.launcher.engines[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.tick()
    assert cluster.supervisor.counts()["engine"] == RoleCounts(wanted=2, ready=1, failures=1)
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[2].become_ready()
    cluster.tick()
    assert cluster.supervisor.counts()["engine"] == RoleCounts(wanted=2, ready=2, failures=1)


def test_an_engine_that_hangs_is_killed_when_its_ping_is_late() -> None:
    cluster = Cluster()
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[1].pings[0].set_result(True)
    cluster.launcher.ingresses[0].pings[0].set_result(True)
    cluster.launcher.routers[0].pings[0].set_result(True)
    cluster.tick(after_s=PING_DEADLINE_S - 0.1)
    assert not cluster.launcher.engines[0].killed
    cluster.tick(after_s=0.2)
    assert cluster.launcher.engines[0].killed and not cluster.launcher.engines[1].killed


def test_an_engine_that_answers_but_is_unhealthy_is_replaced() -> None:
    cluster = Cluster()
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[0].set_result(False)
    cluster.tick()
    assert cluster.launcher.engines[0].killed


def test_a_start_may_take_long_but_not_for_ever() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    cluster.tick()  # it is heard of
    cluster.tick(after_s=START_TIMEOUT_S)
    assert not cluster.launcher.engines[0].killed
    cluster.tick(after_s=1.0)
    assert cluster.launcher.engines[0].killed


def test_a_start_without_a_sign_of_life_is_ended_but_not_one_that_waits_for_room() -> None:
    cluster = Cluster(num_engines=2, launcher=FakeLauncher(room=1))
    cluster.tick()
    hung, waiting = cluster.launcher.engines
    hung.hangs = True
    for _ in range(2):  # the pulse of the first minute was felt before it hung
        cluster.tick(after_s=PULSE_DEADLINE_S + 0.1)
    assert (hung.killed, waiting.killed) == (True, False)
    assert cluster.supervisor.status().troubles == (
        "engine 0 of m: TimeoutError: no sign of life within 60 s",
        "engine 1 of m: waits for 1 CPU",
    )


def test_a_wrong_configuration_is_reported_and_not_tried_again() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    cluster.launcher.engines[0].started.set_exception(ValueError("not enough memory: ..."))
    cluster.tick()
    cluster.tick(after_s=1000.0)
    assert cluster.supervisor.status().failed == "not enough memory: ..."
    assert len(cluster.launcher.engines) == 1


def test_repeated_failures_are_retried_ever_more_slowly() -> None:
    cluster = Cluster(num_engines=1)
    cluster.launcher.failures = 100
    launches = []
    for second in range(120):
        before = cluster.launcher.failures
        cluster.tick(after_s=1.0)
        cluster.all_answer()
        if cluster.launcher.failures < before:
            launches.append(second)
    pauses = [later - earlier for earlier, later in pairwise(launches)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_an_ingress_that_is_replaced_is_told_to_the_engines_by_its_new_id() -> None:
    cluster = Cluster(num_engines=1)
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.tick()
    assert cluster.launcher.engines[0].told[-1] == ("router", set(), [], None), (
        "nobody waits for its requests"
    )
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[1].become_ready()
    cluster.all_answer()
    cluster.tick()
    assert cluster.launcher.engines[0].told[-1] == ("router", {"id-1"}, [], None)


def test_a_restarted_supervisor_adopts_what_runs_and_ends_what_is_too_many() -> None:
    running = [an_engine(f"engine-{i}-old") for i in range(3)]
    cluster = Cluster(num_engines=2, launcher=FakeLauncher(to_adopt=running))
    for engine in running:
        engine.become_ready()
    cluster.all_ready()
    assert cluster.launcher.engines == [], "nothing is started beside them"
    for _ in range(14):
        for ping in [ping for engine in running for ping in engine.pings if not ping.done()]:
            ping.set_result(True)
        cluster.tick(after_s=0.5)
    assert [engine.killed for engine in running].count(True) == 1
    assert cluster.supervisor.status().ready


def left_by_another(num_engines: int = 2, num_ingresses: int = 2) -> FakeLauncher:
    names = [f"ingress-{i}" for i in range(num_ingresses)]
    return FakeLauncher(
        to_adopt=[an_engine(f"engine-{i}-old") for i in range(num_engines)],
        router_to_adopt=FakeRouter("router", None),
        ingresses_to_adopt={name: an_ingress(name, f"old-{name[-1]}") for name in names},
        stores_to_adopt=[FakeStore("store-old", "n")],
    )


def test_a_restarted_supervisor_tells_nothing_until_it_knows_of_all_that_runs() -> None:
    """Told of the others alone, the router would place nothing on the last one, and the engines would drop
    what an ingress has asked for."""
    launcher = left_by_another()
    cluster = Cluster(num_ingresses=2, with_stores=True, launcher=launcher)
    first, last = launcher.to_adopt
    router, (store,) = launcher.router_to_adopt, launcher.stores_to_adopt
    assert router is not None
    left = [router, first, last, *launcher.ingresses_to_adopt.values(), store]
    for process in left:
        if process is not last and process is not store:
            process.become_ready()
    cluster.tick()
    assert not any(process.told for process in left)
    last.become_ready()
    cluster.tick(after_s=0.5)
    assert not any(process.told for process in left), "that the store is there is not said yet"
    store.become_ready()
    cluster.tick(after_s=0.5)
    assert router.told == [["engine-0-old", "engine-1-old", "store-old"]]
    assert last.told == [("router", {"old-0", "old-1"}, ["store-old"], "store-old")]
    assert cluster.processes == (), "nothing was started beside them"


def test_who_does_not_answer_a_restarted_supervisor_is_left_out_after_a_while() -> None:
    launcher = left_by_another()
    first, hung = launcher.to_adopt
    hung.hangs = True
    cluster = Cluster(num_ingresses=2, launcher=launcher)
    router = launcher.router_to_adopt
    assert router is not None
    for process in (router, first, *launcher.ingresses_to_adopt.values()):
        process.become_ready()
    cluster.tick(after_s=ADOPTION_DEADLINE_S)
    assert router.told == []
    cluster.tick(after_s=0.5)
    assert router.told == [["engine-0-old"]]
    cluster.tick(after_s=PULSE_DEADLINE_S)
    assert (first.killed, hung.killed) == (False, True)


def test_every_ingress_is_watched_by_itself_and_all_are_told_to_the_engines() -> None:
    cluster = Cluster(num_engines=1, num_ingresses=2)
    cluster.all_ready()
    first, second = cluster.launcher.ingresses
    assert first.told == second.told == [("router", ["engine-0-0"], b"f")]
    assert cluster.launcher.engines[0].told[-1] == ("router", {"id-0", "id-1"}, [], None)
    cluster.tick(after_s=1.0)
    first.pings[0].set_exception(RuntimeError("actor died"))
    cluster.all_answer()
    cluster.tick()
    assert (first.killed, second.killed, cluster.supervisor.status().ready) == (True, False, False)
    assert cluster.launcher.engines[0].told[-1] == ("router", {"id-1"}, [], None)
    cluster.tick(after_s=1.0)
    assert cluster.launcher.ingresses[2].process_id == "ingress-0", "on its predecessor's port"


def test_early_ticks_are_not_of_the_lease() -> None:
    """Many engines that start at once must not use it up."""
    cluster = Cluster()
    for _ in range(2 * LEASE_TICKS):
        cluster.supervisor.tick(early=True)
    assert not cluster.supervisor.is_to_end


def test_the_lease_expires_unless_the_driver_renews_it() -> None:
    cluster = Cluster()
    for _ in range(LEASE_TICKS - 1):
        cluster.tick()
    cluster.supervisor.renew_lease()
    for _ in range(LEASE_TICKS - 1):
        cluster.tick()
    assert not cluster.supervisor.is_to_end
    cluster.tick()
    assert cluster.supervisor.is_to_end


def test_a_supervisor_that_was_stalled_does_not_blame_the_driver() -> None:
    cluster = Cluster()
    cluster.tick(after_s=3600.0)
    assert not cluster.supervisor.is_to_end


def test_once_ready_nothing_is_a_wrong_configuration_any_more() -> None:
    """The port of an ingress that was killed may be taken for a moment: that must not end a cluster."""
    cluster = Cluster(num_engines=1)
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.tick()
    cluster.all_answer()
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[1].started.set_exception(ValueError("cannot listen on 127.0.0.1:8000"))
    cluster.tick()
    status = cluster.supervisor.status()
    assert status.failed is None
    assert status.troubles == ("ingress 0: ValueError: cannot listen on 127.0.0.1:8000",)
    cluster.all_answer()
    cluster.tick(after_s=2.0)
    cluster.launcher.ingresses[2].become_ready()
    cluster.tick()
    assert cluster.supervisor.status().troubles == ()


def test_a_start_that_fails_is_tried_again_and_said() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    cluster.launcher.engines[0].started.set_exception(OSError("trace\n\nno such file: model.safetensors\n"))
    cluster.tick()
    assert cluster.supervisor.status().failed is None
    assert cluster.supervisor.status().troubles == (
        "engine 0 of m: OSError: no such file: model.safetensors",
    )
    cluster.tick(after_s=1.0)
    assert len(cluster.launcher.engines) == 2


def test_what_went_wrong_is_said_in_a_line_that_people_read() -> None:
    cluster = Cluster(num_engines=1)
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    said = "The actor is dead: End of file. " + "Some common causes include: " + "the OOM killer, or " * 30
    cluster.launcher.engines[0].pings[0].set_exception(RuntimeError(said))
    cluster.tick()
    (trouble,) = cluster.supervisor.status().troubles
    assert trouble.startswith(
        "engine 0 of m: RuntimeError: The actor is dead: End of file. Some common causes"
    )
    assert trouble.endswith(" …") and len(trouble) < 300


def test_teardown_stops_the_front_door_and_kills_everything() -> None:
    cluster = Cluster()
    cluster.all_ready()
    cluster.supervisor.teardown()
    assert cluster.launcher.ingresses[0].stopped
    assert all(process.killed for process in cluster.processes)


def with_stores(*nodes: str, **launcher: Any) -> Cluster:
    """Two engines on these nodes, and whatever is beside them."""
    cluster = Cluster(with_stores=True, launcher=FakeLauncher(nodes=list(nodes), **launcher))
    cluster.all_ready()
    for store in cluster.launcher.stores:
        store.become_ready()
    cluster.tick()
    return cluster


def test_each_node_that_hosts_engines_has_a_store_and_all_are_told_of_all() -> None:
    cluster = with_stores("east", "west")
    launcher, names = cluster.launcher, ["store-east-0", "store-west-1"]
    assert [store.process_id for store in launcher.stores] == names
    assert launcher.routers[0].told[-1] == ["engine-0-0", "engine-1-1", *names]
    assert launcher.ingresses[0].stores == names
    assert [engine.told[-1] for engine in launcher.engines] == [
        ("router", {"id-0"}, names, "store-east-0"),
        ("router", {"id-0"}, names, "store-west-1"),
    ]
    assert [store.told[-1] for store in launcher.stores] == [["router"], ["router"]]
    assert [info.store_id for info in cluster.supervisor.status().stores] == names
    assert len(with_stores("east").launcher.stores) == 1, "both engines are there"


def test_without_stores_there_are_none() -> None:
    cluster = Cluster()
    cluster.all_ready()
    assert (cluster.launcher.stores, cluster.supervisor.status().stores) == ([], ())


def test_the_cluster_serves_before_its_stores_are_there_and_without_them() -> None:
    cluster = Cluster(with_stores=True)
    cluster.all_ready()
    (store,) = cluster.launcher.stores
    assert cluster.supervisor.status().ready
    store.started.set_exception(ValueError("no room for 1 GiB"))
    cluster.tick()
    status = cluster.supervisor.status()
    assert (status.ready, status.failed, status.troubles) == (
        True,
        None,
        ("store on n: ValueError: no room for 1 GiB",),
    )
    cluster.tick(after_s=1.0)
    cluster.launcher.stores[1].become_ready()
    cluster.all_answer()
    cluster.tick()
    assert cluster.supervisor.status().troubles == ()


def test_35_a_store_that_dies_is_replaced_under_a_new_name() -> None:
    cluster = with_stores("east", "west")
    cluster.tick(after_s=1.0)
    cluster.launcher.stores[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.tick()
    assert cluster.supervisor.status().ready and cluster.launcher.stores[0].killed
    assert cluster.launcher.engines[0].told[-1] == ("router", {"id-0"}, ["store-west-1"], None)
    cluster.all_answer()
    cluster.tick(after_s=1.0)
    assert cluster.launcher.stores[2].process_id == "store-east-2"


def test_a_store_stays_while_its_engine_is_replaced_and_ends_when_that_is_elsewhere() -> None:
    cluster = with_stores("east", "west")
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[0].set_exception(RuntimeError("node died"))
    cluster.all_answer()
    cluster.tick()
    cluster.launcher.nodes = ["west"]
    cluster.tick(after_s=1.0)
    assert not cluster.launcher.stores[0].killed, "the engine may come back where its prefixes are"
    cluster.launcher.engines[2].become_ready()
    cluster.all_answer()
    cluster.tick()
    left, stays = cluster.launcher.stores
    assert (left.evacuated_to, left.killed) == (["store-west-1"], False)
    assert "store-east-0" in cluster.launcher.engines[2].told[-1][2], "it is read from to its end"  # type: ignore[index]
    left.is_empty.set_result(None)
    cluster.tick()
    assert (left.killed, stays.killed) == (True, False)
    assert cluster.launcher.routers[0].told[-1] == ["engine-0-2", "engine-1-1", "store-west-1"]


def test_a_store_that_does_not_get_rid_of_what_it_has_is_ended_after_a_while() -> None:
    cluster = with_stores("east", "west")
    cluster.supervisor.drain_node("east")
    cluster.passes(8.0)
    left, _ = cluster.launcher.stores
    assert (left.evacuated_to, left.killed) == (["store-west-1"], False)
    cluster.passes(EVACUATION_S)
    assert left.killed


def test_a_node_that_is_used_again_keeps_its_store() -> None:
    cluster = with_stores("east", "west")
    cluster.supervisor.drain_node("east")
    cluster.passes(6.0)
    cluster.supervisor.undrain_node("east")
    cluster.supervisor.scale("m", 4)
    cluster.passes(EVACUATION_S)
    assert [store.killed for store in cluster.launcher.stores] == [False, False]


def test_a_restarted_supervisor_adopts_stores_where_engines_are_and_ends_the_others() -> None:
    left = [FakeStore("old", "east"), FakeStore("older", "east"), FakeStore("lonely", "north")]
    cluster = Cluster(with_stores=True, launcher=FakeLauncher(nodes=["east"], stores_to_adopt=left))
    cluster.tick()
    assert not any(store.killed for store in left), "where the engines are is not known yet"
    left[0].become_ready()
    cluster.all_ready()
    cluster.tick()
    assert [store.killed for store in left] == [False, True, True]
    assert cluster.launcher.stores == []
    assert [info.store_id for info in cluster.supervisor.status().stores] == ["old"]


def test_teardown_ends_stores_too_also_those_that_were_not_adopted_yet() -> None:
    left = FakeStore("old", "north")
    cluster = with_stores("east", stores_to_adopt=[])
    cluster.supervisor.teardown()
    assert all(store.killed for store in cluster.launcher.stores)
    cluster = Cluster(with_stores=True, launcher=FakeLauncher(stores_to_adopt=[left]))
    cluster.tick()
    cluster.supervisor.teardown()
    assert left.killed
