"""Makes the cluster's actors in Ray: detached, named in the cluster's namespace, found again by name."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.actors.engine.actor import EngineActor
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import EngineHealth, EngineId, EngineInfo, IngressId
from shoal.actors.router.actor import RouterActor
from shoal.cluster.host_memory import store_budget
from shoal.cluster.processes import EngineProcess, RouterProcess, StoreProcess
from shoal.cluster.spec import ClusterSpec
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.messages import StoreId, StoreInfo

ROUTER, INGRESS_PREFIX, ENGINE_PREFIX, STORE_PREFIX = "router", "ingress-", "engine-", "store-"


class RayProcess:
    """One actor. Every call returns at once; its outcome is a future."""

    def __init__(self, process_id: str, actor: Any) -> None:
        self.process_id = process_id
        self.actor = actor

    def start(self) -> Future[Any]:
        return _then(self.actor.start.remote().future(), lambda info: info)

    def ping(self) -> Future[bool]:
        return _then(self.actor.ping.remote().future(), lambda _: True)

    def pulse(self) -> Future[Any]:
        return _then(self.actor.__ray_call__.remote(_say_nothing).future(), lambda said: said)

    def kill(self) -> None:
        ray.kill(self.actor)


class RayEngine(RayProcess):
    def ping(self) -> Future[bool]:
        def healthy(health: EngineHealth) -> bool:
            return not health.stalled

        return _then(self.actor.health.remote().future(), healthy)

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

    def introduce(self, router: RouterProcess) -> None:
        self.actor.introduce.remote(_actor(router))


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
    def introduce(
        self,
        router: RouterProcess,
        engines: Mapping[str, EngineProcess],
        stores: Mapping[str, StoreProcess],
        fingerprint: bytes,
    ) -> None:
        self.actor.introduce.remote(_actor(router), _actors(engines), _actors(stores), fingerprint)

    def stop(self, grace_s: float) -> Future[Any]:
        return _then(self.actor.stop.remote(grace_s).future(), lambda _: None)


class RayLauncher:
    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec

    def engine(self, index: int) -> RayEngine:
        name = _new_name(f"{ENGINE_PREFIX}{index}-")
        config = self._spec.engine
        options = {"num_cpus": config.threads, "memory": config.memory_bytes}
        return RayEngine(name, self._launch(name, EngineActor, options, EngineId(name), config))

    def store(self, node: str) -> RayStore:
        name = _new_name(_store_prefix(node))
        budget = store_budget(self._spec.kv_store_bytes, object_store_bytes().get(node, 0))
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here}
        return RayStore(name, self._launch(name, StoreActor, options, StoreId(name), budget))

    def router(self) -> RayRouter:
        args = (self._spec.engine.block_size, self._spec.routing_policy)
        return RayRouter(ROUTER, self._launch(ROUTER, RouterActor, {"num_cpus": 0}, *args))

    def ingress(self, index: int) -> RayIngress:
        name, http = f"{INGRESS_PREFIX}{index}", self._spec.http[index]
        return RayIngress(name, self._launch(name, IngressActor, {"num_cpus": 0}, self._spec.model, http))

    def adopt_engines(self) -> list[RayEngine]:
        return [RayEngine(name, actor) for name, actor in self._find_all(ENGINE_PREFIX)]

    def adopt_router(self) -> RayRouter | None:
        actor = self._find(ROUTER)
        return None if actor is None else RayRouter(ROUTER, actor)

    def adopt_ingress(self, index: int) -> RayIngress | None:
        name = f"{INGRESS_PREFIX}{index}"
        actor = self._find(name)
        return None if actor is None else RayIngress(name, actor)

    def adopt_stores(self) -> list[RayStore]:
        return [RayStore(name, actor) for name, actor in self._find_all(STORE_PREFIX)]

    def _launch(self, name: str, actor_class: type, options: Mapping[str, Any], *args: Any) -> Any:
        # The supervisor decides about restarts, so Ray makes none.
        return (
            ray.remote(actor_class)
            .options(
                name=name, namespace=self._spec.namespace, lifetime="detached", max_restarts=0, **options
            )
            .remote(*args)
        )

    def _find_all(self, prefix: str) -> list[tuple[str, Any]]:
        named = list_named_actors(all_namespaces=True)
        names = sorted(actor["name"] for actor in named if actor["namespace"] == self._spec.namespace)
        actors = {name: self._find(name) for name in names if name.startswith(prefix)}
        return [(name, actor) for name, actor in actors.items() if actor is not None]

    def _find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, namespace=self._spec.namespace)
        except ValueError:  # never there, or gone since it was listed
            return None


def object_store_bytes() -> dict[str, int]:
    """Of each node of this Ray that lives, by its id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {
        node["NodeID"]: int(node["Resources"].get("object_store_memory", 0))
        for node in nodes
        if node["Alive"]
    }


def _new_name(prefix: str) -> str:
    """Another each time: an id never means two processes, so nothing stale can be taken for news."""
    return f"{prefix}{uuid.uuid4().hex[:4]}"


def _store_prefix(node: str) -> str:
    return f"{STORE_PREFIX}{node[:8]}-"


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
