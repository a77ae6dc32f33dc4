"""Reconciles what a cluster is to be with what runs. A plain class: how actors are made is injected."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace

from shoal.actors.messages import DeploymentCard, DeploymentId, EngineId, EngineInfo, IngressInfo
from shoal.cluster.deployment import Deployment, EngineStatus, Phase, engines_by_node
from shoal.cluster.ingresses import Ingresses
from shoal.cluster.mishaps import Mishaps
from shoal.cluster.processes import Introduction, Launcher
from shoal.cluster.roll import allowed
from shoal.cluster.spec import ClusterSpec, DeploymentSpec
from shoal.cluster.stores import Stores
from shoal.kvstore.families import Role
from shoal.kvstore.messages import StoreInfo

LEASE_TICKS = 30
"""The driver renews its lease far more often; a cluster whose driver is gone tears itself down. Counted in
ticks and not by the clock, so that a stalled supervisor does not take its own absence for the driver's.
"""

ADOPTION_DEADLINE_S = 5.0
"""What runs already says at once that it is ready. Who does not within this time is told of later."""

GONE_S = 60.0
"""A node that is to be left and has not been among Ray's for so long has been left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a supervisor was told, all of it: its successor begins with this."""

    spec: ClusterSpec
    outgoing: tuple[DeploymentSpec, ...] = ()
    """Deployments that others take the place of."""
    leaving: frozenset[str] = frozenset()
    """Nodes on which nothing is to stay."""
    leaving_engines: frozenset[EngineId] = frozenset()
    """Engines that are to go when others have come in their place."""
    served: frozenset[DeploymentId] = frozenset()
    """Deployments that have had a ready engine: whatever fails there is no mistake of the whole."""
    is_stopped: bool = False
    """It is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStatus:
    deployment_id: DeploymentId
    model: str
    is_outgoing: bool
    wanted: int
    engines: tuple[EngineStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    ingresses: tuple[IngressInfo | None, ...]
    """One each that is wanted; None while it is not ready."""
    deployments: tuple[DeploymentStatus, ...]
    stores: tuple[StoreInfo, ...]
    """Of those that are ready: the cluster serves without them too."""
    leaving: frozenset[str]
    """Nodes,"""
    leaving_engines: frozenset[EngineId]
    """and engines."""
    ready: bool
    """It has all engines, and every ingress listens and knows one of each model."""
    failed: str | None
    """Why the cluster can never become ready, if so."""
    troubles: tuple[str, ...]
    """What failed and is being tried again, and what waits for room."""

    has_all_engines: bool
    """Every model has an engine for each that is wanted."""

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """Those that are ready, or draining."""
        return tuple(e.info for deployment in self.deployments for e in deployment.engines if e.info)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCounts:
    wanted: int
    ready: int
    failures: int
    """Since the supervisor began."""


class Supervisor:
    """Call `tick` every half second. Everything it tells the actors is told again each time, so that one
    that was replaced, or missed a call, knows it a tick later.

    One that takes over what an earlier one left tells nothing until it knows of all: an actor that hears of
    some alone drops what it has to do with the others. Until then it ends nothing either: what has not said
    yet that it is ready may serve.
    """

    def __init__(self, wish: Wish, launcher: Launcher, *, clock: Callable[[], float]) -> None:
        self.wish = wish
        self._launcher = launcher
        self._clock = clock
        self._mishaps = Mishaps()
        self._began = clock()
        self._deployments: dict[DeploymentId, Deployment] = {}
        for spec in (*wish.spec.deployments, *wish.outgoing):
            self._deployments[spec.deployment_id] = self._deploy(spec)
        for current in self._current:
            self._begin(current)
        launcher.end_others(self._deployments.keys())
        self._ingresses = Ingresses(launcher, clock, self._mishaps)
        self._stores = Stores(launcher, clock, self._mishaps)
        self._ticks_of_lease = LEASE_TICKS
        self._last_seen: dict[str, float] = {}
        """When a node that is to be left was among Ray's."""
        self._num_failures_gone = 0  # of engines of deployments that are no more

    def tick(self, *, early: bool = False) -> None:
        """early: between two of those ticks, since somebody has started. The lease does not count it."""
        self._ticks_of_lease -= not early
        self._mishaps.begin_tick()
        with self._mishaps.of("Ray's nodes"):  # else those that were seen last
            self._launcher.look(self.wish.leaving)
        if not self._is_taking_over:
            self._scale()
        crowd = engines_by_node(list(self._deployments.values()))
        leaving = self.wish.leaving | self.wish.leaving_engines
        for deployment in self._deployments.values():  # first whoever takes longest to start
            deployment.tick(leaving, crowd, as_it_is=self._is_taking_over)
        self._forget_what_is_gone()
        self._forget_what_was_wished()
        self._tick_ingresses()
        self._tick_stores()
        if not self._is_taking_over:
            self._introduce()

    def apply(self, spec: ClusterSpec) -> None:
        """Become this, model by model, without a break. What is served already under one of its ids goes on.

        Raises ValueError if it is another cluster, or would change what none can while it runs.
        """
        fixed = replace(spec, deployments=self.wish.spec.deployments, drain_s=self.wish.spec.drain_s)
        if fixed != self.wish.spec:
            changed = [
                f
                for f in ("name", "kv_store_bytes", "http", "ingress_labels", "stop_grace_s")
                if getattr(fixed, f) != getattr(self.wish.spec, f)
            ]
            raise ValueError(f"{', '.join(changed)} cannot be changed while a cluster runs: stop it first")
        wanted = {deployment.deployment_id: deployment for deployment in spec.deployments}
        outgoing = tuple(d.spec for i, d in self._deployments.items() if i not in wanted)
        self.wish = replace(self.wish, spec=spec, outgoing=outgoing)
        for runs in self._deployments.values():
            runs.drain_s = spec.drain_s
        for deployment_id, deployment in wanted.items():
            if deployment_id in self._deployments:
                self._deployments[deployment_id].respec(deployment)
            else:
                self._deployments[deployment_id] = self._deploy(deployment)
                self._begin(self._deployments[deployment_id])

    def scale(self, model: str | None, num_engines: int) -> None:
        """So many engines for a model; for the only one if none is named. Raises ValueError."""
        deployments = self.wish.spec.deployments
        names = [deployment.model.name for deployment in deployments]
        if model is None and len(names) == 1:
            model = names[0]
        if model not in names:
            raise ValueError(f"model: {model!r} is not served here: choose {' or '.join(names)}")
        for deployment in deployments:
            if deployment.model.name == model and deployment.autoscaling:
                raise ValueError(
                    f"engines: {model} scales itself; change min_replicas and max_replicas of its "
                    "autoscaling_config"
                )
        scaled = tuple(d.scaled(num_engines) if d.model.name == model else d for d in deployments)
        self.apply(replace(self.wish.spec, deployments=scaled))

    def drain_node(self, node: str) -> None:
        """Let everything on it finish, and start nothing there any more; by a part of its id that no
        other's has. Raises ValueError if there is none, or no other is left."""
        nodes = self._launcher.nodes
        leaving = self.wish.leaving | {_the_one("node", node, nodes)}
        if leaving >= set(nodes):
            raise ValueError(
                f"node: {node} is the last one that could host engines; add one, or stop the cluster"
            )
        self.wish = replace(self.wish, leaving=leaving)

    def undrain_node(self, node: str) -> None:
        """Raises ValueError if it is not being left."""
        self.wish = replace(
            self.wish, leaving=self.wish.leaving - {_the_one("node", node, list(self.wish.leaving))}
        )

    def drain_engine(self, engine: str) -> None:
        """Replace it once it has finished what it has; by a part of its id that no other's has. Raises
        ValueError if there is none."""
        speaking = [m.watched.info.engine_id for d in self._deployments.values() for m in d.speaking]
        whole = EngineId(_the_one("engine", engine, speaking))
        self.wish = replace(self.wish, leaving_engines=self.wish.leaving_engines | {whole})

    def renew_lease(self) -> None:
        self._ticks_of_lease = LEASE_TICKS

    def stop(self) -> None:
        self.wish = replace(self.wish, is_stopped=True)

    @property
    def is_to_end(self) -> bool:
        """It was told to, or whoever it belongs to is gone."""
        return self.wish.is_stopped or (self._ticks_of_lease <= 0 and not self.wish.spec.is_detached)

    def status(self) -> ClusterStatus:
        ingresses = self._ingresses.infos
        current_ones = self._current
        has_all_engines = all(deployment.is_complete for deployment in current_ones)
        engines = {i: deployment.status() for i, deployment in self._deployments.items()}
        can_place = all(self._ingresses.can_place(d.spec.deployment_id) for d in current_ones if d.wanted)
        return ClusterStatus(
            ingresses=ingresses,
            deployments=tuple(
                DeploymentStatus(
                    deployment_id=deployment_id,
                    model=deployment.spec.model.name,
                    is_outgoing=deployment not in current_ones,
                    wanted=deployment.wanted,
                    engines=engines[deployment_id],
                )
                for deployment_id, deployment in self._deployments.items()
            ),
            stores=tuple(info for info, _ in self._stores.ready.values()),
            leaving=self.wish.leaving,
            leaving_engines=self.wish.leaving_engines,
            has_all_engines=has_all_engines,
            ready=has_all_engines and bool(ingresses) and all(ingresses) and can_place,
            failed=self._failed,
            troubles=tuple(f"{name}: {trouble}" for name, trouble in self._troubles(engines).items()),
        )

    @property
    def num_mishaps(self) -> int:
        return self._mishaps.count

    def counts(self) -> dict[Role, RoleCounts]:
        deployments, stores, ingresses = self._deployments.values(), self._stores, self._ingresses
        return {
            "router": RoleCounts(
                wanted=len(deployments),
                ready=sum(d.router.ready is not None for d in deployments),
                failures=sum(d.router.num_failures for d in deployments),
            ),
            "ingress": RoleCounts(
                wanted=len(ingresses.infos),
                ready=sum(info is not None for info in ingresses.infos),
                failures=ingresses.num_failures,
            ),
            "engine": RoleCounts(
                wanted=sum(d.wanted for d in deployments),
                ready=sum(len(d.ready) for d in deployments),
                failures=self._num_failures_gone + sum(d.num_failures for d in deployments),
            ),
            "store": RoleCounts(
                wanted=stores.num_wanted, ready=len(stores.ready), failures=stores.num_failures
            ),
        }

    def teardown(self) -> None:
        """End every actor: the front doors first, so that nothing new comes in behind them."""
        grace_s = self.wish.spec.stop_grace_s
        wait(self._ingresses.stop(grace_s), timeout=grace_s + 3.0)
        self._ingresses.kill()
        for deployment in self._deployments.values():
            deployment.kill()
        self._stores.kill()

    @property
    def _drain_s(self) -> float:
        return self.wish.spec.drain_s

    @property
    def _current(self) -> list[Deployment]:
        """One a model, in the order in which they were named."""
        return [self._deployments[spec.deployment_id] for spec in self.wish.spec.deployments]

    @property
    def _in_order(self) -> list[Deployment]:
        """The same, and then those that go: without a name a client asks for the first."""
        current_ones = self._current
        return current_ones + [d for d in self._deployments.values() if d not in current_ones]

    def _outgoing(self, model: str) -> list[Deployment]:
        """Those whose place is being taken, the newest first."""
        current = {spec.deployment_id for spec in self.wish.spec.deployments}
        going = [d for i, d in self._deployments.items() if i not in current and d.spec.model.name == model]
        return going[::-1]

    def _deploy(self, spec: DeploymentSpec) -> Deployment:
        has_served = spec.deployment_id in self.wish.served
        return Deployment(
            spec,
            self._launcher,
            self._clock,
            self._mishaps,
            drain_s=self._drain_s,
            has_served=has_served,
        )

    def _begin(self, current: Deployment) -> None:
        """With as many engines as the model has now, whosesoever they are, if the load is to decide."""
        name = current.spec.model.name
        if num := sum(len(d.placed) for d in self._deployments.values() if d.spec.model.name == name):
            current.begin_with(num)

    def _tick_ingresses(self) -> None:
        """An ingress that is replaced while we roll begins with what is served then."""
        doorways = self._launcher.doorways(self.wish.spec)
        models = [_card(deployment) for deployment in self._in_order]
        self._ingresses.tick(doorways, models, self.wish.leaving, self._drain_s)

    def _scale(self) -> None:
        """How many engines each deployment may have now. Of those that go only what has served may stay."""
        current_ones = self._current
        for deployment in self._deployments.values():
            deployment.is_outgoing = deployment not in current_ones
        for current in current_ones:
            going = self._outgoing(current.spec.model.name)
            old = sum(len(deployment.placed) for deployment in going)
            if not old:
                current.autoscale()
                current.wanted = current.needed
                left = 0
            else:
                is_known = self._ingresses.can_place(current.spec.deployment_id)
                now = allowed(
                    needed=current.needed,
                    new_ready=len(current.ready) if is_known else 0,
                    new_waits=any(member.waits_for_room for member in current.members),
                    old=old,
                    old_drains=any(d.is_draining for d in going),
                )
                may_serve = sum(m.watched.adopting or m.phase is Phase.READY for m in current.staying)
                current.wanted, left = max(now.new, min(current.needed, may_serve)), now.old
            for deployment in going:
                deployment.wanted = min(len(deployment.placed), left)
                left -= deployment.wanted
        served = {deployment.model.name for deployment in self.wish.spec.deployments}
        for deployment in self._deployments.values():
            if deployment.spec.model.name not in served:
                deployment.wanted = 0

    def _forget_what_is_gone(self) -> None:
        current = {spec.deployment_id for spec in self.wish.spec.deployments}
        for deployment_id, deployment in list(self._deployments.items()):
            if deployment_id not in current and deployment.is_gone:
                deployment.kill()
                if deployment.router.process:
                    continue  # it could not be ended now
                self._num_failures_gone += deployment.num_failures
                del self._deployments[deployment_id]

    def _forget_what_was_wished(self) -> None:
        """Of what is gone."""
        now, nodes, deployments = self._clock(), set(self._launcher.nodes), self._deployments.values()
        self._last_seen = {
            node: now if node in nodes or not nodes else self._last_seen.get(node, now)
            for node in self.wish.leaving
        }
        engines = {member.process_id for deployment in deployments for member in deployment.members}
        self.wish = replace(
            self.wish,
            outgoing=tuple(spec for spec in self.wish.outgoing if spec.deployment_id in self._deployments),
            leaving=frozenset(node for node, at in self._last_seen.items() if now - at <= GONE_S),
            leaving_engines=self.wish.leaving_engines & engines,
            served=frozenset(i for i, deployment in self._deployments.items() if deployment.has_served),
        )

    def _tick_stores(self) -> None:
        members = [member for d in self._deployments.values() for member in d.members]
        nodes = {member.last_node for member in members if member.last_node}
        has_any = self.wish.spec.kv_store_bytes != 0
        self._stores.tick(nodes if has_any else set(), all_are_known=all(m.last_node for m in members))

    @property
    def _failed(self) -> str | None:
        """A deployment that cannot serve is no end while the one whose place it is to take does."""
        hopeless = (d.fatal for d in self._current if not self._outgoing(d.spec.model.name))
        return next((fatal for fatal in (self._ingresses.fatal, *hopeless) if fatal), None)

    def _troubles(self, engines: Mapping[DeploymentId, Sequence[EngineStatus]]) -> dict[str, str]:
        said = dict(self._ingresses.troubles)
        for deployment_id, deployment in self._deployments.items():
            said |= deployment.troubles(engines[deployment_id])
        return {**said, **self._stores.troubles, **self._mishaps.troubles}

    @property
    def _is_taking_over(self) -> bool:
        if self._clock() - self._began > ADOPTION_DEADLINE_S:
            return False
        deployments = self._deployments.values()
        return self._stores.adopting or self._ingresses.adopting or any(d.adopting for d in deployments)

    def _introduce(self) -> None:
        deployments = self._in_order
        on_node = self._stores.ready
        stores = {store.process_id: store for _, store in on_node.values()}
        routers = [d.known_router for d in deployments if d.known_router]
        for _, store in on_node.values():
            with self._mishaps.of(store.process_id):
                store.introduce(routers)
        introductions = [_introduction(deployment) for deployment in deployments]
        for _, ingress in self._ingresses.speaking:
            with self._mishaps.of(ingress.process_id):
                ingress.introduce(introductions, stores)
        ingress_ids = frozenset(info.ingress_id for info, _ in self._ingresses.speaking)
        for deployment in deployments:
            if router := deployment.router.ready:
                placed_on = [(m.watched.info, m.watched.ready) for m in deployment.ready if m.watched.ready]
                with self._mishaps.of(router.process_id):
                    router.set_members(placed_on, list(on_node.values()))
            if (router := deployment.known_router) is None:
                continue
            for member in deployment.speaking:
                own = on_node.get(member.watched.info.node)
                if engine := member.watched.ready:
                    with self._mishaps.of(engine.process_id):
                        engine.introduce(router, ingress_ids, stores, own[1].process_id if own else None)


def _the_one(kind: str, part: str, ids: Sequence[str]) -> str:
    found = [whole for whole in ids if part in whole] if part else []
    if part in ids:
        return part
    if len(found) != 1:
        choice = ", ".join(sorted(ids)) or "none"
        raise ValueError(f"{kind}: {part!r} names {len(found)} of {choice}")
    return found[0]


def _introduction(deployment: Deployment) -> Introduction:
    """Without engines before there was ever a router: nothing is to begin blindly."""
    speaking = [m.watched.ready for m in deployment.speaking] if deployment.known_router else []
    return Introduction(
        card=_card(deployment),
        router=deployment.known_router,
        engines={engine.process_id: engine for engine in speaking if engine},
    )


def _card(deployment: Deployment) -> DeploymentCard:
    draining = [m.watched.info.engine_id for m in deployment.speaking if m.phase is Phase.DRAINING]
    return DeploymentCard(
        deployment_id=deployment.spec.deployment_id,
        model=replace(deployment.spec.model, fingerprint=deployment.fingerprint),
        weight=len(deployment.ready),
        draining=frozenset(draining),
    )
