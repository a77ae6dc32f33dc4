"""Reconciles what a cluster is to be with what runs. A plain class: how actors are made is injected."""

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.actors.messages import EngineInfo, IngressInfo
from shoal.cluster.processes import Launcher
from shoal.cluster.stores import Stores
from shoal.cluster.watch import Watched
from shoal.kvstore.messages import StoreInfo

LEASE_TICKS = 30
"""The driver renews its lease far more often; a cluster whose driver is gone tears itself down. Counted in
ticks and not by the clock, so that a stalled supervisor does not take its own absence for the driver's.
"""

ADOPTION_DEADLINE_S = 5.0
"""What runs already says at once that it is ready. Who does not within this time is told of later."""

STOP_ANSWER_S = 3.0
"""An ingress says that it has stopped so soon after its grace, or is taken to hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    ingresses: tuple[IngressInfo | None, ...]
    engines: tuple[EngineInfo | None, ...]
    """One each that is wanted; None while it is not ready."""
    stores: tuple[StoreInfo, ...]
    """Of those that are ready: the cluster serves without them too."""
    failed: str | None
    """Why the cluster can never become ready, if so."""
    troubles: tuple[str, ...]
    """What failed and is being tried again."""

    @property
    def ready(self) -> bool:
        return all(self.ingresses) and all(self.engines)


class Supervisor:
    """Call `tick` every half second. Everything it tells the actors is told again each time, so that one
    that was replaced, or missed a call, knows it a tick later.

    One that takes over what an earlier one left tells nothing until it knows of all: an actor that hears of
    some alone drops what it has to do with the others.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        num_engines: int,
        num_ingresses: int = 1,
        with_stores: bool,
        stop_grace_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._stop_grace_s = stop_grace_s
        self._began = clock()
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
        self._ingresses = [
            Watched(partial(launcher.ingress, index), clock, launcher.adopt_ingress(index))
            for index in range(num_ingresses)
        ]
        self._stores = Stores(launcher, clock)
        self._with_stores = with_stores
        self._nodes: list[str | None] = [None] * num_engines
        """Where each engine was last known to be."""
        self._ticks_of_lease = LEASE_TICKS
        for surplus in adopted[num_engines:]:
            surplus.kill()

    @property
    def _members(self) -> dict[str, Watched[Any]]:
        ingresses = {f"ingress {index}": ingress for index, ingress in enumerate(self._ingresses)}
        engines = {f"engine {index}": engine for index, engine in enumerate(self._engines)}
        return {"router": self._router, **ingresses, **engines}

    def tick(self) -> None:
        self._ticks_of_lease -= 1
        for watched in self._members.values():
            watched.tick()
        self._tick_stores()
        if not self._is_taking_over:
            self._introduce()

    def renew_lease(self) -> None:
        self._ticks_of_lease = LEASE_TICKS

    @property
    def lease_expired(self) -> bool:
        return self._ticks_of_lease <= 0

    def status(self) -> ClusterStatus:
        return ClusterStatus(
            ingresses=tuple(ingress.info for ingress in self._ingresses),
            engines=tuple(engine.info for engine in self._engines),
            stores=tuple(info for info, _ in self._stores.ready.values()),
            failed=next((member.fatal for member in self._members.values() if member.fatal), None),
            troubles=tuple(f"{name}: {trouble}" for name, trouble in self._troubles().items()),
        )

    def teardown(self) -> None:
        """End every actor: the front doors first, so that nothing new comes in behind them."""
        grace_s = self._stop_grace_s
        stopping = [ingress.ready.stop(grace_s) for ingress in self._ingresses if ingress.ready]
        wait(stopping, timeout=grace_s + STOP_ANSWER_S)
        for watched in self._members.values():
            watched.kill()
        self._stores.kill()

    def _troubles(self) -> dict[str, str]:
        members = {name: member.trouble for name, member in self._members.items() if member.trouble}
        return members | {f"store on {node[:8]}": said for node, said in self._stores.troubles.items()}

    def _tick_stores(self) -> None:
        for index, engine in enumerate(self._engines):
            if engine.ready:
                self._nodes[index] = engine.info.node
        nodes = {node for node in self._nodes if node} if self._with_stores else set()
        self._stores.tick(nodes, all_are_known=all(self._nodes))

    @property
    def _is_taking_over(self) -> bool:
        if self._clock() - self._began > ADOPTION_DEADLINE_S:
            return False
        return self._stores.adopting or any(member.adopting for member in self._members.values())

    def _introduce(self) -> None:
        router = self._router.ready
        if router is None:
            return
        engines = [(engine.info, engine.ready) for engine in self._engines if engine.ready]
        ingresses = [(ingress.info, ingress.ready) for ingress in self._ingresses if ingress.ready]
        on_node = self._stores.ready
        router.set_members(engines, list(on_node.values()))
        for _, store in on_node.values():
            store.introduce(router)
        fingerprint = next((info.fingerprint for info, _ in engines), b"")
        by_id = {engine.process_id: engine for _, engine in engines}
        stores = {store.process_id: store for _, store in on_node.values()}
        for _, ingress in ingresses:
            ingress.introduce(router, by_id, stores, fingerprint)
        ingress_ids = frozenset(info.ingress_id for info, _ in ingresses)
        for info, engine in engines:
            own = on_node.get(info.node)
            engine.introduce(router, ingress_ids, stores, own[1].process_id if own else None)
