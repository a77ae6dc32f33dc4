"""Starts that take long, and engines that came to other bytes than the others, over fake processes."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shoal.actors.messages import EngineInfo
from shoal.cluster.driver import Account
from shoal.cluster.spec import DeploymentSpec
from shoal.cluster.start_time import StartTime
from shoal.cluster.status import as_dict
from shoal.cluster.watch import PULSE_INTERVAL_S, START_TIMEOUT_S
from tests.cluster_unit.test_supervisor import (
    Cluster,
    FakeEngine,
    FakeLauncher,
    a_deployment,
    an_engine,
)


class TellingEngine(FakeEngine):
    """Its pulse says what it does."""

    doing = ""

    def pulse(self) -> Future[Any]:
        pulse: Future[Any] = Future()
        if not self.hangs:
            pulse.set_result(self.doing)
        return pulse


@dataclass
class TellingLauncher(FakeLauncher):
    contents: dict[int, bytes] = field(default_factory=dict)
    """By index, where not all have the same."""

    def engine(self, deployment: DeploymentSpec, index: int) -> FakeEngine:
        plain = super().engine(deployment, index)
        assert isinstance(plain.info, EngineInfo)
        info = replace(plain.info, content=self.contents.get(index, b"c"))
        telling = TellingEngine(plain.process_id, info)
        telling.hangs = plain.hangs
        self.engines[-1] = telling
        return telling


def all_but_engines_ready(cluster: Cluster) -> None:
    cluster.tick()
    for process in (*cluster.launcher.routers, *cluster.launcher.ingresses):
        process.become_ready()
    cluster.tick()


def pass_slowly(cluster: Cluster, seconds: float) -> None:
    """Who serves answers, who starts goes on starting."""
    step_s = 0.5 if seconds < 60 else 2.0
    for _ in range(int(seconds / step_s)):
        for process in cluster.processes:
            if process.pings and not process.pings[-1].done():
                process.pings[-1].set_result(True)
        cluster.tick(after_s=step_s)


def test_ten_engines_that_take_fourteen_minutes_to_start_are_started_once_each() -> None:
    """None is taken for dead while its pulse is felt, long past the deadline of a ping."""
    cluster = Cluster(num_engines=10, launcher=TellingLauncher(nodes=[f"n{i}" for i in range(10)]))
    all_but_engines_ready(cluster)
    pass_slowly(cluster, 14 * 60.0)
    assert len(cluster.launcher.engines) == 10
    assert not any(process.killed for process in cluster.processes)
    assert cluster.supervisor.status().troubles == ()
    for engine in cluster.launcher.engines:
        engine.become_ready()
    pass_slowly(cluster, 1.0)
    assert cluster.supervisor.status().ready
    assert len(cluster.launcher.engines) == 10


def test_how_long_a_start_may_take_counts_from_when_it_was_first_heard_of() -> None:
    """Before that it waits for room, as for a node that is being added: half of its time was up by then."""
    cluster = Cluster(num_engines=1, launcher=TellingLauncher(room=0))
    cluster.tick()
    (engine,) = cluster.launcher.engines
    pass_slowly(cluster, START_TIMEOUT_S / 2)
    engine.hangs = False
    pass_slowly(cluster, START_TIMEOUT_S - 10.0)
    assert not engine.killed
    pass_slowly(cluster, 80.0)
    assert engine.killed


@pytest.mark.parametrize("timeout_s", [60.0, 3600.0])
def test_how_long_a_start_may_take_is_a_choice(timeout_s: float) -> None:
    deployment = replace(a_deployment(num_engines=1), start_timeout_s=timeout_s)
    cluster = Cluster(deployments=(deployment,), launcher=TellingLauncher())
    all_but_engines_ready(cluster)
    pass_slowly(cluster, timeout_s - 1.0)
    assert len(cluster.launcher.engines) == 1
    pass_slowly(cluster, 4.0)
    assert cluster.launcher.engines[0].killed
    (trouble,) = cluster.supervisor.status().troubles
    assert trouble == f"engine 0 of m: TimeoutError: not started within {timeout_s:.0f} s"


def test_a_longer_timeout_is_given_to_starts_that_go_on_and_makes_no_other_deployment() -> None:
    cluster = Cluster(num_engines=1, launcher=TellingLauncher())
    cluster.tick()
    longer = replace(cluster.spec.deployments[0], start_timeout_s=2 * START_TIMEOUT_S)
    cluster.supervisor.apply(replace(cluster.spec, deployments=(longer,)))
    pass_slowly(cluster, 1.5 * START_TIMEOUT_S)
    (engine,) = cluster.launcher.engines
    assert not engine.killed


def test_a_start_timeout_must_be_some_time() -> None:
    with pytest.raises(ValueError, match="--start-timeout must be above 0, got 0"):
        replace(a_deployment(), start_timeout_s=0)


def test_what_a_start_is_at_is_seen_until_it_is_ready() -> None:
    cluster = Cluster(num_engines=1, launcher=TellingLauncher())
    cluster.tick()
    (engine,) = cluster.launcher.engines
    assert isinstance(engine, TellingEngine)

    def seen() -> Any:
        ((said,),) = [model["engines"] for model in as_dict("c", cluster.supervisor.status())["models"]]
        return said["phase"], said["doing"], said["trouble"]

    engine.doing = "fetching org/m: 12.1GiB of 16GiB"
    pass_slowly(cluster, 2 * PULSE_INTERVAL_S + 1)
    assert seen() == ("joining", "fetching org/m: 12.1GiB of 16GiB", None)
    engine.doing = "loading the weights"
    pass_slowly(cluster, 2 * PULSE_INTERVAL_S + 1)
    assert seen() == ("joining", "loading the weights", None)
    engine.become_ready()
    pass_slowly(cluster, 1.0)
    assert seen() == ("ready", None, None)


def test_the_operator_is_told_now_and_then_how_far_a_long_start_is() -> None:
    cluster, said = Cluster(num_engines=1, launcher=TellingLauncher()), StringIO()
    took = StartTime(cluster.clock, before_s=0.0)
    account = Account(cluster.spec, None, took, Console(file=said), lambda _: None, clock=cluster.clock)
    all_but_engines_ready(cluster)
    (engine,) = cluster.launcher.engines
    assert isinstance(engine, TellingEngine)
    for second in range(31):
        engine.doing = f"fetching org/m: {second}GiB of 40GiB"
        pass_slowly(cluster, 1.0)
        account.take(cluster.supervisor.status())
    told = said.getvalue().splitlines()
    assert 2 <= len(told) <= 3, "a start of a few seconds is no news, and neither is every gigabyte"
    assert all(line.startswith("engine 0 of m: fetching org/m: ") for line in told)


def test_an_engine_with_other_bytes_ends_a_start_of_which_it_is_part() -> None:
    launcher = TellingLauncher(nodes=["east", "west"], contents={1: b"d"})
    cluster = Cluster(launcher=launcher)
    cluster.all_ready()
    assert cluster.supervisor.status().failed == (
        "c on node west has other weights or another config.json than on node east: make them the same"
    )
    assert launcher.engines[1].killed and not launcher.engines[0].killed


def test_an_engine_with_other_bytes_does_not_join_those_that_serve_and_is_tried_again() -> None:
    launcher = TellingLauncher(nodes=["east", "west"], contents={1: b"d"})
    cluster = Cluster(num_engines=1, launcher=launcher)
    cluster.all_ready()
    cluster.supervisor.scale(None, 2)
    cluster.all_ready()
    status = cluster.supervisor.status()
    assert (status.ready, status.failed) == (False, None)
    (trouble,) = status.troubles
    assert trouble.startswith("engine 1 of m: ValueError: c on node west has other weights")
    assert launcher.routers[0].told[-1] == ["engine-0-0"], "nothing was ever placed on it"
    launcher.contents[1] = b"c"
    cluster.passes(5.0)
    assert cluster.supervisor.status().ready


def test_bytes_that_are_changed_everywhere_are_served_when_none_serves_the_old_ones() -> None:
    launcher = TellingLauncher()
    cluster = Cluster(num_engines=1, launcher=launcher)
    cluster.all_ready()
    launcher.contents[0] = b"d"
    cluster.tick(after_s=1.0)
    launcher.engines[0].pings[0].set_exception(RuntimeError("actor died"))
    cluster.passes(5.0)
    assert cluster.supervisor.status().ready


def test_engines_that_are_adopted_are_what_others_must_be_like() -> None:
    plain = an_engine("engine-0-old")
    assert isinstance(plain.info, EngineInfo)
    running = [FakeEngine("engine-0-old", replace(plain.info, content=b"d"))]
    launcher = TellingLauncher(to_adopt=running)
    cluster = Cluster(num_engines=2, launcher=launcher)
    running[0].become_ready()
    cluster.passes(4.0)
    assert (running[0].killed, launcher.engines[0].killed) == (False, True)
