"""The cluster's front doors: one in each doorway, kept open. Plain, like the supervisor."""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.actors.messages import DeploymentCard, DeploymentId, IngressInfo
from shoal.cluster.mishaps import Mishaps
from shoal.cluster.processes import Doorway, IngressProcess, Launcher
from shoal.cluster.watch import Watched


@dataclass(slots=True)
class _Leaving:
    watched: Watched[IngressProcess]
    has_ended: Future[Any]
    by: float


class Ingresses:
    """One whose doorway is gone, or is on a node that is to be left, closes, and ends when its streams have.
    Those that are counted stay beside the supervisor: closed there they would only open there again."""

    def __init__(self, launcher: Launcher, clock: Callable[[], float], mishaps: Mishaps) -> None:
        self._launcher = launcher
        self._clock = clock
        self._mishaps = mishaps
        self._adopted = dict(launcher.adopt_ingresses())
        self._open: dict[str, Watched[IngressProcess]] = {}
        self._closing: dict[str, _Leaving] = {}
        self._has_been_ready = bool(self._adopted)
        self._models: Sequence[DeploymentCard] = ()
        """What is served now."""
        self._num_failures_gone = 0  # of those whose doorways are gone

    @property
    def infos(self) -> tuple[IngressInfo | None, ...]:
        """One a doorway; None while it is not ready."""
        return tuple(watched.info if watched.ready else None for watched in self._open.values())

    @property
    def speaking(self) -> list[tuple[IngressInfo, IngressProcess]]:
        """Those that have requests, or may: they must hear of the engines."""
        open_ones = [(w.info, w.ready) for w in self._open.values() if w.ready]
        return open_ones + [
            (c.watched.info, c.watched.ready) for c in self._closing.values() if c.watched.ready
        ]

    @property
    def num_failures(self) -> int:
        return self._num_failures_gone + sum(watched.num_failures for watched in self._open.values())

    @property
    def adopting(self) -> bool:
        return any(watched.adopting for watched in self._open.values())

    @property
    def fatal(self) -> str | None:
        return next((watched.fatal for watched in self._open.values() if watched.fatal), None)

    @property
    def troubles(self) -> dict[str, str]:
        said = {name.replace("-", " "): w.trouble for name, w in self._open.items() if w.trouble}
        names = {card.deployment_id: card.model.name for card in self._models}
        for door, watched in self._open.items():
            account = watched.ready.account if watched.ready else None
            for deployment_id, why in account.unread.items() if account else ():
                model = names.get(deployment_id, deployment_id)
                said[f"{model} at {door.replace('-', ' ')}"] = f"its tokenizer is not read: {why}"
        return said

    def can_place(self, deployment_id: DeploymentId) -> bool:
        """Whether each that is open could, by its own word: one hears of engines after they are ready."""
        accounts = [watched.ready.account for watched in self._open.values() if watched.ready]
        return all(account and deployment_id in account.can_place for account in accounts)

    def tick(
        self,
        doorways: Sequence[Doorway],
        models: Sequence[DeploymentCard],
        leaving: Set[str],
        drain_s: float,
    ) -> None:
        self._models = models
        wanted = {doorway.name: doorway for doorway in doorways if doorway.node not in leaving}
        for name in list(self._open):
            if name not in wanted and not self._open[name].adopting:
                self._close(name, drain_s)
        for name, doorway in wanted.items():
            if name not in self._open and name not in self._closing:
                launch = partial(self._launch, doorway)
                adopted = self._adopted.pop(name, None)
                essential = not self._has_been_ready
                self._open[name] = Watched(launch, self._clock, adopted, essential=essential)
        for name, left in self._adopted.items():  # it was closing, and may have streams: it goes on with that
            self._open[name] = Watched(_never, self._clock, left)
        self._adopted.clear()
        for name, watched in self._open.items():
            with self._mishaps.of(name):
                watched.tick()
        for name, closing in list(self._closing.items()):
            if closing.has_ended.done() or self._clock() > closing.by:
                with self._mishaps.of(name):
                    closing.watched.kill()
                    del self._closing[name]
        self._has_been_ready = self._has_been_ready or any(self.infos)

    def stop(self, grace_s: float) -> list[Future[Any]]:
        stopping: list[Future[Any]] = []
        for info, process in self.speaking:
            with self._mishaps.of(info.ingress_id):
                stopping.append(process.stop(grace_s))
        return stopping

    def kill(self) -> None:
        closing = {name: leaving.watched for name, leaving in self._closing.items()}
        everyone: dict[str, Watched[IngressProcess] | IngressProcess]
        everyone = {**self._adopted, **closing, **self._open}
        for name, process in everyone.items():
            with self._mishaps.of(name):
                process.kill()

    def _launch(self, doorway: Doorway) -> IngressProcess:
        return self._launcher.ingress(doorway, self._models, is_first=not self._has_been_ready)

    def _close(self, name: str, drain_s: float) -> None:
        watched = self._open[name]
        with self._mishaps.of(name):
            if watched.ready:
                by = self._clock() + drain_s + CLOSING_S
                self._closing[name] = _Leaving(watched, watched.ready.stop(drain_s), by)
            else:
                watched.kill()
            self._num_failures_gone += watched.num_failures
            del self._open[name]


def _never() -> IngressProcess:
    raise RuntimeError("it has no doorway any more")


CLOSING_S = 5.0
"""What it takes beyond the grace."""
