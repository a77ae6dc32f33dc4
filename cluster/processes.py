"""The actors as the supervisor sees them, and who makes them: every call of theirs returns at once."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from shoal.actors.messages import EngineInfo, IngressId
from shoal.cluster.watch import Process
from shoal.kvstore.messages import StoreInfo


class RouterProcess(Process, Protocol):
    def set_members(
        self,
        engines: Sequence[tuple[EngineInfo, "EngineProcess"]],
        stores: Sequence[tuple[StoreInfo, "StoreProcess"]],
    ) -> None: ...


class EngineProcess(Process, Protocol):
    def introduce(
        self,
        router: RouterProcess,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[str, "StoreProcess"],
        own_store: str | None,
    ) -> None: ...


class StoreProcess(Process, Protocol):
    def is_on(self, node: str) -> bool: ...

    def introduce(self, router: RouterProcess) -> None: ...


class IngressProcess(Process, Protocol):
    def introduce(
        self,
        router: RouterProcess,
        engines: Mapping[str, EngineProcess],
        stores: Mapping[str, StoreProcess],
        fingerprint: bytes,
    ) -> None: ...

    def stop(self, grace_s: float) -> Future[Any]:
        """Let open streams end; done when they have or the grace is over."""
        ...


class Launcher(Protocol):
    def engine(self, index: int) -> EngineProcess: ...

    def router(self) -> RouterProcess: ...

    def ingress(self, index: int) -> IngressProcess: ...

    def store(self, node: str) -> StoreProcess: ...

    def adopt_engines(self) -> Sequence[EngineProcess]:
        """Engines that an earlier supervisor left running."""
        ...

    def adopt_router(self) -> RouterProcess | None: ...

    def adopt_ingress(self, index: int) -> IngressProcess | None: ...

    def adopt_stores(self) -> Sequence[StoreProcess]: ...
