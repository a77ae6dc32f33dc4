"""A cluster that grows, shrinks, leaves nodes and becomes another, over fake processes and a fake clock."""

import sys
from dataclasses import replace

import pytest

from shoal.cluster.autoscaler import AutoscalingConfig
from shoal.cluster.deployment import ROOM_S, SETTLE_S, STARTS_A_TICK
from shoal.cluster.supervisor import GONE_S, Supervisor
from tests.cluster_unit.test_supervisor import Cluster, FakeLauncher, a_deployment, an_engine, an_ingress


def with_engines(num_engines: int, **launcher: object) -> Cluster:
    cluster = Cluster(num_engines=num_engines, launcher=FakeLauncher(**launcher))  # type: ignore[arg-type]
    cluster.all_ready()
    return cluster


def alive(cluster: Cluster) -> list[str]:
    return [engine.process_id for engine in cluster.launcher.engines if not engine.killed]


def placed_on(cluster: Cluster) -> object:
    return cluster.launcher.routers[-1].told[-1]


def test_scaled_up_it_starts_the_engines_that_lack() -> None:
    cluster = with_engines(1)
    cluster.supervisor.scale("m", 3)
    cluster.tick()
    assert cluster.phases() == {"m": ["ready", "joining", "joining"]}
    cluster.passes(1.0)
    assert cluster.phases() == {"m": ["ready"] * 3}
    assert placed_on(cluster) == ["engine-0-0", "engine-1-1", "engine-2-2"]


def test_case_56_scaled_down_it_ends_first_what_does_not_serve_yet() -> None:
    cluster = with_engines(2, room=2)
    cluster.supervisor.scale("m", 3)
    cluster.tick()
    cluster.supervisor.scale("m", 2)
    cluster.tick()
    assert cluster.phases() == {"m": ["ready", "ready"]}
    assert cluster.launcher.engines[2].killed


def test_case_56_an_engine_that_goes_takes_nothing_new_and_finishes_what_it_has() -> None:
    cluster = with_engines(2)
    busy, busier = cluster.launcher.engines
    busy.has(1)
    busier.has(5)
    cluster.supervisor.scale("m", 1)
    cluster.tick()
    assert cluster.phases() == {"m": ["draining", "ready"]}, "the one that has less to finish"
    assert placed_on(cluster) == ["engine-1-1"]
    told = cluster.launcher.ingresses[0].heard.popitem()[1]
    assert sorted(told.engines) == ["engine-0-0", "engine-1-1"]
    assert list(told.card.draining) == ["engine-0-0"]
    assert busy.told, "it still hears who listens"
    cluster.passes(60.0)
    assert alive(cluster) == ["engine-0-0", "engine-1-1"]
    busy.has(0)
    cluster.passes(1.0)
    assert (alive(cluster), cluster.phases()) == (["engine-1-1"], {"m": ["ready"]})


def test_what_was_placed_just_before_it_drains_may_still_arrive() -> None:
    cluster = with_engines(2)
    cluster.supervisor.scale("m", 1)
    cluster.passes(SETTLE_S)
    assert len(alive(cluster)) == 2, "nothing to do yet, as far as one knows"
    cluster.passes(2.5)
    assert len(alive(cluster)) == 1


def test_what_an_engine_said_before_the_last_could_arrive_is_not_believed() -> None:
    cluster = with_engines(2)
    cluster.passes(1.0)
    cluster.supervisor.scale("m", 1)
    for _ in range(12):  # its pings wait
        cluster.tick(after_s=0.5)
    assert len(alive(cluster)) == 2
    cluster.passes(2.0)
    assert len(alive(cluster)) == 1


def test_what_is_not_finished_in_time_goes_on_elsewhere() -> None:
    cluster = with_engines(2)
    for engine in cluster.launcher.engines:
        engine.has(7)
    cluster.supervisor.scale("m", 1)
    cluster.passes(cluster.spec.drain_s - 1.0)
    assert len(alive(cluster)) == 2
    cluster.passes(2.0)
    assert len(alive(cluster)) == 1


