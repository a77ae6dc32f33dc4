"""Whatever happens to a cluster, in whatever order: nothing is lost, and in peace it is what it is to be."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.cluster.spec import DeploymentSpec
from shoal.cluster.supervisor import Supervisor
from tests.cluster_unit.test_supervisor import Cluster, FakeEngine, FakeLauncher, FakeProcess, a_deployment

NODES = ("east", "west", "north")
MODELS = ("m", "n")


class AnyEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        launcher = FakeLauncher(nodes=list(NODES))
        self.cluster = Cluster(with_stores=True, launcher=launcher, deployments=(a_deployment("m", 2),))
        self.cluster.all_ready()

    @property
    def supervisor(self) -> Supervisor:
        return self.cluster.supervisor

    @property
    def engines(self) -> list[FakeEngine]:
        return [engine for engine in self.cluster.launcher.engines if not engine.killed]

    @rule(seconds=st.floats(0.5, 8.0), requests=st.integers(0, 3))
    def time_passes(self, seconds: float, requests: int) -> None:
        for engine in self.engines:
            engine.has(requests)
        self._stores_empty_themselves()
        self.cluster.passes(seconds)

    @rule(model=st.sampled_from(MODELS), num_engines=st.integers(0, 4))
    def scaled(self, model: str, num_engines: int) -> None:
        if any(deployment.model.name == model for deployment in self.supervisor.wish.spec.deployments):
            self.supervisor.scale(model, num_engines)

    @rule(zones=st.lists(st.sampled_from("ab"), min_size=1, max_size=2), num_engines=st.integers(0, 3))
    def becomes(self, zones: list[str], num_engines: int) -> None:
        wanted = tuple(
            a_deployment(model, num_engines, labels={"zone": zone})
            for model, zone in zip(MODELS, zones, strict=False)
        )
        self.supervisor.apply(replace(self.supervisor.wish.spec, deployments=wanted))

    @rule(which=st.integers(0, 20))
    def one_dies(self, which: int) -> None:
        processes = [p for p in self.cluster.processes if not p.killed]
        self._dies(processes[which % len(processes)])

    @rule(which=st.integers(0, 20))
    def an_engine_is_drained(self, which: int) -> None:
        if running := [engine for engine in self.engines if self._serves(engine)]:
            self.supervisor.drain_engine(running[which % len(running)].process_id)

    @rule(node=st.sampled_from(NODES))
    def a_node_is_left(self, node: str) -> None:
        if not self.supervisor.wish.leaving:
            self.supervisor.drain_node(node)

    @rule()
    def a_node_is_used_again(self) -> None:
        for node in self.supervisor.wish.leaving:
            self.supervisor.undrain_node(node)

    @rule(room=st.sampled_from([0, 1, 99]))
    def room_is(self, room: int) -> None:
        self.cluster.launcher.room = room
        for engine in self.engines:
            engine.hangs = engine.hangs and room < 99

    @rule(which=st.integers(0, 20), num_refusals=st.integers(1, 4))
    def one_cannot_be_ended_for_a_while(self, which: int, num_refusals: int) -> None:
        processes = [p for p in self.cluster.processes if not p.killed]
        processes[which % len(processes)].num_refusals = num_refusals

    @invariant()
    def whoever_is_placed_on_lives_and_takes_new_requests(self) -> None:
        for ingress in self.cluster.launcher.ingresses:
            for told in getattr(ingress, "heard", {}).values():
                assert told.card.draining <= told.engines.keys()

    @invariant()
    def nobody_is_forgotten(self) -> None:
        known = {
            id(member.watched.process)
            for deployment in self.supervisor._deployments.values()
            for member in deployment.members
        }
        assert {id(engine) for engine in self.engines} <= known

    def teardown(self) -> None:
        for process in self.cluster.processes:
            process.num_refusals = 0
        self._in_peace_it_is_what_it_is_to_be()
        self.supervisor.teardown()
        assert all(process.killed for process in self.cluster.processes)

    def _in_peace_it_is_what_it_is_to_be(self) -> None:
        self.room_is(99)
        for _ in range(12):
            for engine in self.engines:
                engine.has(0)
            self._stores_empty_themselves()
            self.cluster.passes(10.0)
        spec, status = self.supervisor.wish.spec, self.supervisor.status()
        assert status.ready
        assert status.troubles == ()
        assert {d.deployment_id for d in status.deployments} == {d.deployment_id for d in spec.deployments}
        wanted: dict[str, DeploymentSpec] = {d.model.name: d for d in spec.deployments}
        for model, phases in self.cluster.phases().items():
            assert phases == ["ready"] * wanted[model].num_engines
        nodes = {engine.info.node for engine in self.engines}  # type: ignore[attr-defined]
        assert not nodes & self.supervisor.wish.leaving
        assert {store.node for store in self.cluster.launcher.stores if not store.killed} == nodes
        alive = [router for router in self.cluster.launcher.routers if not router.killed]
        assert len(alive) == len(spec.deployments)

    def _serves(self, engine: FakeEngine) -> bool:
        deployments = self.supervisor._deployments.values()
        return any(m.watched.ready is engine for deployment in deployments for m in deployment.members)

    def _stores_empty_themselves(self) -> None:
        for store in self.cluster.launcher.stores:
            is_empty = getattr(store, "is_empty", None)
            if is_empty is not None and not is_empty.done():
                is_empty.set_result(None)

    @staticmethod
    def _dies(process: FakeProcess) -> None:
        error = RuntimeError("actor died")
        if not process.started.done():
            process.started.set_exception(error)
        for ping in process.pings:
            if not ping.done():
                ping.set_exception(error)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
