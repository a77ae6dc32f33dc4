"""Makes the cluster's actors in Ray: detached, named in the cluster's namespace, found again by name."""

import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayTaskError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.actors.engine.actor import EngineActor
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineHealth,
    EngineId,
    EngineInfo,
    IngressAccount,
    IngressId,
)
from shoal.actors.router.actor import RouterActor
from shoal.cluster import node_files
from shoal.cluster.host_memory import store_budget
from shoal.cluster.processes import Doorway, EngineProcess, Introduction, RouterProcess, StoreProcess
from shoal.cluster.spec import ClusterSpec, DeploymentSpec, namespace_of, short
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.messages import StoreId, StoreInfo
from shoal.kvstore.sizes import format_size

ROUTER_PREFIX, INGRESS_PREFIX, ENGINE_PREFIX, STORE_PREFIX = "router-", "ingress-", "engine-", "store-"
NODE_ID_LABEL = "ray.io/node-id"


class RayProcess:
    """One actor. Every call returns at once; its outcome is a future."""

    def __init__(self, process_id: str, actor: Any, on_start: Callable[[], None]) -> None:
        self.process_id = process_id
        self.actor = actor
        self._on_start = on_start

    def start(self) -> Future[Any]:
        started = _then(self.actor.start.remote().future(), lambda info: info)
        started.add_done_callback(lambda _: self._on_start())
        return started

    def ping(self) -> Future[bool]:
        return _then(self.actor.ping.remote().future(), lambda _: True)

    def pulse(self) -> Future[Any]:
        return _then(self.actor.__ray_call__.remote(_say_nothing).future(), lambda said: said)

    def kill(self) -> None:
        ray.kill(self.actor)


class RayEngine(RayProcess):
    """In a placement group of its own: what waits for room there makes Ray's autoscaler add a node."""

    def __init__(
        self,
        process_id: str,
        actor: Any,
        on_start: Callable[[], None],
        group: PlacementGroup | None,
        is_placed: Callable[[PlacementGroup], bool],
    ) -> None:
        super().__init__(process_id, actor, on_start)
        self.health: EngineHealth | None = None
        self._group = group
        self._is_placed = is_placed

    def ping(self) -> Future[bool]:
        def healthy(health: EngineHealth) -> bool:
            self.health = health
            return not health.stalled

        return _then(self.actor.health.remote().future(), healthy)

    def pulse(self) -> Future[Any]:
        return _then(self.actor.doing.remote().future(), lambda doing: doing)

    def has_room(self) -> bool:
        return self._group is None or self._is_placed(self._group)

    def kill(self) -> None:
        super().kill()
        if self._group is not None:
            remove_placement_group(self._group)

    def introduce(
        self,
        router: RouterProcess,
        ingress_ids: frozenset[IngressId],
        stores: Mapping[str, StoreProcess],
        own_store: str | None,
    ) -> None:
        self.actor.introduce.remote(_actor(router), ingress_ids, _actors(stores), own_store)


class RayStore(RayProcess):
    def is_on(self, node: str) -> bool:
        return self.process_id.startswith(_store_prefix(node))

    def introduce(self, routers: Sequence[RouterProcess]) -> None:
        self.actor.introduce.remote([_actor(router) for router in routers])

    def evacuate(self, to: Sequence[StoreProcess]) -> Future[Any]:
        return _then(self.actor.evacuate.remote([_actor(store) for store in to]).future(), lambda _: None)


class RayRouter(RayProcess):
    def set_members(
        self,
        engines: Sequence[tuple[EngineInfo, EngineProcess]],
        stores: Sequence[tuple[StoreInfo, StoreProcess]],
    ) -> None:
        self.actor.set_members.remote(
            [(info, _actor(engine)) for info, engine in engines],
            [(info, _actor(store)) for info, store in stores],
        )


class RayIngress(RayProcess):
    def __init__(self, process_id: str, actor: Any, on_start: Callable[[], None]) -> None:
        super().__init__(process_id, actor, on_start)
        self.account: IngressAccount | None = None
        self._num_told = self._heard = 0

    def introduce(self, deployments: Sequence[Introduction], stores: Mapping[str, StoreProcess]) -> None:
        told = [(one.card, one.router and _actor(one.router), _actors(one.engines)) for one in deployments]
        supervisor = ray.get_runtime_context().current_actor
        self._num_told += 1
        answered = self.actor.introduce.remote(told, _actors(stores), supervisor).future()
        answered.add_done_callback(partial(self._hear, self._num_told))

    def _hear(self, number: int, answered: Future[IngressAccount]) -> None:
        """On any thread. Answers need not come in the order of the calls."""
        if number > self._heard and answered.exception() is None:
            self._heard, self.account = number, answered.result()

    def stop(self, grace_s: float) -> Future[Any]:
        return _then(self.actor.stop.remote(grace_s).future(), lambda _: None)