def test_an_engine_that_dies_while_it_drains_is_not_started_again() -> None:
    cluster = with_engines(2)
    cluster.launcher.engines[0].has(1)
    cluster.launcher.engines[1].has(2)
    cluster.supervisor.scale("m", 1)
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[-1].set_exception(RuntimeError("actor died"))
    cluster.passes(60.0)
    assert (len(cluster.launcher.engines), cluster.phases()) == (2, {"m": ["ready"]})


def test_of_equal_engines_the_one_goes_that_empties_a_node() -> None:
    cluster = with_engines(3, nodes=["crowded", "lonely", "crowded"])
    cluster.supervisor.scale("m", 2)
    cluster.passes(6.0)
    assert alive(cluster) == ["engine-0-0", "engine-2-2"]


def test_scaled_to_none_and_back() -> None:
    cluster = with_engines(1)
    cluster.supervisor.scale(None, 0)
    cluster.passes(6.0)
    assert (alive(cluster), cluster.supervisor.status().ready) == ([], True)
    cluster.supervisor.scale(None, 1)
    cluster.passes(2.0)
    assert cluster.phases() == {"m": ["ready"]}


def test_what_cannot_be_scaled_is_said() -> None:
    cluster = with_engines(1)
    with pytest.raises(ValueError, match="'other' is not served here: choose m"):
        cluster.supervisor.scale("other", 2)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        cluster.supervisor.scale("m", -1)
    with pytest.raises(ValueError, match="at most 1024, got 100000"):
        cluster.supervisor.scale("m", 100_000)
    with pytest.raises(ValueError, match="max_replicas must be at most 1024, got 1025"):
        AutoscalingConfig(max_replicas=1025)


def test_a_node_that_is_drained_is_left_by_all_and_its_engines_come_back_elsewhere() -> None:
    cluster = Cluster(with_stores=True, launcher=FakeLauncher(nodes=["east", "west"]))
    cluster.all_ready()
    cluster.passes(1.0)
    cluster.launcher.engines[0].has(1)
    cluster.supervisor.drain_node("east")
    cluster.passes(5.0)
    assert cluster.phases() == {"m": ["draining", "ready", "ready"]}
    assert cluster.launcher.engines[2].info.node == "west"  # type: ignore[attr-defined]
    cluster.launcher.engines[0].has(0)
    cluster.passes(5.0)
    assert cluster.phases() == {"m": ["ready", "ready"]}
    cluster.launcher.stores[0].is_empty.set_result(None)
    cluster.passes(1.0)
    assert [store.node for store in cluster.launcher.stores if not store.killed] == ["west"]
    assert cluster.supervisor.status().leaving == {"east"}


def test_a_node_is_named_by_the_beginning_of_its_id_and_the_last_one_is_not_left() -> None:
    cluster = with_engines(1, nodes=["east-1", "east-2", "west"])
    for wrong in ("", "north", "east"):
        with pytest.raises(ValueError, match=r"names \d of east-1, east-2, west"):
            cluster.supervisor.drain_node(wrong)
    cluster.supervisor.drain_node("w")
    cluster.supervisor.drain_node("east-1")
    with pytest.raises(ValueError, match="east-2 is the last one"):
        cluster.supervisor.drain_node("east-2")
    cluster.supervisor.undrain_node("wes")
    assert cluster.supervisor.status().leaving == {"east-1"}


def test_an_engine_that_is_drained_is_replaced() -> None:
    cluster = with_engines(2)
    cluster.supervisor.drain_engine("1-1")
    with pytest.raises(ValueError, match="'engine-9-9' names 0 of engine-0-0, engine-1-1"):
        cluster.supervisor.drain_engine("engine-9-9")
    for _ in range(12):
        cluster.passes(0.5)
        assert len(placed_on(cluster)) >= 2, "its place is taken before it goes"  # type: ignore[arg-type]
    assert alive(cluster) == ["engine-0-0", "engine-2-2"]


