"""The beginning and the end of a cluster in a Ray that this process is connected to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import list_named_actors, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.cluster.kept import OtherVersion, read, written
from shoal.cluster.launcher import groups_of
from shoal.cluster.spec import ClusterSpec, namespace_of
from shoal.cluster.supervisor import Wish
from shoal.cluster.supervisor_actor import SUPERVISOR, SupervisorActor, forget_wishes

CALL_DEADLINE_S = 5.0
TEARDOWN_DEADLINE_S = 30.0


class ServeError(Exception):
    """The cluster cannot run; one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cluster of that name that is there already, and was to outlive whoever started it."""

    supervisor: Any
    spec: ClusterSpec


def find_running(name: str, *, is_detached: bool) -> Running | None:
    """Raises ServeError if one runs that is not to be changed by us."""
    try:
        supervisor = ray.get_actor(SUPERVISOR, namespace=namespace_of(name))
    except ValueError:
        return None
    try:
        spec = read(call(supervisor.wish)).spec
    except OtherVersion as error:
        raise ServeError(f"{error}, or choose --name") from error
    except (RayError, GetTimeoutError) as error:
        raise ServeError(
            f"a cluster named {name!r} runs in this Ray, but its supervisor does not answer "
            f"({type(error).__name__}): try again, or choose --name"
        ) from error
    if not (is_detached and spec.is_detached):
        raise ServeError(
            f"a cluster named {name!r} runs in this Ray already: stop it, choose --name, or, if both "
            "are --detached, change it"
        )
    return Running(supervisor=supervisor, spec=spec)


@contextmanager
def changed(running: Running, spec: ClusterSpec) -> Iterator[Any]:
    """The supervisor of a cluster that becomes this; it goes on by itself, whatever happens here."""
    try:
        call(running.supervisor.apply, spec)
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise ServeError(str(error.cause)) from error
        raise
    yield running.supervisor


@contextmanager
def new_cluster(spec: ClusterSpec) -> Iterator[Any]:
    """A supervisor, and through it the cluster. On the way out no actor of it is left, unless it is detached
    and all went well."""
    _end_all(spec.namespace)  # left behind without a supervisor, and serving who knows what
    here = ray.get_runtime_context().get_node_id()
    supervisor = (
        ray.remote(SupervisorActor)
        .options(
            name=SUPERVISOR,
            namespace=spec.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        )
        .remote(written(Wish(spec=spec)))
    )
    try:
        yield supervisor
    except BaseException:
        _teardown(supervisor, spec)
        raise
    if not spec.is_detached:
        _teardown(supervisor, spec)


def call(method: Any, *args: Any, timeout_s: float = CALL_DEADLINE_S) -> Any:
    return ray.get(method.remote(*args), timeout=timeout_s)


def _teardown(supervisor: Any, spec: ClusterSpec) -> None:
    """End the cluster's actors, the supervisor last, and see that none is left."""
    with suppress(RayError, GetTimeoutError):  # without its help we do it ourselves, below
        call(supervisor.teardown, timeout_s=TEARDOWN_DEADLINE_S + spec.stop_grace_s)
        ray.kill(supervisor)
    _end_all(spec.namespace)


def _end_all(namespace: str) -> None:
    """Kill every named actor of the namespace, wait until none is left, and give back their places and
    what was kept for successors."""
    deadline = time.monotonic() + TEARDOWN_DEADLINE_S
    while left := _named_actors(namespace):
        if time.monotonic() > deadline:
            names = ", ".join(sorted(actor["name"] for actor in left))
            raise ServeError(f"still running after {TEARDOWN_DEADLINE_S:.0f} s: {names}")
        for actor in left:
            with suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=namespace))
        time.sleep(0.1)
    for group in groups_of(namespace).values():
        remove_placement_group(group)
    forget_wishes(namespace)


def _named_actors(namespace: str) -> list[dict[str, str]]:
    return [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]


def is_gone(namespace: str) -> bool:
    """The supervisor, and for good: one that is only started anew keeps its name."""
    try:
        ray.get_actor(SUPERVISOR, namespace=namespace)
    except ValueError:
        return True
    return False