class RayLauncher:
    def __init__(self, name: str, kv_store_bytes: int | None, on_start: Callable[[], None]) -> None:
        """name: the cluster's. on_start: called on any thread when one of its processes has started, or
        cannot."""
        self._on_start = on_start
        self._namespace = namespace_of(name)
        self._labels = {"shoal_cluster": name}
        """Of the metrics of every process."""
        self._kv_store_bytes = kv_store_bytes
        self._leaving: frozenset[str] = frozenset()
        self._nodes: list[dict[str, Any]] = []
        """Those that lived when Ray was last asked,"""
        self._unplaced: set[str] = set()
        """and the placement groups that had no place yet."""

    def engine(self, deployment: DeploymentSpec, index: int) -> RayEngine:
        name = _new_name(f"{_engine_prefix(deployment)}{index}-")
        config, needs = deployment.engine, _needs(deployment)
        group = placement_group(
            [needs],
            name=f"{self._namespace}/{name}",
            lifetime="detached",
            bundle_label_selector=[{**deployment.labels, **self._elsewhere}],
        )
        self._unplaced.add(group.id.hex())
        options = {
            "num_cpus": config.threads,
            "memory": config.memory_bytes,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        try:
            args = (EngineId(name), config, self._of(deployment), node_files.whole)
            actor = self._launch(name, EngineActor, options, *args)
        except Exception:
            remove_placement_group(group)
            raise
        return RayEngine(name, actor, self._on_start, group, self._is_placed)

    def store(self, node: str) -> RayStore:
        name = _new_name(_store_prefix(node))
        budget = store_budget(self._kv_store_bytes, object_store_bytes().get(node, 0))
        options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        return RayStore(
            name, self._launch(name, StoreActor, options, StoreId(name), budget, self._labels), self._on_start
        )

    def router(self, deployment: DeploymentSpec) -> RayRouter:
        name = _router_name(deployment)
        args = (deployment.engine.block_size, deployment.routing_policy, self._of(deployment))
        return RayRouter(name, self._launch(name, RouterActor, self._beside_us, *args), self._on_start)

    def ingress(self, doorway: Doorway, models: Sequence[DeploymentCard], *, is_first: bool) -> RayIngress:
        options = self._beside_us
        if doorway.node:
            here = NodeAffinitySchedulingStrategy(doorway.node, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": here}
        args = (doorway.http, models, self._labels, node_files.without_weights, is_first)
        actor = self._launch(doorway.name, IngressActor, options, *args)
        return RayIngress(doorway.name, actor, self._on_start)

    def adopt_engines(self, deployment: DeploymentSpec) -> list[RayEngine]:
        groups = self._groups()
        self._unplaced |= {group.id.hex() for group in groups.values()}  # until we look
        found = self._find_all(_engine_prefix(deployment))
        return [
            RayEngine(name, actor, self._on_start, groups.get(name), self._is_placed)
            for name, actor in found.items()
        ]

    def adopt_router(self, deployment: DeploymentSpec) -> RayRouter | None:
        name = _router_name(deployment)
        actor = self._find(name)
        return None if actor is None else RayRouter(name, actor, self._on_start)

    def adopt_ingresses(self) -> dict[str, RayIngress]:
        return {
            name: RayIngress(name, actor, self._on_start)
            for name, actor in self._find_all(INGRESS_PREFIX).items()
        }

    def adopt_stores(self) -> list[RayStore]:
        return [RayStore(name, actor, self._on_start) for name, actor in self._find_all(STORE_PREFIX).items()]

    def end_others(self, known: Set[DeploymentId]) -> None:
        engines, routers = self._find_all(ENGINE_PREFIX), self._find_all(ROUTER_PREFIX)
        theirs = tuple(f"{ENGINE_PREFIX}{deployment_id}-" for deployment_id in known)
        for name, actor in engines.items():
            if not name.startswith(theirs):
                ray.kill(actor)
        for name, actor in routers.items():
            if name.removeprefix(ROUTER_PREFIX) not in known:
                ray.kill(actor)
        for name, group in self._groups().items():
            if name not in engines or not name.startswith(theirs):
                remove_placement_group(group)

    def doorways(self, spec: ClusterSpec) -> list[Doorway]:
        if not spec.ingress_labels:
            return [Doorway(name=f"{INGRESS_PREFIX}{i}", http=http) for i, http in enumerate(spec.http)]
        return [
            Doorway(name=f"{INGRESS_PREFIX}{short(node['NodeID'])}", http=spec.http[0], node=node["NodeID"])
            for node in self._nodes
            if spec.ingress_labels.items() <= node["Labels"].items()
        ]

    def look(self, leaving: Set[str]) -> None:
        self._leaving = frozenset(leaving)
        self._nodes = nodes()
        if self._unplaced:
            table: dict[str, dict[str, Any]] = placement_group_table()
            waiting = {i for i, group in table.items() if group["state"] not in {"CREATED", "REMOVED"}}
            self._unplaced &= waiting

    @property
    def nodes(self) -> list[str]:
        return [node["NodeID"] for node in self._nodes]

    def lacking(self, deployment: DeploymentSpec) -> str:
        able = [n for n in self._nodes if deployment.labels.items() <= n["Labels"].items()]
        able = [node for node in able if node["NodeID"] not in self._leaving]
        if not able:
            labels = ", ".join(f"{key}={value}" for key, value in deployment.labels.items())
            return f"no node is labelled {labels}" if labels else "no node may host it"
        for what, amount in _needs(deployment).items():
            largest = max(node["Resources"].get(what, 0) for node in able)
            if largest < amount:
                return f"needs {_said(what, amount)}, and the largest node has {_said(what, largest)}"
        needs = " and ".join(_said(what, amount) for what, amount in _needs(deployment).items())
        return f"waits for a node that has {needs} free"

    def _is_placed(self, group: PlacementGroup) -> bool:
        """As of the latest look: to ask for each that waits would cost a call each."""
        return group.id.hex() not in self._unplaced

    def _of(self, deployment: DeploymentSpec) -> dict[str, str]:
        """Labels of the metrics of those that serve one model."""
        return {**self._labels, "model_name": deployment.model.name}

    @property
    def _beside_us(self) -> dict[str, Any]:
        """On the supervisor's node while that lives: one that hosts nothing but engines and their store can
        be given back when these have gone."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return {"num_cpus": 0, "scheduling_strategy": here}

    @property
    def _elsewhere(self) -> dict[str, str]:
        return {NODE_ID_LABEL: f"!in({','.join(sorted(self._leaving))})"} if self._leaving else {}

    def _launch(self, name: str, actor_class: type, options: Mapping[str, Any], *args: Any) -> Any:
        # The supervisor decides about restarts, so Ray makes none.
        return (
            ray.remote(actor_class)
            .options(name=name, namespace=self._namespace, lifetime="detached", max_restarts=0, **options)
            .remote(*args)
        )

    def _find_all(self, prefix: str) -> dict[str, Any]:
        named = list_named_actors(all_namespaces=True)
        names = sorted(actor["name"] for actor in named if actor["namespace"] == self._namespace)
        actors = {name: self._find(name) for name in names if name.startswith(prefix)}
        return {name: actor for name, actor in actors.items() if actor is not None}

    def _find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:  # never there, or gone since it was listed
            return None

    def _groups(self) -> dict[str, PlacementGroup]:
        return groups_of(self._namespace)


def groups_of(namespace: str) -> dict[str, PlacementGroup]:
    """Its engines' placement groups, by the names of the engines."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return {
        group["name"].removeprefix(f"{namespace}/"): PlacementGroup(PlacementGroupID.from_hex(group_id))
        for group_id, group in table.items()
        if group["name"].startswith(f"{namespace}/") and group["state"] != "REMOVED"
    }


def nodes() -> list[dict[str, Any]]:
    """Of this Ray, those that live."""
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in known if node["Alive"]]