def test_a_successor_of_the_supervisor_lets_an_engine_go_that_was_drained() -> None:
    cluster = with_engines(2)
    cluster.launcher.room = 0
    cluster.supervisor.drain_engine("engine-1-1")
    cluster.tick()
    assert cluster.supervisor.status().leaving_engines == {"engine-1-1"}
    first, leaving = cluster.launcher.engines[:2]
    successor = Cluster(launcher=FakeLauncher(to_adopt=[first, leaving]))
    successor.supervisor = Supervisor(cluster.supervisor.wish, successor.launcher, clock=successor.clock)
    successor.launcher.engines += [first, leaving]  # they answer as the others do
    successor.passes(12.0)
    assert (first.killed, leaving.killed) == (False, True)
    assert successor.phases() == {"m": ["ready", "ready"]}
    assert successor.supervisor.wish.leaving_engines == frozenset()


def test_a_successor_of_the_supervisor_ends_a_cluster_that_was_to_end() -> None:
    cluster = with_engines(1)
    cluster.supervisor.stop()
    successor = Supervisor(cluster.supervisor.wish, cluster.launcher, clock=cluster.clock)
    successor.tick()
    assert successor.is_to_end


def test_a_node_that_is_gone_is_no_longer_left() -> None:
    cluster = with_engines(1, nodes=["east", "west"])
    cluster.supervisor.drain_node("west")
    cluster.passes(2 * GONE_S)
    assert cluster.supervisor.wish.leaving == {"west"}
    cluster.launcher.nodes = []
    cluster.passes(2 * GONE_S)
    assert cluster.supervisor.wish.leaving == {"west"}, "where nobody is seen nobody is known to be gone"
    cluster.launcher.nodes = ["east"]
    cluster.passes(GONE_S - 5.0)
    cluster.launcher.nodes = ["east", "west"]
    cluster.passes(1.0)
    cluster.launcher.nodes = ["east"]
    cluster.passes(GONE_S - 5.0)
    assert cluster.supervisor.wish.leaving == {"west"}, "it was away for a moment"
    cluster.passes(10.0)
    assert cluster.supervisor.wish.leaving == frozenset()


def test_many_engines_are_made_some_a_tick() -> None:
    cluster = with_engines(1)
    cluster.supervisor.scale("m", 2 * STARTS_A_TICK + 4)
    made = []
    for _ in range(4):
        cluster.tick()
        made.append(len(cluster.launcher.engines))
    assert made == [1 + STARTS_A_TICK, 1 + 2 * STARTS_A_TICK, 4 + 2 * STARTS_A_TICK, 4 + 2 * STARTS_A_TICK]


def calls_of_a_tick(num_engines: int, *, room: int) -> int:
    """Python's, of a tick and of the look at what it came to."""
    cluster = Cluster(num_engines=num_engines, launcher=FakeLauncher(room=room, nodes=["east", "west"]))
    cluster.passes(2 * ROOM_S)
    for engine in cluster.launcher.engines:
        engine.has(1)
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        cluster.tick()
        cluster.supervisor.status()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("room", [0, 1000])
def test_what_a_tick_does_grows_with_the_engines_and_not_with_their_square(room: int) -> None:
    """Be they ready, or waiting for room."""
    assert calls_of_a_tick(320, room=room) < 2.2 * calls_of_a_tick(160, room=room)


def test_without_room_for_anothers_place_it_goes_first() -> None:
    cluster = with_engines(2)
    cluster.launcher.room = 0
    for engine in cluster.launcher.engines:
        engine.has(1)
    for engine in list(cluster.launcher.engines):
        cluster.supervisor.drain_engine(engine.process_id)
    cluster.passes(ROOM_S)
    assert len(placed_on(cluster)) == 2  # type: ignore[arg-type]
    cluster.passes(5.0)
    assert sorted(cluster.phases()["m"]) == ["draining", "joining", "joining", "ready"], "one by one"


