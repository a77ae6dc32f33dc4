"""The supervisor's process: a thread that ticks, and the calls a driver makes."""

import logging
import os
import threading
import time

import ray

from shoal.cluster.launcher import RayLauncher
from shoal.cluster.spec import ClusterSpec
from shoal.cluster.supervisor import ClusterStatus, Supervisor

logger = logging.getLogger(__name__)

TICK_S = 0.5
SUPERVISOR = "supervisor"


class SupervisorActor:
    """Ray restarts it after a crash; it then adopts the actors it finds by name."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._lock = threading.Lock()
        self._supervisor = Supervisor(
            RayLauncher(spec),
            num_engines=spec.num_engines,
            num_ingresses=spec.num_ingresses,
            with_stores=spec.kv_store_bytes != 0,
            stop_grace_s=spec.stop_grace_s,
            clock=time.monotonic,
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return "Supervisor"

    def status(self) -> ClusterStatus:
        with self._lock:
            return self._supervisor.status()

    def renew_lease(self) -> None:
        with self._lock:
            self._supervisor.renew_lease()

    def teardown(self) -> None:
        """End every actor but this one; returns when they are told to."""
        self._stopped.set()
        with self._lock:
            self._supervisor.teardown()

    def _run(self) -> None:
        try:
            self._tick()
            while not self._stopped.wait(TICK_S):
                self._tick()
        except BaseException:
            logger.critical("supervisor broken; ending the process for Ray to restart it", exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _tick(self) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._supervisor.tick()
            expired = self._supervisor.lease_expired
        if expired:
            self.teardown()
            ray.kill(ray.get_runtime_context().current_actor)
