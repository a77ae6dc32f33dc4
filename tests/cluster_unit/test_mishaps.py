"""Calls to Ray that raise in the midst of a tick: what they concern is tried again, and the others go on."""

import logging
from dataclasses import replace

import pytest

from shoal.cluster.mishaps import Mishaps
from tests.cluster_unit.test_supervisor import Cluster, FakeLauncher, a_deployment


def killed(cluster: Cluster) -> list[str]:
    return [process.process_id for process in cluster.processes if process.killed]


def test_a_part_that_raises_is_told_while_it_does_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mishaps = Mishaps()
    for _ in range(3):
        mishaps.begin_tick()
        with mishaps.of("a"):
            raise RuntimeError("trace\n\nno answer")
        with mishaps.of("b"):
            pass
        assert mishaps.troubles == {"a": "RuntimeError: no answer"}
    assert (mishaps.count, len(caplog.records)) == (3, 1)
    mishaps.begin_tick()
    assert mishaps.troubles == {}
    with pytest.raises(AssertionError), mishaps.of("a"):
        raise AssertionError("a broken invariant is nothing to go on with")


def test_an_engine_that_cannot_be_ended_is_ended_later_and_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(num_engines=3)
    cluster.all_ready()
    cluster.tick(after_s=1.0)
    first, second, _ = cluster.launcher.engines
    first.num_refusals = 2
    for engine in (first, second):
        engine.pings[0].set_exception(RuntimeError("actor died"))
    cluster.all_answer()
    with caplog.at_level(logging.WARNING):
        cluster.tick()
    assert killed(cluster) == ["engine-1-1"]
    assert "engine 0 of m: RuntimeError: the control store is away" in cluster.supervisor.status().troubles
    assert cluster.launcher.ingresses[0].told[-1], "and all are told as ever"
    with caplog.at_level(logging.WARNING):
        cluster.tick(after_s=0.5)
    assert killed(cluster) == ["engine-1-1"]
    cluster.tick(after_s=0.5)
    assert killed(cluster) == ["engine-0-0", "engine-1-1"]
    assert cluster.supervisor.counts()["engine"].failures == 2, "each was lost once"
    assert cluster.supervisor.num_mishaps == 2
    assert len([record for record in caplog.records if "engine 0 of m" in record.message]) == 1
    cluster.passes(3.0)
    assert (cluster.supervisor.status().ready, cluster.supervisor.status().troubles) == (True, ())


def test_a_model_that_goes_is_not_forgotten_before_its_router_is_ended() -> None:
    cluster = Cluster(num_engines=1)
    cluster.all_ready()
    (router,) = cluster.launcher.routers
    router.num_refusals = 3
    cluster.supervisor.apply(replace(cluster.spec, deployments=(a_deployment("n", 1),)))
    for _ in range(20):
        cluster.passes(0.5)
        if router.num_refusals == 2:
            assert list(cluster.phases()) == ["m", "n"]
    assert router.killed
    assert list(cluster.phases()) == ["n"]


def test_doors_and_stores_that_cannot_be_ended_are_ended_later() -> None:
    launcher = FakeLauncher(labelled=["east", "west"], nodes=["east", "west"])
    cluster = Cluster(with_stores=True, launcher=launcher, ingress_labels={"door": "yes"})
    cluster.all_ready()
    for store in launcher.stores:
        store.become_ready()
    cluster.passes(1.0)
    door, store = launcher.ingresses[0], launcher.stores[0]
    door.num_refusals = store.num_refusals = 2
    cluster.supervisor.drain_node("east")
    cluster.passes(9.0)
    store.is_empty.set_result(None)
    cluster.passes(3.0)
    assert (door.killed, store.killed) == (True, True)
    assert [store.killed for store in launcher.stores] == [True, False]
    assert cluster.supervisor.num_mishaps == 4


def test_without_a_look_at_the_nodes_the_cluster_is_kept() -> None:
    class Blind(FakeLauncher):
        sees = True

        def look(self, leaving: object) -> None:
            if not self.sees:
                raise ConnectionError("no answer")

    launcher = Blind()
    cluster = Cluster(launcher=launcher)
    cluster.all_ready()
    launcher.sees = False
    cluster.tick(after_s=1.0)
    launcher.engines[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.passes(4.0)
    assert cluster.phases() == {"m": ["ready", "ready"]}
    assert cluster.supervisor.status().troubles == ("Ray's nodes: ConnectionError: no answer",)


def test_at_the_end_one_that_cannot_be_ended_keeps_no_other() -> None:
    cluster = Cluster(with_stores=True)
    cluster.all_ready()
    for process in (cluster.launcher.ingresses[0], cluster.launcher.engines[0]):
        process.num_refusals = 1
    cluster.supervisor.teardown()
    left = [process.process_id for process in cluster.processes if not process.killed]
    assert left == ["ingress-0", "engine-0-0"]