def test_an_engine_that_dies_before_its_place_is_taken_is_not_started_again() -> None:
    cluster = with_engines(1)
    cluster.launcher.room = 0
    cluster.supervisor.drain_engine("engine-0-0")
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[-1].set_exception(RuntimeError("actor died"))
    cluster.tick(after_s=0.5)
    assert cluster.phases() == {"m": ["joining"]}


def test_two_models_are_served_side_by_side_and_do_not_hear_of_each_others_engines() -> None:
    cluster = Cluster(deployments=(a_deployment("m", 1), a_deployment("n", 2)))
    cluster.all_ready()
    assert cluster.supervisor.status().ready
    assert cluster.phases() == {"m": ["ready"], "n": ["ready", "ready"]}
    first, second = cluster.launcher.routers
    assert (first.told[-1], len(second.told[-1])) == (["engine-0-0"], 2)  # type: ignore[arg-type]
    told = list(cluster.launcher.ingresses[0].heard.values())
    assert [(t.card.model.name, t.card.weight, len(t.engines)) for t in told] == [("m", 1, 1), ("n", 2, 2)]


def becoming(cluster: Cluster) -> Supervisor:
    """Its only model on other engines."""
    (before,) = cluster.spec.deployments
    after = a_deployment("m", before.num_engines, labels={"zone": "a"})
    cluster.supervisor.apply(replace(cluster.spec, deployments=(after,)))
    return cluster.supervisor


def test_a_changed_model_takes_the_others_place_engine_by_engine() -> None:
    cluster = with_engines(2)
    old = list(cluster.launcher.engines)
    old[0].has(1)
    old[1].has(2)
    becoming(cluster)
    serving: list[int] = []
    for _ in range(40):
        cluster.passes(0.5)
        told = list(cluster.launcher.ingresses[0].heard.values())
        serving.append(sum(t.card.weight for t in told))
        if old[0].killed:
            old[1].has(0)
        if len(serving) == 20:
            old[0].has(0)
    assert min(serving) == 2, "there were never fewer"
    assert all(engine.killed for engine in old)
    assert cluster.phases() == {"m": ["ready", "ready"]}
    assert cluster.launcher.routers[0].killed
    assert cluster.supervisor.wish.outgoing == ()


def test_without_room_beside_the_old_one_of_them_goes_first_and_only_one() -> None:
    cluster = with_engines(3)
    for engine in cluster.launcher.engines:
        engine.has(1)
    becoming(cluster)
    cluster.launcher.room = 0
    cluster.passes(ROOM_S)
    assert cluster.supervisor.status().troubles == ()
    cluster.passes(10.0)
    old, new = (sorted(engine.phase for engine in d.engines) for d in cluster.supervisor.status().deployments)
    assert (old, new) == (["draining", "ready", "ready"], ["joining"])
    assert cluster.supervisor.status().troubles == ("engine 0 of m: waits for 1 CPU",)
    cluster.launcher.room = 99
    cluster.launcher.engines[3].hangs = False
    for engine in cluster.launcher.engines:
        engine.has(0)
    cluster.passes(20.0)
    assert cluster.phases() == {"m": ["ready"] * 3}


def test_a_change_that_cannot_start_leaves_what_serves_alone() -> None:
    cluster = with_engines(2)
    becoming(cluster)
    cluster.tick()
    cluster.launcher.engines[2].started.set_exception(ValueError("not enough memory"))
    cluster.passes(30.0)
    status = cluster.supervisor.status()
    assert (status.failed, alive(cluster)) == (None, ["engine-0-0", "engine-1-1"])
    assert any("not enough memory" in trouble for trouble in status.troubles)
    assert not status.ready, "it is not yet what it is to be"
    cluster.supervisor.apply(cluster.spec)
    cluster.passes(6.0)
    status = cluster.supervisor.status()
    assert (status.ready, status.troubles, alive(cluster)) == (True, (), ["engine-0-0", "engine-1-1"])


