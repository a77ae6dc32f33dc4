"""Reconciles what a cluster is to be with what runs. A plain class: how actors are made is injected."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from shoal.actors.messages import EngineInfo, IngressId, IngressInfo
from shoal.cluster.watch import Process, Watched

LEASE_TICKS = 30
"""The driver renews its lease far more often; a cluster whose driver is gone tears itself down. Counted in
ticks and not by the clock, so that a stalled supervisor does not take its own absence for the driver's.
"""


class EngineProcess(Process, Protocol):
    def introduce(self, router: "RouterProcess", ingress_ids: frozenset[IngressId]) -> None: ...


class RouterProcess(Process, Protocol):
    def set_engines(self, engines: Mapping[str, EngineProcess]) -> None: ...


class IngressProcess(Process, Protocol):
    def introduce(
        self, router: RouterProcess, engines: Mapping[str, EngineProcess], fingerprint: bytes
    ) -> None: ...

    def stop(self) -> None:
        """Let open streams end within a short grace; returns when they have or the grace is over."""
        ...


class Launcher(Protocol):
    def engine(self, index: int) -> EngineProcess: ...

    def router(self) -> RouterProcess: ...

    def ingress(self) -> IngressProcess: ...

    def adopt_engines(self) -> Sequence[EngineProcess]:
        """Engines that an earlier supervisor left running."""
        ...

    def adopt_router(self) -> RouterProcess | None: ...

    def adopt_ingress(self) -> IngressProcess | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    ingress: IngressInfo | None
    engines: tuple[EngineInfo | None, ...]
    """One an engine wanted; None while it is not ready."""
    failed: str | None
    """Why the cluster can never become ready, if so."""
    troubles: tuple[str, ...]
    """What failed and is being tried again."""

    @property
    def ready(self) -> bool:
        return self.ingress is not None and all(self.engines)


class Supervisor:
    """Call `tick` every half second. Everything it tells the actors is told again each time, so that one
    that was replaced, or missed a call, knows it a tick later."""

    def __init__(self, launcher: Launcher, *, num_engines: int, clock: Callable[[], float]) -> None:
        adopted = launcher.adopt_engines()
        self._engines = [
            Watched(
                partial(launcher.engine, index),
                clock,
                adopted[index] if index < len(adopted) else None,
            )
            for index in range(num_engines)
        ]
        self._router = Watched(launcher.router, clock, launcher.adopt_router())
        self._ingress = Watched(launcher.ingress, clock, launcher.adopt_ingress())
        self._ticks_of_lease = LEASE_TICKS
        for surplus in adopted[num_engines:]:
            surplus.kill()

    @property
    def _members(self) -> dict[str, Watched[Any]]:
        engines = {f"engine {index}": engine for index, engine in enumerate(self._engines)}
        return {"router": self._router, "ingress": self._ingress, **engines}

    def tick(self) -> None:
        self._ticks_of_lease -= 1
        for watched in self._members.values():
            watched.tick()
        self._introduce()

    def renew_lease(self) -> None:
        self._ticks_of_lease = LEASE_TICKS

    @property
    def lease_expired(self) -> bool:
        return self._ticks_of_lease <= 0

    def status(self) -> ClusterStatus:
        return ClusterStatus(
            ingress=self._ingress.info,
            engines=tuple(engine.info for engine in self._engines),
            failed=next((member.fatal for member in self._members.values() if member.fatal), None),
            troubles=tuple(f"{name}: {w.trouble}" for name, w in self._members.items() if w.trouble),
        )

    def teardown(self) -> None:
        """End every actor: the front door first, so that nothing new comes in behind it."""
        if self._ingress.ready is not None:
            self._ingress.ready.stop()
        for watched in self._members.values():
            watched.kill()

    def _introduce(self) -> None:
        router, ingress = self._router.ready, self._ingress.ready
        engines = {engine.ready.process_id: engine.ready for engine in self._engines if engine.ready}
        if router is not None:
            router.set_engines(engines)
        if router is not None and ingress is not None:
            fingerprint = next((engine.info.fingerprint for engine in self._engines if engine.ready), b"")
            ingress.introduce(router, engines, fingerprint)
            for engine in engines.values():
                engine.introduce(router, frozenset({self._ingress.info.ingress_id}))
