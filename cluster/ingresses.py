"""The cluster's front doors: one in each doorway, kept open. Plain, like the supervisor."""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.actors.messages import DeploymentCard, IngressInfo
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

    def __init__(self, launcher: Launcher, clock: Callable[[], float]) -> None:
        self._launcher = launcher
        self._clock = clock
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
        return {name.replace("-", " "): w.trouble for name, w in self._open.items() if w.trouble}

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
        for watched in self._open.values():
            watched.tick()
        for name, closing in list(self._closing.items()):
            if closing.has_ended.done() or self._clock() > closing.by:
                closing.watched.kill()
                del self._closing[name]
        self._has_been_ready = self._has_been_ready or any(self.infos)

    def stop(self, grace_s: float) -> list[Future[Any]]:
        return [process.stop(grace_s) for _, process in self.speaking]

    def kill(self) -> None:
        for watched in self._open.values():
            watched.kill()
        for closing in self._closing.values():
            closing.watched.kill()
        for left in self._adopted.values():
            left.kill()

    def _launch(self, doorway: Doorway) -> IngressProcess:
        return self._launcher.ingress(doorway, self._models)

    def _close(self, name: str, drain_s: float) -> None:
        watched = self._open.pop(name)
        self._num_failures_gone += watched.num_failures
        if watched.ready:
            by = self._clock() + drain_s + CLOSING_S
            self._closing[name] = _Leaving(watched, watched.ready.stop(drain_s), by)
        else:
            watched.kill()


def _never() -> IngressProcess:
    raise RuntimeError("it has no doorway any more")


CLOSING_S = 5.0
"""What it takes beyond the grace."""