def test_after_a_change_that_could_not_start_the_next_one_takes_the_place_of_what_serves() -> None:
    cluster = with_engines(2)
    for engine in cluster.launcher.engines:
        engine.has(1)
    becoming(cluster)
    cluster.tick()
    cluster.launcher.engines[2].started.set_exception(ValueError("not enough memory"))
    cluster.passes(5.0)
    mended = a_deployment("m", 2, labels={"zone": "b"})
    cluster.supervisor.apply(replace(cluster.spec, deployments=(mended,)))
    cluster.tick()
    assert len(placed_on_first(cluster)) == 2, "neither goes for one that never came"
    for engine in cluster.launcher.engines:
        engine.has(0)
    cluster.passes(20.0)
    assert cluster.phases() == {"m": ["ready", "ready"]}
    assert [d.deployment_id for d in cluster.supervisor.status().deployments] == [mended.deployment_id]


def placed_on_first(cluster: Cluster) -> list[str]:
    told = cluster.launcher.routers[0].told[-1]
    assert isinstance(told, list)
    return told


def test_a_supervisor_that_takes_over_ends_nothing_before_it_knows_what_serves() -> None:
    left = [an_engine(f"engine-{i}-old") for i in range(3)]
    cluster = Cluster(num_engines=2, launcher=FakeLauncher(to_adopt=left))
    cluster.tick()
    assert not any(engine.killed for engine in left)
    for engine in left:
        engine.become_ready()
    cluster.tick()
    cluster.tick()
    assert sorted(cluster.phases()["m"]) == ["draining", "ready", "ready"]


def test_a_model_that_is_no_longer_named_is_ended_when_it_has_finished() -> None:
    cluster = Cluster(deployments=(a_deployment("m", 1), a_deployment("n", 1)))
    cluster.all_ready()
    cluster.launcher.engines[1].has(1)
    cluster.supervisor.apply(replace(cluster.spec, deployments=cluster.spec.deployments[:1]))
    cluster.passes(10.0)
    assert len(alive(cluster)) == 2
    cluster.launcher.engines[1].has(0)
    cluster.passes(2.0)
    assert (alive(cluster), list(cluster.phases())) == (["engine-0-0"], ["m"])


def test_told_the_same_again_nothing_happens() -> None:
    cluster = with_engines(2)
    cluster.supervisor.apply(cluster.spec)
    cluster.passes(10.0)
    assert len(cluster.launcher.engines) == 2


def test_what_cannot_change_while_it_runs_is_refused() -> None:
    cluster = with_engines(1)
    with pytest.raises(ValueError, match="kv_store_bytes cannot be changed while a cluster runs"):
        cluster.supervisor.apply(replace(cluster.spec, kv_store_bytes=1))


def test_a_successor_of_the_supervisor_goes_on_with_a_change_that_was_begun() -> None:
    cluster = with_engines(1)
    supervisor = becoming(cluster)
    cluster.tick()
    (coming, going) = (*supervisor.wish.spec.deployments, *supervisor.wish.outgoing)
    successor = Supervisor(supervisor.wish, cluster.launcher, clock=cluster.clock)
    assert cluster.launcher.known == {coming.deployment_id, going.deployment_id}
    assert [d.is_outgoing for d in successor.status().deployments] == [False, True]


def test_one_ingress_is_on_each_node_that_is_labelled_for_it() -> None:
    cluster = Cluster(
        ingress_labels={"door": "yes"}, launcher=FakeLauncher(labelled=["east"], nodes=["west", "east"])
    )
    cluster.all_ready()
    cluster.launcher.labelled.append("west")
    cluster.passes(1.0)
    east, west = cluster.launcher.ingresses
    assert (east.process_id, west.process_id) == ("ingress-east", "ingress-west")
    east.ends_at_once = False
    cluster.supervisor.drain_node("east")
    cluster.passes(2.0)
    assert (east.stopped, east.killed, west.stopped) == (cluster.spec.drain_s, False, None)
    assert east.told and cluster.launcher.engines[0].told[-1] == ("router", {"id-0", "id-1"}, [], None)
    east.has_ended.set_result(None)
    cluster.passes(1.0)
    assert (east.killed, west.killed) == (True, False)
    assert cluster.supervisor.status().ready


