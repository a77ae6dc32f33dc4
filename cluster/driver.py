"""What the driver does while its cluster runs: keeps the lease, and tells the operator what happens."""

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from rich.console import Console

from shoal.cluster.console import PLAIN
from shoal.cluster.lifecycle import ServeError, call, is_gone
from shoal.cluster.spec import ClusterSpec
from shoal.cluster.start_time import StartTime
from shoal.cluster.supervisor import ClusterStatus
from shoal.cluster.watch import last_line
from shoal.kvstore.messages import StoreId
from shoal.kvstore.sizes import format_size

POLL_S = 0.5
DOING_S = 10.0
"""How often the operator is told how far a start is."""
STARTING_POLL_S = 0.1
SILENCE_DEADLINE_S = 60.0
HANG_DEADLINE_S = 15.0
"""A supervisor that does not answer for so long is ended, and Ray starts it anew."""


class Account:
    """What the operator is told: each thing once, and how long the start took."""

    def __init__(
        self,
        spec: ClusterSpec,
        dashboard_url: str | None,
        took: StartTime,
        console: Console,
        on_ready: Callable[[ClusterStatus], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.was_ready = False
        self._clock = clock
        self._spec = spec
        self._dashboard_url = dashboard_url
        self._took = took
        self._console = console
        self._on_ready = on_ready
        self._troubles: tuple[str, ...] = ()
        self._stores: set[StoreId] = set()
        self._doing: dict[str, tuple[str, float]] = {}
        """By engine, what was last told of its start, and when."""

    def say(self, line: str) -> None:
        self._console.print(line, **PLAIN)

    def take(self, status: ClusterStatus) -> None:
        for trouble in status.troubles:
            if trouble not in self._troubles:
                self.say(f"{trouble}; trying again")
        self._troubles = status.troubles
        for store in status.stores:
            if store.store_id not in self._stores:
                self._stores.add(store.store_id)
                self.say(f"{store.store_id}: {format_size(store.budget_bytes)} of host memory for prefixes")
        self._take_starts(status)
        if self.was_ready:
            return
        if status.has_all_engines and status.engines:
            self._took.until_engines(status.engines)
        if status.ready:
            self.was_ready = True
            self._took.until_here("front door")
            self._announce(status)
            self._on_ready(status)

    def _take_starts(self, status: ClusterStatus) -> None:
        """What the engines that start are at. A start of a few seconds is no news."""
        now, doing = self._clock(), {}
        for deployment in status.deployments:
            for engine in deployment.engines:
                if engine.doing:
                    name = f"engine {engine.index} of {deployment.model}"
                    before, told_at = self._doing.get(name, ("", now))
                    if engine.doing != before and now - told_at >= DOING_S:
                        self.say(f"{name}: {engine.doing}")
                        before, told_at = engine.doing, now
                    doing[name] = before, told_at
        self._doing = doing

    def _announce(self, status: ClusterStatus) -> None:
        for engine in status.engines:
            self.say(f"{engine.engine_id}: {engine.backend}, {engine.memory}")
        if self._dashboard_url:
            self.say(f"Ray dashboard: http://{self._dashboard_url}")
        for model in (deployment.model for deployment in self._spec.deployments):
            self.say(f"model: {model.name} (context {model.max_model_len})")
        self.say(self._took.describe())
        for ingress in status.ingresses:
            if ingress is not None:
                self._console.print(f"ready: {ingress.url}/v1", style="bold green", **PLAIN)


def watch(
    supervisor: Any, namespace: str, stop: threading.Event, account: Account, *, until_ready: bool
) -> None:
    """Renew the lease until told to stop, or somebody else has ended the cluster, or `until_ready`. Raises
    ServeError when it can never be ready, or its supervisor is silent for good.

    A supervisor that died is restarted by Ray and adopts what runs: a silence is waited out for a while. One
    that hangs is made to die.
    """
    has_spoken, heard = False, time.monotonic()
    waiting_since = heard
    while not stop.wait(POLL_S if account.was_ready else STARTING_POLL_S):
        try:
            call(supervisor.renew_lease)
            status: ClusterStatus = call(supervisor.status)
        except (RayError, GetTimeoutError) as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise ServeError(f"the supervisor cannot begin: {last_line(error)}") from error
            if has_spoken and is_gone(namespace):
                account.say("somebody has stopped the cluster")
                return
            now = time.monotonic()
            if now - heard > SILENCE_DEADLINE_S:
                raise ServeError(
                    f"the supervisor is silent for {SILENCE_DEADLINE_S:.0f} s: {last_line(error)}"
                ) from error
            if now - waiting_since > HANG_DEADLINE_S and has_spoken and isinstance(error, GetTimeoutError):
                account.say("the supervisor hangs; ending it")
                ray.kill(supervisor, no_restart=False)
                waiting_since = now  # its successor has as long
            continue
        has_spoken, heard = True, time.monotonic()
        waiting_since = heard
        if status.failed:
            raise ServeError(status.failed)
        account.take(status)
        if account.was_ready and until_ready:
            return
