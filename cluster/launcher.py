"""Makes the cluster's actors in Ray: detached, named in the cluster's namespace, found again by name."""

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import list_named_actors

from shoal.actors.engine.actor import EngineActor
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import EngineHealth, EngineId, IngressId
from shoal.actors.router.actor import RouterActor
from shoal.cluster.spec import ClusterSpec
from shoal.cluster.supervisor import EngineProcess, RouterProcess

STOP_GRACE_S = 3.0
"""How long open streams may go on when the cluster is stopped."""

ROUTER, INGRESS, ENGINE_PREFIX = "router", "ingress", "engine-"


class RayProcess:
    """One actor. Every call returns at once; its outcome is a future."""

    def __init__(self, process_id: str, actor: Any) -> None:
        self.process_id = process_id
        self.actor = actor

    def start(self) -> Future[Any]:
        return _then(self.actor.start.remote().future(), lambda info: info)

    def ping(self) -> Future[bool]:
        return _then(self.actor.ping.remote().future(), lambda _: True)

    def kill(self) -> None:
        ray.kill(self.actor)


class RayEngine(RayProcess):
    def ping(self) -> Future[bool]:
        def healthy(health: EngineHealth) -> bool:
            return not health.stalled

        return _then(self.actor.health.remote().future(), healthy)

    def introduce(self, router: RouterProcess, ingress_ids: frozenset[IngressId]) -> None:
        self.actor.introduce.remote(_actor(router), ingress_ids)


class RayRouter(RayProcess):
    def set_engines(self, engines: Mapping[str, EngineProcess]) -> None:
        self.actor.set_engines.remote({name: _actor(engine) for name, engine in engines.items()})


class RayIngress(RayProcess):
    def introduce(
        self, router: RouterProcess, engines: Mapping[str, EngineProcess], fingerprint: bytes
    ) -> None:
        actors = {name: _actor(engine) for name, engine in engines.items()}
        self.actor.introduce.remote(_actor(router), actors, fingerprint)

    def stop(self) -> None:
        ray.wait([self.actor.stop.remote(STOP_GRACE_S)], timeout=2 * STOP_GRACE_S)


class RayLauncher:
    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec

    def engine(self, index: int) -> RayEngine:
        # A new name each time: an id never means two processes, so nothing stale can be taken for news.
        name = f"{ENGINE_PREFIX}{index}-{uuid.uuid4().hex[:4]}"
        config = self._spec.engine
        options = {"num_cpus": config.threads, "memory": config.memory_bytes}
        return RayEngine(name, self._launch(name, EngineActor, options, EngineId(name), config))

    def router(self) -> RayRouter:
        block_size = self._spec.engine.block_size
        return RayRouter(ROUTER, self._launch(ROUTER, RouterActor, {"num_cpus": 0}, block_size))

    def ingress(self) -> RayIngress:
        options = {"num_cpus": 0}
        return RayIngress(
            INGRESS, self._launch(INGRESS, IngressActor, options, self._spec.model, self._spec.http)
        )

    def adopt_engines(self) -> list[RayEngine]:
        names = sorted(name for name in self._names() if name.startswith(ENGINE_PREFIX))
        return [RayEngine(name, actor) for name in names if (actor := self._find(name)) is not None]

    def adopt_router(self) -> RayRouter | None:
        actor = self._find(ROUTER)
        return None if actor is None else RayRouter(ROUTER, actor)

    def adopt_ingress(self) -> RayIngress | None:
        actor = self._find(INGRESS)
        return None if actor is None else RayIngress(INGRESS, actor)

    def _launch(self, name: str, actor_class: type, options: Mapping[str, float], *args: Any) -> Any:
        # The supervisor decides about restarts, so Ray makes none.
        return (
            ray.remote(actor_class)
            .options(
                name=name, namespace=self._spec.namespace, lifetime="detached", max_restarts=0, **options
            )
            .remote(*args)
        )

    def _names(self) -> set[str]:
        named = list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in named if actor["namespace"] == self._spec.namespace}

    def _find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, namespace=self._spec.namespace)
        except ValueError:  # never there, or gone since it was listed
            return None


def _actor(process: Any) -> Any:
    return process.actor


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
