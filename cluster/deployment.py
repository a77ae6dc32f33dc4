"""One model's engines and their router, kept as many as are wanted. Plain, like the supervisor."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import count, islice

from shoal.actors.messages import EngineHealth, EngineInfo
from shoal.cluster.autoscaler import Autoscaler
from shoal.cluster.mishaps import Mishaps
from shoal.cluster.processes import EngineProcess, Launcher, RouterProcess
from shoal.cluster.spec import DeploymentSpec, short
from shoal.cluster.watch import State, Watched

SETTLE_S = 2.5
"""So long after an engine is no longer placed on, a request that was placed there before may still arrive."""

ROOM_S = 5.0
"""An engine of which nothing was heard for so long after it was asked for waits for room somewhere."""


STARTS_A_TICK = 32
"""More engines than these are made in the ticks that follow: to make one takes Ray some milliseconds, and
nobody is told anything meanwhile."""


class Phase(StrEnum):
    JOINING = "joining"
    """It waits for room, starts, or is started again."""
    READY = "ready"
    DRAINING = "draining"
    """It finishes what it has, takes nothing new, and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    index: int
    phase: Phase
    info: EngineInfo | None
    """While it is ready or draining."""
    health: EngineHealth
    trouble: str | None
    """What failed and is being tried again, or what it waits for."""
    doing: str | None
    """What its start is at."""


class Member:
    """One engine: JOINING ─▶ READY ─▶ DRAINING ─▶ gone. Until it drains, one that fails is started again."""

    def __init__(self, index: int, watched: Watched[EngineProcess], clock: Callable[[], float]) -> None:
        self.index = index
        self.watched = watched
        self._clock = clock
        self._asked_at = clock()
        self.draining_since: float | None = None
        self.is_leaving = False
        """It is to drain when another is there in its place."""
        self.last_node: str | None = None
        """Where it was last known to be, also while it is started again."""

    @property
    def process_id(self) -> str | None:
        """Its engine's, while it has one."""
        return self.watched.process.process_id if self.watched.process else None

    @property
    def phase(self) -> Phase:
        if self.draining_since is not None:
            return Phase.DRAINING
        return Phase.READY if self.watched.ready else Phase.JOINING

    @property
    def node(self) -> str | None:
        return self.watched.info.node if self.watched.ready else None

    @property
    def health(self) -> EngineHealth:
        """As of its last ping; as if it had nothing to do before the first."""
        process = self.watched.ready
        health = process.health if process else None
        return health or EngineHealth(num_requests=0, stalled=False)

    @property
    def has_a_place(self) -> bool:
        """It serves; or has, and is started again; or was adopted, and has not said yet whether it does."""
        if self.phase is Phase.DRAINING:
            return False
        return bool(self.watched.ready) or self.watched.adopting or self.last_node is not None

    @property
    def waits_for_room(self) -> bool:
        process = self.watched.process
        if process is None or self.watched.ready or self.watched.has_had_pulse:
            return False
        return self._clock() - self._asked_at > ROOM_S and not process.has_room()

    def drain(self) -> None:
        if self.draining_since is None:
            self.draining_since = self._clock()

    def tick(self, drain_s: float) -> bool:
        """False once it is gone."""
        if self.watched.state is State.ABSENT:
            self._asked_at = self._clock()
        if self.draining_since is None or self.watched.ready:
            self.watched.tick()
        self.last_node = self.node or self.last_node
        if self.draining_since is None:
            if self.is_leaving and not self.watched.ready:
                self.watched.kill()  # it died: nothing is lost by not starting it again
                return False
            return True
        since = self._clock() - self.draining_since
        # Asked what it has to do since nothing more can have come.
        has_settled = self.watched.answered_at > self.draining_since + SETTLE_S
        is_done = has_settled and not self.health.num_requests
        if self.watched.ready and not is_done and since < drain_s:
            return True
        self.watched.kill()
        return False


