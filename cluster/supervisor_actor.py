"""The supervisor's process: a thread that ticks, and the calls that a driver and the front doors make."""

import logging
import os
import threading
import time
from typing import Any

import ray
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
)

from shoal.cluster.kept import OtherVersion, read, written
from shoal.cluster.launcher import RayLauncher
from shoal.cluster.spec import ClusterSpec, namespace_of
from shoal.cluster.status import as_dict
from shoal.cluster.supervisor import ClusterStatus, Supervisor, Wish
from shoal.cluster.supervisor_metrics import supervisor_metrics
from shoal.kvstore.metrics import METRICS_INTERVAL_S, Metrics, name_for_people

logger = logging.getLogger(__name__)

TICK_S = 0.5
SUPERVISOR = "supervisor"


class SupervisorActor:
    """Ray restarts it after a crash; it then adopts the actors it finds by name.

    What it was told since it was made is kept by Ray's control store, which outlives it: its successor is
    made by the arguments of the first.
    """

    def __init__(self, begun_with: bytes) -> None:
        """begun_with: what it is told first, written. Raises OtherVersion: Ray starts it anew by whatever is
        installed by then, and to misread a cluster is worse than to leave it alone."""
        try:
            given = read(begun_with)
            self._kept = _KeptWish(given.spec.name)
            wish = self._kept.read() or given
        except OtherVersion as error:
            logger.critical("%s", error)
            raise
        spec = wish.spec
        self._name = spec.name
        self._lock = threading.Lock()
        self._started = threading.Event()  # somebody has; who waits for that need not wait for the next tick
        launcher = RayLauncher(spec.name, spec.kv_store_bytes, on_start=self._started.set)
        self._supervisor = Supervisor(wish, launcher, clock=time.monotonic)
        self._labels = spec.labels
        self._stopped = threading.Event()
        for name, run in (("supervisor", self._run), ("supervisor-metrics", self._publish_metrics)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def __repr__(self) -> str:
        return name_for_people(SUPERVISOR, self._labels)

    def status(self) -> ClusterStatus:
        with self._lock:
            return self._supervisor.status()

    def describe(self) -> dict[str, Any]:
        """The same in plain words, for those who know nothing of our types."""
        return as_dict(self._name, self.status())

    def wish(self) -> bytes:
        """What it is to be, written: whoever asks may be of another version."""
        with self._lock:
            return written(self._supervisor.wish)

    def renew_lease(self) -> None:
        with self._lock:
            self._supervisor.renew_lease()

    def apply(self, spec: ClusterSpec) -> None:
        """Become this without a break. Raises ValueError for what cannot be changed while it runs."""
        with self._lock:
            self._supervisor.apply(spec)
            self._keep()

    def scale(self, model: str | None, num_engines: int) -> None:
        """Raises ValueError."""
        with self._lock:
            self._supervisor.scale(model, num_engines)
            self._keep()

    def drain_node(self, node: str) -> None:
        """Raises ValueError."""
        with self._lock:
            self._supervisor.drain_node(node)
            self._keep()

    def undrain_node(self, node: str) -> None:
        """Raises ValueError."""
        with self._lock:
            self._supervisor.undrain_node(node)
            self._keep()

    def drain_engine(self, engine: str) -> None:
        """Raises ValueError."""
        with self._lock:
            self._supervisor.drain_engine(engine)
            self._keep()

    def stop(self) -> None:
        """End the cluster, this process too; returns at once."""
        with self._lock:
            self._supervisor.stop()
            self._keep()

    def teardown(self) -> None:
        """End every actor but this one; returns when they are told to."""
        self._stopped.set()
        with self._lock:
            self._supervisor.teardown()
            self._kept.forget()

    def _keep(self) -> None:
        if not self._stopped.is_set():  # what was asked for meanwhile has no successor
            self._kept.write(self._supervisor.wish)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._tick()
                due = time.monotonic() + TICK_S
                while self._started.wait(due - time.monotonic()):
                    self._started.clear()
                    self._tick(early=True)
        except BaseException:
            logger.critical("supervisor broken; ending the process for Ray to restart it", exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _publish_metrics(self) -> None:
        """On a thread of its own: no fault in telling numbers is to end those who serve."""
        metrics = Metrics(SUPERVISOR, self._labels)
        while not self._stopped.wait(METRICS_INTERVAL_S):
            with self._lock:
                families = list(supervisor_metrics(self._supervisor))
            metrics.tell(families)

    def _tick(self, *, early: bool = False) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            before = self._supervisor.wish
            self._supervisor.tick(early=early)
            if self._supervisor.wish != before:
                self._keep()
            ends = self._supervisor.is_to_end
        if ends:
            self.teardown()
            ray.kill(ray.get_runtime_context().current_actor)


class _KeptWish:
    """Under the actor's id, which is the same after a restart, and no other cluster's of that name."""

    def __init__(self, name: str) -> None:
        actor_id = ray.get_runtime_context().get_actor_id()
        self._key = f"{namespace_of(name)}/{actor_id}/wish".encode()

    def read(self) -> Wish | None:
        """Raises OtherVersion."""
        kept = _internal_kv_get(self._key, namespace=b"shoal")
        return None if kept is None else read(kept)

    def write(self, wish: Wish) -> None:
        _internal_kv_put(self._key, written(wish), namespace=b"shoal")

    def forget(self) -> None:
        _internal_kv_del(self._key, namespace=b"shoal")


def forget_wishes(namespace: str) -> None:
    """Of supervisors there that are no more, and were ended before they could do so themselves."""
    _internal_kv_del(f"{namespace}/".encode(), del_by_prefix=True, namespace=b"shoal")
