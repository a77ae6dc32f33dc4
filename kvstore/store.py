"""Which extents a node's store holds, and which of them go when room is needed. Plain state: the bytes are
elsewhere, behind opaque tickets."""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.changes import Changes
from shoal.kvstore.messages import Extent, Found, ReadExtent, Reading
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
    used: int
    """When this was last used, or one that is gone by now and built upon it: a count of uses."""
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
    need, then the others. Only one that nothing builds upon can go, and it joins the queue when that is so:
    tails go before heads. Whoever uses one uses all that it builds upon. That is not said to each of them at
    once, which would cost a long path its square: one that goes leaves the time of its use to what it builds
    upon. One that is leased is passed over; and nothing is evicted for an extent that builds upon it.
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
        self._num_uses = 0
        self._queues: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        """By whether they are kept: heaps of when an extent was used, and its ID. What is no longer true is
        passed over."""
        self._leases: dict[int, _Lease] = {}  # those that end first come first
        self._next_lease = 1

    def __len__(self) -> int:
        """Keys that can be found."""
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._where)

    def find(self, keys: Sequence[BlockKey]) -> Found:
        """What could be read now of these blocks, and of their segments."""
        return Found(
            blocks=tuple(i for i, key in enumerate(keys) if key in self._where),
            segments=tuple(i for i, key in enumerate(keys) if segment_key(key) in self._where),
        )

    def put_start(self, extent: Extent) -> Extent | None:
        """What of the extent is wanted, with room made for it; None if nothing is.

        Must be followed by put_end or put_abort. Raises ValueError for an extent that is coming already.
        """
        if extent.extent_id in self._coming or extent.extent_id in self._held:
            raise ValueError(f"extent {extent.extent_id!r} was offered before")
        wanted: Extent | None = extent
        if not self._where.keys().isdisjoint(keys := extent.keys):
            if extent.kept:
                self._promote(keys)
            wanted = extent.without(self._where)
        if wanted is None:
            self.counts.duplicate_extents += 1
            return None
        num_bytes = cost(wanted)
        if not self._make_room(num_bytes, parent=wanted.parent):
            self.counts.refused_extents += 1
            return None
        self._coming[wanted.extent_id] = wanted
        self.used_bytes += num_bytes
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
        self._held[extent_id] = _Held(extent, ticket, set(found), used=0)
        self._where.update(dict.fromkeys(found, extent_id))
        self._builds_upon.setdefault(extent.parent, set()).add(extent_id)
        self._use(extent_id)
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
        for extent_id in reversed(entries):  # tails first
            self._use(extent_id)
        self.counts.reads += bool(entries)
        return Reading(
            lease_id=self._lease(tuple(entries)),
            extents=tuple(self._read_extent(self._held[i], set(wanted)) for i, wanted in entries.items()),
        )

    def hottest(self, max_bytes: int) -> list[tuple[Extent, T]]:
        """What is found here, with its tickets: what was used last comes first, but behind what it builds
        upon; so many bytes of the budget at most."""
        chosen: list[tuple[Extent, T]] = []
        seen: set[str] = set()
        for last in sorted(self._held.values(), key=lambda held: (held.extent.kept, held.used), reverse=True):
            path: list[_Held[T]] = []
            held: _Held[T] | None = last
            while held is not None and held.extent.extent_id not in seen:
                seen.add(held.extent.extent_id)
                path.append(held)
                held = self._held.get(self._where.get(held.extent.parent, ""))
            for step in reversed(path):
                max_bytes -= cost(step.extent)
                if max_bytes < 0:
                    return chosen
                chosen.append((step.extent, step.ticket))
        return chosen

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
            if held.found:
                self._line_up(held)  # nothing may be left that builds upon it
            else:
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
        queues = {kept: set(queue) for kept, queue in self._queues.items()}
        for extent_id, held in self._held.items():
            in_line = (held.used, extent_id) in queues[held.extent.kept]
            assert in_line or self._upon(held), "nothing builds upon it, and it will never go"

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

    def _use(self, extent_id: str) -> None:
        """This was used now, and all that it builds upon."""
        self._num_uses += 1
        held = self._held[extent_id]
        held.used = self._num_uses
        self._line_up(held)

    def _line_up(self, held: _Held[T]) -> None:
        queue = self._queues[held.extent.kept]
        heapq.heappush(queue, (held.used, held.extent.extent_id))
        if len(queue) > 2 * len(self._held) + 64:
            queue[:] = sorted(place for place in set(queue) if self._is_true(place, held.extent.kept))

    def _is_true(self, place: tuple[int, str], kept: bool) -> bool:
        used, extent_id = place
        held = self._held.get(extent_id)
        return held is not None and held.used == used and held.extent.kept == kept

    def _promote(self, keys: Iterable[BlockKey]) -> None:
        """Somebody is likely to come back to these after all."""
        for key in keys:
            held = self._held.get(self._where.get(key, ""))
            if held is not None and not held.extent.kept:
                held.extent = replace(held.extent, kept=True)
                self._use(held.extent.extent_id)

    def _make_room(self, num_bytes: int, *, parent: BlockKey) -> bool:
        """Evict no more than is needed, for what builds upon `parent`; nothing, and False, if that would not
        do."""
        self._end_leases()
        missing = self.used_bytes + num_bytes - self.budget_bytes
        if missing <= 0 or num_bytes > self.budget_bytes:
            return missing <= 0
        below = self._where.get(parent)  # what that builds upon does not go before it
        victims: dict[str, None] = {}
        passed_over: list[_Held[T]] = []
        for extent_id in self._in_order(victims):
            held = self._held[extent_id]
            if held.num_leases or extent_id == below:
                passed_over.append(held)
                continue
            victims[extent_id] = None
            missing -= cost(held.extent)
            if missing <= 0:
                break
            self._bequeath(held)
        for held in passed_over:
            self._line_up(held)
        for extent_id in victims:
            if missing > 0:
                self._line_up(self._held[extent_id])
            else:
                self._evict(extent_id)
        return missing <= 0

    def _in_order(self, victims: Container[str]) -> Iterator[str]:
        """Out of their queues, those that go first come first; victims are as good as gone."""
        while any(self._queues.values()):
            kept = not self._queues[False]
            place = heapq.heappop(self._queues[kept])
            _, extent_id = place
            if extent_id in victims or not self._is_true(place, kept):
                continue
            if all(other in victims for other in self._upon(self._held[extent_id])):
                yield extent_id

    def _bequeath(self, held: _Held[T]) -> None:
        """What it builds upon was used when it was, and may be the next to go."""
        below = self._held.get(self._where.get(held.extent.parent, ""))
        if below is not None:
            below.used = max(below.used, held.used)
            self._line_up(below)

    def _upon(self, held: _Held[T]) -> set[str]:
        """Extents that build upon one."""
        return {i for key in held.found if key in self._builds_upon for i in self._builds_upon[key]}

    def _evict(self, extent_id: str) -> None:
        held = self._held[extent_id]
        self.counts.evicted_extents += 1
        self.counts.evicted_bytes += held.extent.num_bytes
        self.discard(list(held.found))

    def _drop(self, extent_id: str) -> None:
        held = self._held.pop(extent_id)
        extent = held.extent
        upon = self._builds_upon[extent.parent]
        upon.remove(extent_id)
        if not upon:
            del self._builds_upon[extent.parent]
        self._bequeath(held)
        self.used_bytes -= cost(extent)
