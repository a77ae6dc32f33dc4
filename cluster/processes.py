"""The actors as the supervisor sees them, and who makes them: every call of theirs returns at once."""

from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineHealth,
    EngineInfo,
    HttpConfig,
    IngressAccount,
    IngressId,
)
from shoal.cluster.spec import ClusterSpec, DeploymentSpec
from shoal.cluster.watch import Process
from shoal.kvstore.messages import StoreInfo


class RouterProcess(Process, Protocol):
    def set_members(
        self,
        engines: Sequence[tuple[EngineInfo, "EngineProcess"]],
        stores: Sequence[tuple[StoreInfo, "StoreProcess"]],
    ) -> None: ...


class EngineProcess(Process, Protocol):
    @property
    def health(self) -> EngineHealth | None:
        """What it said to the last ping that it answered."""
        ...

    def has_room(self) -> bool:
        """Whether a node has given it what it needs."""
        ...

    def introduce(
        self,
        router: RouterProcess,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[str, "StoreProcess"],
        own_store: str | None,
    ) -> None: ...


class StoreProcess(Process, Protocol):
    def is_on(self, node: str) -> bool: ...

    def introduce(self, routers: Sequence[RouterProcess]) -> None: ...

    def evacuate(self, to: Sequence["StoreProcess"]) -> Future[Any]:
        """Give these what it has; done when they have it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One deployment, to an ingress."""

    card: DeploymentCard
    router: RouterProcess | None
    engines: Mapping[str, EngineProcess]


class IngressProcess(Process, Protocol):
    @property
    def account(self) -> IngressAccount | None:
        """What it said to the latest introduction that it answered."""
        ...

    def introduce(self, deployments: Sequence[Introduction], stores: Mapping[str, StoreProcess]) -> None: ...

    def stop(self, grace_s: float) -> Future[Any]:
        """Let open streams go on for so long; done when they have ended or it is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorway:
    """Where an ingress is to be: what it is called there, and on which node, if it is not all the same."""

    name: str
    http: HttpConfig
    node: str | None = None


class Launcher(Protocol):
    def engine(self, deployment: DeploymentSpec, index: int) -> EngineProcess: ...

    def router(self, deployment: DeploymentSpec) -> RouterProcess: ...

    def ingress(
        self, doorway: Doorway, models: Sequence[DeploymentCard], *, is_first: bool
    ) -> IngressProcess:
        """is_first: none of the cluster's has listened yet, so a tokenizer that it cannot read is a mistake
        of the whole. Later it costs that model alone."""
        ...

    def store(self, node: str) -> StoreProcess: ...

    def adopt_engines(self, deployment: DeploymentSpec) -> Sequence[EngineProcess]:
        """Engines that an earlier supervisor left running."""
        ...

    def adopt_router(self, deployment: DeploymentSpec) -> RouterProcess | None: ...

    def adopt_ingresses(self) -> Mapping[str, IngressProcess]:
        """By what they are called."""
        ...

    def adopt_stores(self) -> Sequence[StoreProcess]: ...

    def end_others(self, known: Set[DeploymentId]) -> None:
        """Whatever was left of deployments that nobody knows of."""
        ...

    def doorways(self, spec: ClusterSpec) -> Sequence[Doorway]:
        """Where ingresses are to be now."""
        ...

    def look(self, leaving: Set[str]) -> None:
        """See which nodes there are; nothing is to be started on those that are to be left."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """Those that live, as of the latest `look`."""
        ...

    def lacking(self, deployment: DeploymentSpec) -> str:
        """Why an engine of it waits for room: what no node has, or none has free."""
        ...
