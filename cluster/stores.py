"""The cluster's KV stores: one on every node that hosts engines, kept running. Plain, like the supervisor."""

from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.cluster.processes import Launcher, StoreProcess
from shoal.cluster.watch import Watched
from shoal.kvstore.messages import StoreInfo

EVACUATION_S = 30.0
"""At most so long a node is kept for what its store has."""


@dataclass(slots=True)
class _Leaving:
    store: Watched[StoreProcess]
    is_empty: Future[Any]
    by: float


class Stores:
    """A store may outlive the engines of its node, so that their successors find what was saved there.

    None is essential: while one is away its prefixes are computed again.
    """

    def __init__(self, launcher: Launcher, clock: Callable[[], float]) -> None:
        self._launcher = launcher
        self._clock = clock
        self._stores: dict[str, Watched[StoreProcess]] = {}
        """By node."""
        self._leaving: dict[str, _Leaving] = {}
        """Likewise."""
        self._num_failures_elsewhere = 0  # on nodes that have no store any more
        self._adopted = list(launcher.adopt_stores())

    @property
    def ready(self) -> dict[str, tuple[StoreInfo, StoreProcess]]:
        """By node."""
        return {node: (store.info, store.ready) for node, store in self._all.items() if store.ready}

    @property
    def troubles(self) -> dict[str, str]:
        """By node: why there is none, if something failed."""
        return {node: store.trouble for node, store in self._stores.items() if store.trouble}

    @property
    def num_wanted(self) -> int:
        return len(self._stores)

    @property
    def num_failures(self) -> int:
        return self._num_failures_elsewhere + sum(store.num_failures for store in self._stores.values())

    @property
    def adopting(self) -> bool:
        """One that runs beside a ready engine has not said yet that it is ready."""
        return any(store.adopting for store in self._stores.values())

    def tick(self, nodes: Set[str], *, all_are_known: bool) -> None:
        """A store on each of these; elsewhere none, once it is known that no engine is there."""
        for node in nodes & self._leaving.keys():
            self._stores[node] = self._leaving.pop(node).store
        for node in sorted(nodes - self._stores.keys()):
            launch = partial(self._launcher.store, node)
            self._stores[node] = Watched(launch, self._clock, self._adopt(node), essential=False)
        for node in self._stores.keys() - nodes:
            self._leave(node)
        if all_are_known:
            self._kill_adopted()
        for store in self._stores.values():
            store.tick()
        for node, leaving in list(self._leaving.items()):
            if leaving.is_empty.done() or self._clock() > leaving.by:
                self._leaving.pop(node).store.kill()

    def kill(self) -> None:
        for store in self._all.values():
            store.kill()
        self._kill_adopted()

    @property
    def _all(self) -> dict[str, Watched[StoreProcess]]:
        return {**{node: leaving.store for node, leaving in self._leaving.items()}, **self._stores}

    def _leave(self, node: str) -> None:
        """The node may be given back as soon as nothing of ours is there: others take over what is wanted."""
        store = self._stores.pop(node)
        self._num_failures_elsewhere += store.num_failures
        others = [other.ready for other in self._stores.values() if other.ready]
        if store.ready and others:
            by = self._clock() + EVACUATION_S
            self._leaving[node] = _Leaving(store, store.ready.evacuate(others), by)
        else:
            store.kill()

    def _adopt(self, node: str) -> StoreProcess | None:
        """One is taken over; should an earlier supervisor have died while it replaced it, the others end."""
        here = [store for store in self._adopted if store.is_on(node)]
        self._adopted = [store for store in self._adopted if store not in here]
        for surplus in here[1:]:
            surplus.kill()
        return here[0] if here else None

    def _kill_adopted(self) -> None:
        for store in self._adopted:
            store.kill()
        self._adopted.clear()