AUTO = AutoscalingConfig(
    min_replicas=1, max_replicas=4, target_ongoing_requests=4, upscale_delay_s=2, downscale_delay_s=10
)


def test_a_model_that_scales_itself_follows_its_load() -> None:
    cluster = Cluster(deployments=(a_deployment("m", 1, autoscaling=AUTO),))
    cluster.all_ready()
    cluster.launcher.engines[0].has(11)
    cluster.passes(5.0)
    assert cluster.phases() == {"m": ["ready"] * 3}
    for engine in cluster.launcher.engines:
        engine.has(1)
    cluster.passes(9.0)
    assert cluster.phases() == {"m": ["ready"] * 3}
    for engine in cluster.launcher.engines:
        engine.has(0)
    cluster.passes(20.0)
    assert cluster.phases() == {"m": ["ready"]}
    with pytest.raises(ValueError, match="m scales itself"):
        cluster.supervisor.scale("m", 2)


def weight(cluster: Cluster) -> int:
    """Engines that a request may be placed on, of all that are served."""
    return sum(told.card.weight for told in cluster.launcher.ingresses[-1].heard.values())


def test_a_change_of_a_model_that_scales_itself_begins_with_as_many_engines_as_it_has() -> None:
    cluster = Cluster(deployments=(a_deployment("m", 1, autoscaling=AUTO),))
    cluster.all_ready()
    cluster.launcher.engines[0].has(16)
    cluster.passes(5.0)
    after = a_deployment("m", 1, autoscaling=AUTO, labels={"zone": "a"})
    cluster.supervisor.apply(replace(cluster.spec, deployments=(after,)))
    weights = []
    for _ in range(60):
        for engine in cluster.launcher.engines:
            engine.has(4)
        cluster.passes(0.5)
        weights.append(weight(cluster))
    assert min(weights) == 4


def test_an_engine_that_was_to_leave_stays_until_the_change_has_another() -> None:
    cluster = with_engines(1)
    (old,) = cluster.launcher.engines
    cluster.supervisor.drain_engine(old.process_id)
    becoming(cluster)
    cluster.tick()
    assert weight(cluster) == 1
    cluster.passes(20.0)
    assert (weight(cluster), old.killed, len(alive(cluster))) == (1, True, 1)


def test_beside_a_change_that_cannot_start_an_engine_that_dies_is_started_again() -> None:
    cluster = with_engines(2)
    becoming(cluster)
    cluster.tick()
    cluster.launcher.engines[2].started.set_exception(ValueError("not enough memory"))
    cluster.tick(after_s=1.0)
    cluster.launcher.engines[0].pings[-1].set_exception(RuntimeError("actor died"))
    cluster.passes(20.0)
    assert weight(cluster) == 2


def test_a_supervisor_that_takes_over_ends_no_engine_for_being_slow_to_answer() -> None:
    cluster = with_engines(3)
    supervisor = becoming(cluster)
    cluster.tick()
    slow = [an_engine(f"slow-{i}") for i in range(2)]
    (going,) = supervisor.wish.outgoing
    launcher = FakeLauncher(to_adopt_of={going.deployment_id: slow})
    successor = Supervisor(supervisor.wish, launcher, clock=cluster.clock)
    for _ in range(2 * 9):
        successor.tick()
        cluster.clock.now += 0.5
    assert not any(engine.killed for engine in slow)
    slow[0].become_ready()
    successor.tick()
    going_now = successor.status().deployments[-1]
    assert [engine.phase for engine in going_now.engines] == ["ready", "joining"]


def test_counted_ingresses_stay_open_when_their_node_is_left() -> None:
    """Beside the supervisor is where they would open again."""
    cluster = Cluster(launcher=FakeLauncher(nodes=["n", "west"]))
    cluster.all_ready()
    cluster.supervisor.drain_node("n")
    cluster.passes(20.0)
    (ingress,) = cluster.launcher.ingresses
    assert (ingress.stopped, ingress.killed) == (None, False)


