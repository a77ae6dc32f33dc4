"""The cluster's KV stores: one on every node that hosts engines, kept running. Plain, like the supervisor."""

from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.cluster.mishaps import Mishaps
from shoal.cluster.processes import Launcher, StoreProcess
from shoal.cluster.spec import short
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

    def __init__(self, launcher: Launcher, clock: Callable[[], float], mishaps: Mishaps) -> None:
        self._launcher = launcher
        self._clock = clock
        self._mishaps = mishaps
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
        """Why there is none, if something failed."""
        return {_name(node): store.trouble for node, store in self._stores.items() if store.trouble}

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
            with self._mishaps.of(_name(node)):
                self._leave(node)
        if all_are_known:
            self._kill_adopted()
        for node, store in self._stores.items():
            with self._mishaps.of(_name(node)):
                store.tick()
        for node, leaving in list(self._leaving.items()):
            if leaving.is_empty.done() or self._clock() > leaving.by:
                with self._mishaps.of(_name(node)):
                    leaving.store.kill()
                    del self._leaving[node]

    def kill(self) -> None:
        for node, store in self._all.items():
            with self._mishaps.of(_name(node)):
                store.kill()
        self._kill_adopted()

    @property
    def _all(self) -> dict[str, Watched[StoreProcess]]:
        return {**{node: leaving.store for node, leaving in self._leaving.items()}, **self._stores}

    def _leave(self, node: str) -> None:
        """The node may be given back as soon as nothing of ours is there: others take over what is wanted."""
        store = self._stores[node]
        others = [other.ready for other in self._stores.values() if other.ready and other is not store]
        if store.ready and others:
            by = self._clock() + EVACUATION_S
            self._leaving[node] = _Leaving(store, store.ready.evacuate(others), by)
        else:
            store.kill()
        self._num_failures_elsewhere += store.num_failures
        del self._stores[node]

    def _adopt(self, node: str) -> StoreProcess | None:
        """One is taken over; should an earlier supervisor have died while it replaced it, the others end."""
        found = next((store for store in self._adopted if store.is_on(node)), None)
        if found is not None:
            self._adopted.remove(found)
            for surplus in [store for store in self._adopted if store.is_on(node)]:
                self._kill_one_adopted(surplus)
        return found

    def _kill_adopted(self) -> None:
        for store in list(self._adopted):
            self._kill_one_adopted(store)

    def _kill_one_adopted(self, store: StoreProcess) -> None:
        with self._mishaps.of(store.process_id):
            store.kill()
            self._adopted.remove(store)


def _name(node: str) -> str:
    return f"store on {short(node)}"
