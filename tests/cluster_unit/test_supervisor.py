"""The supervisor over fake processes and a fake clock: what it starts, replaces, adopts and ends."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shoal.actors.messages import EngineId, EngineInfo, IngressId, IngressInfo
from shoal.cluster.processes import EngineProcess, RouterProcess, StoreProcess
from shoal.cluster.supervisor import ADOPTION_DEADLINE_S, LEASE_TICKS, Supervisor
from shoal.cluster.watch import PING_DEADLINE_S, PULSE_DEADLINE_S, START_DEADLINE_S
from shoal.kvstore.messages import StoreId, StoreInfo

STOP_GRACE_S = 7.0


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
        self.killed = True


class FakeEngine(FakeProcess):
    def introduce(
        self,
        router: RouterProcess,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[str, StoreProcess],
        own_store: str | None,
    ) -> None:
        self.told.append((router.process_id, set(ingress_ids), sorted(stores), own_store))


class FakeStore(FakeProcess):
    def __init__(self, process_id: str, node: str) -> None:
        store_id = StoreId(process_id)
        super().__init__(process_id, StoreInfo(store_id=store_id, node=node, budget_bytes=1 << 30))
        self.node = node

    def is_on(self, node: str) -> bool:
        return node == self.node

    def introduce(self, router: RouterProcess) -> None:
        self.told.append(router.process_id)


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
    stopped_with_grace_s: float | None = None

    def introduce(
        self,
        router: RouterProcess,
        engines: Mapping[str, EngineProcess],
        stores: Mapping[str, StoreProcess],
        fingerprint: bytes,
    ) -> None:
        self.told.append((router.process_id, sorted(engines), fingerprint))
        self.stores = sorted(stores)

    def stop(self, grace_s: float) -> Future[Any]:
        self.stopped_with_grace_s = grace_s
        done: Future[Any] = Future()
        done.set_result(None)
        return done


@dataclass
class FakeLauncher:
    engines: list[FakeEngine] = field(default_factory=list)
    routers: list[FakeRouter] = field(default_factory=list)
    ingresses: list[FakeIngress] = field(default_factory=list)
    stores: list[FakeStore] = field(default_factory=list)
    to_adopt: list[FakeEngine] = field(default_factory=list)
    stores_to_adopt: list[FakeStore] = field(default_factory=list)
    router_to_adopt: FakeRouter | None = None
    ingresses_to_adopt: dict[int, FakeIngress] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=lambda: ["n"])
    """Of the engines, in turn."""
    failures: int = 0
    room: int = 99
    """For so many engines. The others are not heard of."""

    def engine(self, index: int) -> FakeEngine:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the name is still taken")
        name = f"engine-{index}-{len(self.engines)}"
        self.engines.append(an_engine(name, self.nodes[index % len(self.nodes)]))
        self.engines[-1].hangs = index >= self.room
        return self.engines[-1]

    def router(self) -> FakeRouter:
        self.routers.append(FakeRouter("router", None))
        return self.routers[-1]

    def ingress(self, index: int) -> FakeIngress:
        self.ingresses.append(an_ingress(index, f"id-{len(self.ingresses)}"))
        return self.ingresses[-1]

    def store(self, node: str) -> FakeStore:
        self.stores.append(FakeStore(f"store-{node}-{len(self.stores)}", node))
        return self.stores[-1]

    def adopt_engines(self) -> list[FakeEngine]:
        return self.to_adopt

    def adopt_router(self) -> FakeRouter | None:
        return self.router_to_adopt

    def adopt_ingress(self, index: int) -> FakeIngress | None:
        return self.ingresses_to_adopt.get(index)

    def adopt_stores(self) -> list[FakeStore]:
        return self.stores_to_adopt


def an_engine(name: str, node: str = "n") -> FakeEngine:
    info = EngineInfo(engine_id=EngineId(name), node=node, backend="b", memory="m", fingerprint=b"f")
    return FakeEngine(name, info)


def an_ingress(index: int, ingress_id: str) -> FakeIngress:
    return FakeIngress(f"ingress-{index}", IngressInfo(ingress_id=IngressId(ingress_id), url="http://x"))


@dataclass
class Cluster:
    num_engines: int = 2
    num_ingresses: int = 1
    with_stores: bool = False
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(
            self.launcher,
            num_engines=self.num_engines,
            num_ingresses=self.num_ingresses,
            with_stores=self.with_stores,
            stop_grace_s=STOP_GRACE_S,
            clock=self.clock,
        )

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
            if not process.started.done():
                process.become_ready()
        self.tick()

    def all_answer(self) -> None:
        for process in self.processes:
            for ping in process.pings:
                if not ping.done():
                    ping.set_result(True)


def test_a_cluster_is_ready_when_the_ingress_and_every_engine_are() -> None:
    cluster = Cluster()
    cluster.tick()
    assert [engine.process_id for engine in cluster.launcher.engines] == ["engine-0-0", "engine-1-1"]
    cluster.launcher.ingresses[0].become_ready()
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
    cluster.tick(after_s=START_DEADLINE_S)
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
    assert cluster.supervisor.status().troubles == ("engine 0: TimeoutError: no sign of life within 60 s",)


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
    assert [engine.killed for engine in running] == [False, False, True]
    assert cluster.supervisor.status().ready


def left_by_another(num_engines: int = 2, num_ingresses: int = 2) -> FakeLauncher:
    return FakeLauncher(
        to_adopt=[an_engine(f"engine-{i}-old") for i in range(num_engines)],
        router_to_adopt=FakeRouter("router", None),
        ingresses_to_adopt={i: an_ingress(i, f"old-{i}") for i in range(num_ingresses)},
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


def test_the_lease_expires_unless_the_driver_renews_it() -> None:
    cluster = Cluster()
    for _ in range(LEASE_TICKS - 1):
        cluster.tick()
    cluster.supervisor.renew_lease()
    for _ in range(LEASE_TICKS - 1):
        cluster.tick()
    assert not cluster.supervisor.lease_expired
    cluster.tick()
    assert cluster.supervisor.lease_expired


def test_a_supervisor_that_was_stalled_does_not_blame_the_driver() -> None:
    cluster = Cluster()
    cluster.tick(after_s=3600.0)
    assert not cluster.supervisor.lease_expired


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
    assert cluster.supervisor.status().troubles == ("engine 0: OSError: no such file: model.safetensors",)
    cluster.tick(after_s=1.0)
    assert len(cluster.launcher.engines) == 2


def test_teardown_stops_the_front_door_and_kills_everything() -> None:
    cluster = Cluster()
    cluster.all_ready()
    cluster.supervisor.teardown()
    assert cluster.launcher.ingresses[0].stopped_with_grace_s == STOP_GRACE_S
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
    assert [store.told[-1] for store in launcher.stores] == ["router", "router"]
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
    assert [store.killed for store in cluster.launcher.stores] == [True, False]
    assert cluster.launcher.routers[0].told[-1] == ["engine-0-2", "engine-1-1", "store-west-1"]


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