def test_an_ingress_that_was_closing_goes_on_with_its_streams_under_a_successor_of_the_supervisor() -> None:
    launcher = FakeLauncher(labelled=["east", "west"], nodes=["west", "east"])
    cluster = Cluster(ingress_labels={"door": "yes"}, launcher=launcher)
    cluster.all_ready()
    east, west = launcher.ingresses
    east.ends_at_once = False
    cluster.supervisor.drain_node("east")
    cluster.passes(1.0)
    launcher.ingresses_to_adopt = {"ingress-east": east, "ingress-west": west}
    launcher.to_adopt, launcher.router_to_adopt = list(launcher.engines), launcher.routers[0]
    cluster.supervisor = Supervisor(cluster.supervisor.wish, launcher, clock=cluster.clock)
    heard = len(east.told)
    cluster.passes(10.0)
    assert (east.killed, west.stopped) == (False, None)
    assert len(east.told) > heard, "it still hears of the engines"
    assert cluster.supervisor.status().ready
    east.has_ended.set_result(None)
    cluster.passes(1.0)
    assert (east.killed, west.killed) == (True, False)


def test_a_port_that_is_taken_is_not_the_end_of_a_cluster_whose_supervisor_was_started_again() -> None:
    launcher = FakeLauncher(ingresses_to_adopt={"ingress-0": an_ingress("ingress-0", "old")})
    cluster = Cluster(num_ingresses=2, launcher=launcher)
    cluster.tick()
    launcher.ingresses_to_adopt["ingress-0"].become_ready()
    launcher.ingresses[0].started.set_exception(ValueError("cannot listen"))
    cluster.tick()
    assert cluster.supervisor.status().failed is None
    cluster.passes(5.0)
    assert all(cluster.supervisor.status().ingresses)


def test_an_ingress_that_is_replaced_after_a_change_begins_with_what_is_served_then() -> None:
    cluster = with_engines(1)
    becoming(cluster)
    cluster.passes(20.0)
    (current,) = cluster.supervisor.wish.spec.deployments
    cluster.tick(after_s=1.0)
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[0].pings[-1].set_exception(RuntimeError("actor died"))
    cluster.passes(5.0)
    assert len(cluster.launcher.ingresses) == 2
    assert cluster.launcher.begun_with == [current.deployment_id], "the other's files may be gone"


def test_a_model_that_has_served_and_cannot_start_is_not_the_end_of_the_others_under_a_successor() -> None:
    both = (a_deployment("m", 1), a_deployment("n", 1))
    cluster = Cluster(deployments=both)
    cluster.all_ready()
    (kept, _) = cluster.launcher.engines
    launcher = FakeLauncher(to_adopt_of={both[0].deployment_id: [kept], both[1].deployment_id: []})
    cluster.launcher, wish = launcher, cluster.supervisor.wish
    cluster.supervisor = Supervisor(wish, launcher, clock=cluster.clock)
    cluster.tick()
    cluster.tick(after_s=0.5)
    launcher.engines[0].started.set_exception(ValueError("too little memory"))
    cluster.tick(after_s=0.5)
    status = cluster.supervisor.status()
    assert (status.failed, status.troubles) == (None, ("engine 0 of n: ValueError: too little memory",))
    cluster.passes(5.0)
    assert cluster.phases() == {"m": ["ready"], "n": ["ready"]}


def test_a_front_door_that_closes_has_the_grace_too_when_the_cluster_is_stopped() -> None:
    launcher = FakeLauncher(labelled=["east"], nodes=["west", "east"])
    cluster = Cluster(ingress_labels={"door": "yes"}, launcher=launcher)
    cluster.all_ready()
    (east,) = launcher.ingresses
    cluster.supervisor.drain_node("east")
    east.ends_at_once = False
    cluster.tick()
    assert east.stopped == cluster.spec.drain_s
    east.ends_at_once = True
    cluster.supervisor.teardown()
    assert (east.stopped, east.killed) == (cluster.spec.stop_grace_s, True)
