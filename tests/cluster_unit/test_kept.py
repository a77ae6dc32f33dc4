"""What a supervisor was told, read by another version of the project."""

import threading
from dataclasses import dataclass, make_dataclass, replace
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from rich.console import Console

from shoal.cluster import driver, lifecycle
from shoal.cluster.kept import OtherVersion, read, shape_of, written
from shoal.cluster.lifecycle import ServeError, find_running
from shoal.cluster.start_time import StartTime
from shoal.cluster.supervisor import Wish
from tests.cluster_unit.test_supervisor import Cluster


def a_wish() -> Wish:
    return Wish(spec=replace(Cluster().spec, is_detached=True), leaving=frozenset({"east"}))


def of_another_version(data: bytes) -> bytes:
    head, _, body = data.partition(b"\n")
    return head[:-1] + (b"0" if head[-1:] != b"0" else b"1") + b"\n" + body


def test_it_is_read_as_it_was_written() -> None:
    assert read(written(a_wish())) == a_wish()


@pytest.mark.parametrize("data", [of_another_version(written(a_wish())), b"", b"\x80\x05N."])
def test_what_another_version_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(OtherVersion, match="started by another version of Shoal"):
        read(data)


@dataclass(frozen=True)
class Inner:
    a: int
    b: int


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...] | None


def test_a_field_that_is_added_moved_or_of_another_type_makes_another_shape_wherever_it_is() -> None:
    variants: list[list[tuple[str, type]]] = [
        [("a", int), ("b", int)],
        [("b", int), ("a", int)],
        [("a", int), ("b", int), ("c", int)],
        [("a", int), ("b", float)],
    ]
    assert len({shape_of(make_dataclass("Inner", fields)) for fields in variants}) == 4
    assert shape_of(Inner) in shape_of(Outer)


def test_a_running_cluster_of_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Supervisor:
        wish = None

    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Supervisor())
    said = [of_another_version(written(a_wish())), written(a_wish())]
    monkeypatch.setattr(lifecycle, "call", lambda method: said.pop(0))
    with pytest.raises(ServeError, match="another version of Shoal than runs here: end it, and start it"):
        find_running("test", is_detached=True)
    running = find_running("test", is_detached=True)
    assert running is not None and running.spec == a_wish().spec


def test_a_supervisor_that_cannot_begin_for_it_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = (
        "Traceback (most recent call last):\n\nshoal.cluster.kept.OtherVersion: started by another version"
    )
    cause = RayTaskError("SupervisorActor.__init__", trace, OtherVersion("x"))  # type: ignore[no-untyped-call]

    def call(method: object) -> None:
        raise ActorDiedError(cause)

    monkeypatch.setattr(driver, "call", call)
    cluster, supervisor = Cluster(), SimpleNamespace(renew_lease=None)
    took = StartTime(cluster.clock, before_s=0.0)
    account = driver.Account(cluster.spec, None, took, Console(), lambda _: None)
    with pytest.raises(ServeError, match=r"the supervisor cannot begin: .*started by another version"):
        driver.watch(supervisor, "shoal-test", threading.Event(), account, until_ready=False)