def _needs(deployment: DeploymentSpec) -> dict[str, float]:
    return {"CPU": deployment.engine.threads, "memory": deployment.engine.memory_bytes}


def _said(what: str, amount: float) -> str:
    return f"{format_size(int(amount))} of memory" if what == "memory" else f"{amount:g} {what}"


def object_store_bytes() -> dict[str, int]:
    """Of each node of this Ray that lives, by its id."""
    return {node["NodeID"]: int(node["Resources"].get("object_store_memory", 0)) for node in nodes()}


def _new_name(prefix: str) -> str:
    """Another each time: an id never means two processes, so nothing stale can be taken for news."""
    return f"{prefix}{uuid.uuid4().hex[:4]}"


def _engine_prefix(deployment: DeploymentSpec) -> str:
    return f"{ENGINE_PREFIX}{deployment.deployment_id}-"


def _router_name(deployment: DeploymentSpec) -> str:
    return f"{ROUTER_PREFIX}{deployment.deployment_id}"


def _store_prefix(node: str) -> str:
    return f"{STORE_PREFIX}{short(node)}-"


def _actor(process: Any) -> Any:
    return process.actor


def _actors(processes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: process.actor for name, process in processes.items()}


def _say_nothing(_: object) -> None:
    pass


def _then(future: Future[Any], convert: Callable[[Any], Any]) -> Future[Any]:
    """What `future` gives, converted; a ValueError from the actor as itself, without its remote trace."""
    converted: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            converted.set_result(convert(done.result()))
        elif isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
            converted.set_exception(ValueError(str(error.cause)))
        else:
            converted.set_exception(error)

    future.add_done_callback(settle)
    return converted