class Deployment:
    """Call `tick` often. So many engines are `needed`, by who asked for them or by the load; so many `wanted`
    now, which is fewer while they take others' place. Those that drain are beside them."""

    def __init__(
        self,
        spec: DeploymentSpec,
        launcher: Launcher,
        clock: Callable[[], float],
        mishaps: Mishaps,
        *,
        drain_s: float,
        has_served: bool = False,
    ) -> None:
        """has_served: under an earlier supervisor."""
        self.spec = spec
        self._mishaps = mishaps
        self._launcher = launcher
        self._clock = clock
        self.drain_s = drain_s
        self.has_served = has_served
        self._num_failures_gone = 0
        self.known_router = launcher.adopt_router(spec)
        """The last that was ready, or was found. The others are told of it while it is away as well: they
        notice that themselves, and must know each other all the same."""
        self.router: Watched[RouterProcess] = Watched(
            partial(launcher.router, spec), clock, self.known_router
        )
        adopted = launcher.adopt_engines(spec)
        self.members: list[Member] = [self._member(index, engine) for index, engine in enumerate(adopted)]
        self.wanted = self.needed = spec.num_engines
        self.is_outgoing = False
        """Another takes its place: it starts nothing that has not served."""
        self._autoscaler: Autoscaler | None = None
        self.respec(spec)
        self.begin_with(len(adopted) or spec.num_engines)

    @property
    def num_failures(self) -> int:
        """Of engines, since it was made."""
        return self._num_failures_gone + sum(member.watched.num_failures for member in self.members)

    @property
    def is_gone(self) -> bool:
        return not self.wanted and not self.members

    @property
    def ready(self) -> list[Member]:
        """Those that may be placed on."""
        return [member for member in self.members if member.phase is Phase.READY]

    @property
    def speaking(self) -> list[Member]:
        """Those that have requests, or may: the ready, and the draining."""
        return [member for member in self.members if member.watched.ready]

    @property
    def staying(self) -> list[Member]:
        return [m for m in self.members if not m.is_leaving and m.phase is not Phase.DRAINING]

    @property
    def placed(self) -> list[Member]:
        """Those whose place others are to take when it goes, also of those that are leaving anyway."""
        return [member for member in self.members if member.has_a_place]

    @property
    def is_draining(self) -> bool:
        return any(member.phase is Phase.DRAINING for member in self.members)

    @property
    def is_complete(self) -> bool:
        return len(self.ready) >= self.wanted

    @property
    def adopting(self) -> bool:
        return self.router.adopting or any(member.watched.adopting for member in self.members)

    @property
    def fingerprint(self) -> bytes:
        return next((member.watched.info.fingerprint for member in self.speaking), b"")

    @property
    def fatal(self) -> str | None:
        """Why it can never serve, if so."""
        return next((m.watched.fatal for m in self.members if m.watched.fatal), self.router.fatal)

    def troubles(self, engines: Sequence[EngineStatus]) -> dict[str, str]:
        """engines: as `status` says."""
        said = {self._router_name: self.router.trouble} if self.router.trouble else {}
        troubled = (status for status in engines if status.trouble)
        return said | {self._engine_name(status.index): status.trouble or "" for status in troubled}

    def status(self) -> tuple[EngineStatus, ...]:
        lacking = cache(lambda: self._launcher.lacking(self.spec))
        return tuple(
            EngineStatus(
                index=member.index,
                phase=member.phase,
                info=member.watched.info if member.watched.ready else None,
                health=member.health,
                trouble=_trouble(member, lacking),
                doing=member.watched.doing,
            )
            for member in self.members
        )

    def respec(self, spec: DeploymentSpec) -> None:
        """The same, but for how many engines there are to be."""
        if spec.autoscaling is None:
            self._autoscaler, self.needed = None, spec.num_engines
        elif self._autoscaler is None or spec.autoscaling != self.spec.autoscaling:
            self._autoscaler = Autoscaler(spec.autoscaling, self._clock)
        self.spec = spec
        for member in self.members:
            member.watched.start_timeout_s = spec.start_timeout_s

    def begin_with(self, num_engines: int) -> None:
        """If it scales itself: so many, until it knows what they have to do."""
        if self._autoscaler:
            self.wanted = self.needed = self._autoscaler.wanted((), num_engines)

    def autoscale(self) -> None:
        """See how many engines its load needs, if that is what decides."""
        if self._autoscaler:
            self.needed = self._autoscaler.wanted([member.health for member in self.ready], self.needed)

    def tick(self, leaving: Set[str], crowd: Mapping[str, int], *, as_it_is: bool = False) -> None:
        """leaving: engines that are to go when others have come in their place, and nodes on which nothing
        may stay. crowd: how many engines a node hosts, of all models. as_it_is: none is started or let go."""
        for member in self.staying:
            if member.node in leaving or member.process_id in leaving:
                member.is_leaving = True
        if not as_it_is:
            self._have_as_many_as_wanted(crowd)
            self._let_leave()
        with self._mishaps.of(self._router_name):
            self.router.tick()
        self.known_router = self.router.ready or self.known_router
        for member in list(self.members):
            with self._mishaps.of(self._engine_name(member.index)):
                if not member.tick(self.drain_s):
                    self._forget(member)
        self.has_served = self.has_served or bool(self.ready)

    def kill(self) -> None:
        for member in self.members:
            with self._mishaps.of(self._engine_name(member.index)):
                member.watched.kill()
        with self._mishaps.of(self._router_name):
            self.router.kill()

    @property
    def _router_name(self) -> str:
        return f"router of {self.spec.model.name}"

    def _engine_name(self, index: int) -> str:
        return f"engine {index} of {self.spec.model.name}"

    def _have_as_many_as_wanted(self, crowd: Mapping[str, int]) -> None:
        for member in self.staying if self.is_outgoing else ():
            if not member.has_a_place:
                self._end(member)
        excess = len(self.staying) - self.wanted
        for member in sorted(self.staying, key=partial(_loss, crowd=crowd))[: max(0, excess)]:
            if member.watched.adopting:
                continue  # it may serve: that is known when it says so, or hangs
            if member.phase is Phase.JOINING:  # it has nothing to finish
                self._end(member)
            else:
                member.drain()
        if excess < 0 and not self.is_outgoing:
            self._add(min(-excess, STARTS_A_TICK))

    def _let_leave(self) -> None:
        """Those who are to go do so as others become ready in their place; one by one if these lack room."""
        enough = len(self.ready) - self.wanted
        if enough <= 0 and any(member.waits_for_room for member in self.staying):
            enough = 0 if self.is_draining else 1
        for member in [member for member in self.members if member.is_leaving][: max(0, enough)]:
            member.is_leaving = False
            member.drain()

    def _end(self, member: Member) -> None:
        with self._mishaps.of(self._engine_name(member.index)):
            member.watched.kill()
            self._forget(member)

    def _forget(self, member: Member) -> None:
        self.members.remove(member)
        self._num_failures_gone += member.watched.num_failures

    def _add(self, num_engines: int) -> None:
        taken = {member.index for member in self.members}
        free = (index for index in count() if index not in taken)
        self.members += [self._member(index, None) for index in islice(free, num_engines)]
        self.members.sort(key=lambda member: member.index)

    def _member(self, index: int, adopted: EngineProcess | None) -> Member:
        launch = partial(self._launcher.engine, self.spec, index)
        # once it has served, one that cannot start is no mistake of the whole
        essential = not self.has_served
        watched = Watched(
            launch,
            self._clock,
            adopted,
            essential=essential,
            accept=self._accept,
            start_timeout_s=self.spec.start_timeout_s,
        )
        return Member(index, watched, self._clock)

    def _accept(self, info: EngineInfo) -> None:
        """Of the same bytes as those that serve: else an answer would depend on where it is computed. These
        are the same among themselves."""
        other = next((member.watched.info for member in self.speaking), None)
        if other is not None and info.content != other.content:
            raise ValueError(
                f"{self.spec.engine.checkpoint} on node {short(info.node)} has other weights or another "
                f"config.json than on node {short(other.node)}: make them the same"
            )


def _trouble(member: Member, lacking: Callable[[], str]) -> str | None:
    return lacking() if member.waits_for_room else member.watched.fatal or member.watched.trouble


def _loss(member: Member, crowd: Mapping[str, int]) -> tuple[bool, int, int, int]:
    """What it costs to let it go, least first: one that does not serve yet; then where that empties a node
    soonest, so that it can be given back; then what it has to do. What it holds its node's store has too."""
    alone = crowd.get(member.node or "", 0)
    return member.phase is Phase.READY, alone, member.health.num_requests, -member.index


def engines_by_node(deployments: Sequence[Deployment]) -> dict[str, int]:
    crowd: dict[str, int] = {}
    for deployment in deployments:
        for member in deployment.speaking:
            crowd[member.watched.info.node] = crowd.get(member.watched.info.node, 0) + 1
    return crowd
