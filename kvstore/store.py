"""Which extents a node's store holds, and which of them go when room is needed. Plain state: the bytes are
elsewhere, behind opaque tickets."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.changes import Changes
from shoal.kvstore.messages import Extent, ReadExtent, Reading
from shoal.kvstore.outstanding import Outstanding

T = TypeVar("T")

ENTRY_BYTES = 512
"""What an entry counts beside its bytes: about what it takes here. Blocks of models that have no paged layers
have no bytes at all, and would otherwise be kept for ever."""

LEASE_S = 30.0
"""Longer than any fetch may take. What is read is safe without it, since a reader holds a reference of its
own; but the memory of an extent that is being read comes back only later, so another one is evicted."""


def cost(extent: Extent) -> int:
    """Bytes that an extent takes of the budget."""
    return extent.num_bytes + ENTRY_BYTES * len(extent.entries)


@dataclass(slots=True)
class _Held(Generic[T]):
    extent: Extent
    ticket: T
    found: set[BlockKey]
    """Its entries that are found here: not those that another extent has, nor those that were discarded."""
    num_leases: int = 0


@dataclass(frozen=True, slots=True)
class _Lease:
    lease_id: int
    until: float
    extent_ids: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class StoreCounts:
    """Since the store was made."""

    reads: int = 0
    """That found something."""
    stored_extents: int = 0
    evicted_extents: int = 0
    evicted_bytes: int = 0
    duplicate_extents: int = 0
    """Offered, but every key was here already."""
    refused_extents: int = 0
    """Offered, but too little could be evicted for them."""
    failed_extents: int = 0
    """Accepted, but their bytes never came."""


class KVStore(Generic[T]):
    """Extents under one budget, however many engines write. A key leads to at most one of them.

        put_start ──▶ coming ──put_end──▶ found by read ──▶ evicted, discarded
                        └──put_abort──▶ nothing is left

    What is coming counts against the budget, and nobody sees it. It keeps nobody else from putting the same
    keys: of two that do, the first one whole is found.

    Extents wait for their eviction in two queues, least recently used first: those that nobody is likely to
    need, then the others. Whoever uses one uses all that it builds upon, so in a queue each stands behind
    those that build upon it: tails go before heads. One that something builds upon, or that is leased, is
    passed over; and nothing is evicted for an extent that builds upon it.
    """

    def __init__(self, budget_bytes: int, clock: Callable[[], float], *, lease_s: float = LEASE_S) -> None:
        if budget_bytes < 1:
            raise ValueError(f"a KV store needs a budget of at least one byte, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Of found extents and coming ones."""
        self.counts = StoreCounts()
        self.changes = Changes()
        """What can be found, and could not when this was last taken; and the other way round."""
        self._clock = clock
        self._lease_s = lease_s
        self._held: dict[str, _Held[T]] = {}
        self._coming: dict[str, Extent] = {}
        self._void: set[str] = set()  # of what is coming, that which a reset has overtaken
        self._where: dict[BlockKey, str] = {}
        self._builds_upon: dict[BlockKey, set[str]] = {}
        self._interior: OrderedDict[str, None] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._leases: dict[int, _Lease] = {}  # those that end first come first
        self._next_lease = 1

    def __len__(self) -> int:
        """Keys that can be found."""
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._where)

    def put_start(self, extent: Extent) -> Extent | None:
        """What of the extent is wanted, with room made for it; None if nothing is.

        Must be followed by put_end or put_abort. Raises ValueError for an extent that is coming already.
        """
        if extent.extent_id in self._coming or extent.extent_id in self._held:
            raise ValueError(f"extent {extent.extent_id!r} was offered before")
        if extent.kept:
            self._promote(extent.keys)
        wanted = extent.without(self._where)
        if wanted is None:
            self.counts.duplicate_extents += 1
            return None
        if not self._make_room(cost(wanted), parent=wanted.parent):
            self.counts.refused_extents += 1
            return None
        self._coming[wanted.extent_id] = wanted
        self.used_bytes += cost(wanted)
        return wanted

    def put_end(self, extent_id: str, ticket: T) -> None:
        """The bytes are there, whole: from here on they are found. Raises KeyError if nothing was coming."""
        if extent_id in self._void:
            self.put_abort(extent_id)
            return
        extent = self._coming.pop(extent_id)
        found = [key for key in extent.keys if key not in self._where]
        if not found:  # somebody else was faster
            self.used_bytes -= cost(extent)
            self.counts.duplicate_extents += 1
            return
        self.counts.stored_extents += 1
        self._held[extent_id] = _Held(extent, ticket, set(found))
        self._where.update(dict.fromkeys(found, extent_id))
        self._builds_upon.setdefault(extent.parent, set()).add(extent_id)
        self._queue(extent)[extent_id] = None
        self._use([extent_id])
        self.changes.note(found, stored=True)

    def put_abort(self, extent_id: str) -> None:
        """The bytes will not come. An extent that is not coming is passed over."""
        self._void.discard(extent_id)
        if (extent := self._coming.pop(extent_id, None)) is not None:
            self.used_bytes -= cost(extent)
            self.counts.failed_extents += 1

    def read(self, keys: Sequence[BlockKey]) -> Reading:
        """What is here of these keys of one path, and a lease on it."""
        self._end_leases()
        entries: dict[str, list[BlockKey]] = {}
        for key in keys:
            if (extent_id := self._where.get(key)) is not None:
                entries.setdefault(extent_id, []).append(key)
        self._use(entries)
        self.counts.reads += bool(entries)
        return Reading(
            lease_id=self._lease(tuple(entries)),
            extents=tuple(self._read_extent(self._held[i], set(wanted)) for i, wanted in entries.items()),
        )

    def release(self, lease_id: int) -> None:
        """The reader has its bytes. A lease that has ended is passed over."""
        if (lease := self._leases.pop(lease_id, None)) is not None:
            for extent_id in lease.extent_ids:
                if extent_id in self._held:
                    self._held[extent_id].num_leases -= 1

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Nobody shall find these any more. Their bytes go with the last key of their extent."""
        for key in keys:
            extent_id = self._where.pop(key, None)
            if extent_id is None:
                continue
            self.changes.note([key], stored=False)
            held = self._held[extent_id]
            held.found.remove(key)
            if not held.found:
                self._drop(extent_id)

    def reset(self) -> None:
        """Everything that is found goes, read or not, and what is coming will not be found."""
        self._void.update(self._coming)
        self.changes.note(self._where, stored=False)
        self._where.clear()
        for extent_id in list(self._held):
            self._drop(extent_id)

    def outstanding(self) -> Outstanding:
        """Leases that nobody handed back and that have not ended, and what was started and neither ended nor
        aborted."""
        self._end_leases()
        return Outstanding.of({"leases": len(self._leases), "coming": len(self._coming)}, self.check)

    def check(self) -> None:
        """Raise AssertionError if the books disagree with each other."""
        extents = [held.extent for held in self._held.values()]
        assert self._void <= self._coming.keys()
        assert self.used_bytes == sum(cost(extent) for extent in [*extents, *self._coming.values()])
        assert 0 <= self.used_bytes <= self.budget_bytes
        where = {key: i for i, held in self._held.items() for key in held.found}
        assert where == self._where
        assert all(held.found and held.found <= set(held.extent.keys) for held in self._held.values())
        upon = {(parent, i) for parent, ids in self._builds_upon.items() for i in ids}
        assert upon == {(extent.parent, extent.extent_id) for extent in extents}
        assert all(self._builds_upon.values())
        leased = [i for lease in self._leases.values() for i in lease.extent_ids if i in self._held]
        assert all(held.num_leases == leased.count(i) for i, held in self._held.items())
        assert self._interior.keys() == {extent.extent_id for extent in extents if not extent.kept}
        assert self._kept.keys() == {extent.extent_id for extent in extents if extent.kept}
        age = {extent_id: i for i, extent_id in enumerate(self._in_order())}
        for extent in extents:
            parent = self._held.get(self._where.get(extent.parent, ""))
            if parent is not None and parent.extent.kept == extent.kept:
                assert age[extent.extent_id] < age[parent.extent.extent_id], "a parent goes before its child"

    def _read_extent(self, held: _Held[T], wanted: set[BlockKey]) -> ReadExtent:
        entries = tuple(entry for entry in held.extent.entries if entry.key in wanted)
        return ReadExtent(entries=entries, ticket=held.ticket)

    def _lease(self, extent_ids: tuple[str, ...]) -> int:
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease_id] = _Lease(lease_id, self._clock() + self._lease_s, extent_ids)
        for extent_id in extent_ids:
            self._held[extent_id].num_leases += 1
        return lease_id

    def _end_leases(self) -> None:
        now = self._clock()
        while self._leases and (first := next(iter(self._leases.values()))).until <= now:
            self.release(first.lease_id)

    def _path(self, parent: BlockKey) -> list[str]:
        """Extents that what has this parent builds upon, nearest first."""
        path: dict[str, None] = {}
        extent_id = self._where.get(parent)
        while extent_id is not None and extent_id not in path:
            path[extent_id] = None
            extent_id = self._where.get(self._held[extent_id].extent.parent)
        return list(path)

    def _use(self, extent_ids: Iterable[str]) -> None:
        """These, heads first, were used now, and all that they build upon."""
        used: set[str] = set()
        for extent_id in reversed(list(extent_ids)):
            if extent_id not in used:  # else it has been used by one that builds upon it
                path = [extent_id, *self._path(self._held[extent_id].extent.parent)]
                used.update(path)
                for step in path:
                    self._queue(self._held[step].extent).move_to_end(step)

    def _promote(self, keys: Iterable[BlockKey]) -> None:
        """Somebody is likely to come back to these after all."""
        for key in keys:
            held = self._held.get(self._where.get(key, ""))
            if held is not None and not held.extent.kept:
                del self._interior[held.extent.extent_id]
                held.extent = replace(held.extent, kept=True)
                self._kept[held.extent.extent_id] = None
                self._use([held.extent.extent_id])

    def _make_room(self, num_bytes: int, *, parent: BlockKey) -> bool:
        """Evict no more than is needed, for what builds upon `parent`; nothing, and False, if that would not
        do."""
        self._end_leases()
        missing = self.used_bytes + num_bytes - self.budget_bytes
        if missing <= 0:
            return True
        below = self._path(parent)
        victims: dict[str, None] = {}
        for extent_id in self._in_order():
            if missing <= 0:
                break
            held = self._held[extent_id]
            if not held.num_leases and extent_id not in below and self._upon(held) <= victims.keys():
                victims[extent_id] = None
                missing -= cost(held.extent)
        if missing > 0:
            return False
        for extent_id in victims:
            self._evict(extent_id)
        return True

    def _upon(self, held: _Held[T]) -> set[str]:
        """Extents that build upon one."""
        return {extent_id for key in held.found for extent_id in self._builds_upon.get(key, ())}

    def _queue(self, extent: Extent) -> OrderedDict[str, None]:
        return self._kept if extent.kept else self._interior

    def _in_order(self) -> Iterator[str]:
        """Those that go first come first."""
        return chain(self._interior, self._kept)

    def _evict(self, extent_id: str) -> None:
        held = self._held[extent_id]
        self.counts.evicted_extents += 1
        self.counts.evicted_bytes += held.extent.num_bytes
        self.discard(list(held.found))

    def _drop(self, extent_id: str) -> None:
        extent = self._held.pop(extent_id).extent
        del self._queue(extent)[extent_id]
        upon = self._builds_upon[extent.parent]
        upon.remove(extent_id)
        if not upon:
            del self._builds_upon[extent.parent]
        self.used_bytes -= cost(extent)
