"""What front doors say that they can serve, and what the cluster makes of it, over fake processes."""

from dataclasses import replace

from tests.cluster_unit.test_growth import alive, becoming, weight, with_engines
from tests.cluster_unit.test_supervisor import Cluster, FakeLauncher, a_deployment


def test_the_cluster_is_ready_when_every_door_knows_an_engine_of_every_model() -> None:
    cluster = Cluster(deployments=(a_deployment("m", 1), a_deployment("n", 1)), num_ingresses=2)
    cluster.tick()
    for process in (*cluster.launcher.ingresses, *cluster.launcher.engines):
        process.become_ready()
    cluster.launcher.routers[0].become_ready()
    cluster.tick()
    assert cluster.supervisor.status().has_all_engines
    assert not cluster.supervisor.status().ready, "nobody is placed on n before it has a router"
    cluster.launcher.routers[1].become_ready()
    cluster.tick()
    assert cluster.supervisor.status().ready
    cluster.launcher.ingresses[1].account = None
    assert not cluster.supervisor.status().ready, "one has not answered yet"


def test_a_model_without_engines_need_not_be_known() -> None:
    cluster = with_engines(1)
    cluster.supervisor.scale(None, 0)
    cluster.passes(6.0)
    assert cluster.supervisor.status().ready


def test_a_change_whose_tokenizer_no_door_can_read_leaves_what_serves_alone() -> None:
    cluster = with_engines(2)
    (door,) = cluster.launcher.ingresses
    wanted = a_deployment("m", 2, labels={"zone": "a"})
    door.unread = {wanted.deployment_id: "ValueError: it has no tokenizer.json"}
    becoming(cluster)
    cluster.passes(30.0)
    assert {"engine-0-0", "engine-1-1"} <= set(alive(cluster))
    status = cluster.supervisor.status()
    assert status.troubles == (
        "m at ingress 0: its tokenizer is not read: ValueError: it has no tokenizer.json",
    )
    assert (status.ready, status.failed) == (False, None)
    door.unread = {}
    cluster.passes(30.0)
    assert cluster.phases() == {"m": ["ready", "ready"]}
    assert not {"engine-0-0", "engine-1-1"} & set(alive(cluster))
    assert (weight(cluster), cluster.supervisor.status().ready) == (2, True)


def test_a_tokenizer_that_cannot_be_read_is_a_mistake_of_the_whole_at_the_beginning_alone() -> None:
    cluster = Cluster(num_engines=1)
    cluster.tick()
    assert cluster.launcher.ingresses[0].is_first
    for process in cluster.processes:
        process.become_ready()
    cluster.tick()
    cluster.tick(after_s=1.0)
    cluster.launcher.ingresses[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.all_answer()
    cluster.tick()
    cluster.tick(after_s=1.0)
    assert not cluster.launcher.ingresses[1].is_first


def test_models_are_told_in_the_order_in_which_they_were_named_also_after_a_change() -> None:
    """Without a name a client asks for the first."""
    cluster = Cluster(deployments=(a_deployment("m", 1), a_deployment("n", 1)), launcher=FakeLauncher())
    cluster.all_ready()
    changed = (a_deployment("m", 1, labels={"zone": "a"}), cluster.spec.deployments[1])
    cluster.supervisor.apply(replace(cluster.spec, deployments=changed))
    cluster.passes(20.0)
    told = cluster.launcher.ingresses[0].heard.values()
    assert [one.card.model.name for one in told] == ["m", "n"]
