"""Prefixes on their way from the stores to the device."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.fetch_plan import FetchPlan, Offers, plan_fetch
from shoal.actors.engine.pools import Holding, Pools
from shoal.actors.engine.saves import Occasion, Saves
from shoal.actors.engine.sequence import Sequence
from shoal.actors.engine.sharing import find_hit
from shoal.actors.engine.transfers import Fallback, Fetch, FetchId, Piece, Place, StoreRead, StoreView
from shoal.actors.messages import StoreId
from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.boundary import BoundaryRule, Resume


@dataclass(slots=True, eq=False)
class _Underway:
    fetch: Fetch
    keys: list[BlockKey]
    """[root, key of block 0, ...] up to the boundary that is hoped for."""
    places: dict[BlockKey, Place]
    """Of each name that was asked for."""
    waiting: list[Sequence]
    """The one it was planned for, then others that lack some of the same."""
    is_taken: bool = False
    is_void: bool = False
    """The prefix cache has been reset since: nobody may have what comes."""
    holding: Holding = field(default_factory=Holding)
    """From `land` on: the path from its first block, what was there and what comes."""
    first: int = 0
    """The first block that comes,"""
    segments: tuple[int, ...] = ()
    """and those whose segments come."""

    @property
    def path(self) -> list[BlockKey]:
        return self.keys[1:]


class Fetches:
    """What sequences wait for before they are admitted.

    A sequence that fetches keeps what it has found on the device, and then also what has come, until it is
    admitted; unless the memory is needed sooner, see `give_way`. Two that lack the same at the same time wait
    for one fetch. Whatever does not come only means that more is computed.
    """

    def __init__(self, pools: Pools, rule: BoundaryRule, saves: Saves, view: StoreView | None) -> None:
        self._pools = pools
        self._cache = pools.prefix_cache
        self._rule = rule
        self._saves = saves
        self._view = view
        self._underway: dict[FetchId, _Underway] = {}
        self._coming: dict[BlockKey, FetchId] = {}
        self._kept: dict[Sequence, Holding] = {}
        self._next = 1
        self.fallbacks: Counter[Fallback] = Counter()
        self.fetched_tokens: Counter[Place] = Counter()

    def __len__(self) -> int:
        """Fetches that have not ended, be it only because their bytes are still being copied."""
        return len(self._underway)

    def begin(self, sequence: Sequence, *, after: Fetch | None = None) -> bool:
        """Whether the sequence waits from now on, for a fetch of its own or for one that is under way.

        after: another's, for which it has waited until now. It waits for no other's any more, and does not
        ask again for what that one could not get.
        """
        sequence.may_fetch = False
        if self._view is None or not sequence.sources:
            return False
        block_size = self._pools.block_size
        path = sequence.block_keys(0, sequence.num_skippable // block_size, block_size)
        plan = self._plan(sequence, path, self._view)
        if plan is None:
            return False
        names = {path[i]: store for i, store in plan.blocks.items()}
        names |= {segment_key(path[i]): store for i, store in plan.segments.items()}
        if after is not None and not after.asked_for.isdisjoint(names.items()):
            return False
        others = [self._coming[name] for name in names if name in self._coming]
        if others and after is None:
            underway = self._underway[others[0]]
            underway.waiting.append(sequence)
        else:
            underway = self._start(sequence, path[: plan.resume.boundary], names)
        sequence.fetching = underway.fetch.fetch_id
        self._keep(sequence, path, plan.resume)
        return True

    def _plan(self, sequence: Sequence, path: Series[BlockKey], view: StoreView) -> FetchPlan | None:
        """The furthest boundary that is worth its bytes: with all stores, else with the own node's only."""
        hit = find_hit(self._cache, self._rule, path)
        offers = Offers.of(sequence.sources, self._saves.own)
        for asked in (offers, offers.only(self._saves.own)):
            plan = plan_fetch(
                self._rule,
                asked,
                num_blocks=len(path),
                num_matched=hit.num_matched,
                has_segment=lambda i: path[i] in self._cache.segments,
            )
            gain = (plan.resume.start - hit.resume.start) * self._pools.block_size
            if gain > 0 and view.worth(gain, *self._num_bytes(plan, view)):
                return plan
        return None

    def _num_bytes(self, plan: FetchPlan, view: StoreView) -> tuple[int, int]:
        """From the own node's store, and from others."""
        own = other = 0
        for stores, size in ((plan.blocks, view.bytes_per_block), (plan.segments, view.bytes_per_segment)):
            num_own = sum(store == self._saves.own for store in stores.values())
            own += num_own * size
            other += (len(stores) - num_own) * size
        return own, other

    def _start(
        self, sequence: Sequence, path: list[BlockKey], names: Mapping[BlockKey, StoreId]
    ) -> _Underway:
        fetch_id = FetchId(self._next)
        self._next += 1
        own = self._saves.own
        underway = _Underway(
            fetch=Fetch(fetch_id=fetch_id, reads=tuple(self._reads(path, names))),
            keys=[sequence.keys[0], *path],
            places={name: "own_store" if store == own else "other_store" for name, store in names.items()},
            waiting=[sequence],
        )
        self._underway[fetch_id] = underway
        self._coming |= {name: fetch_id for name in names if name not in self._coming}
        return underway

    def _reads(self, path: Iterable[BlockKey], names: Mapping[BlockKey, StoreId]) -> Iterator[StoreRead]:
        assert self._view is not None
        blocks = set(path)
        for store_id in dict.fromkeys(names.values()):
            keys = tuple(name for name, store in names.items() if store == store_id)
            num_blocks = sum(key in blocks for key in keys)
            num_bytes = num_blocks * self._view.bytes_per_block
            num_bytes += (len(keys) - num_blocks) * self._view.bytes_per_segment
            yield StoreRead(store_id=store_id, keys=keys, num_bytes=num_bytes)

    def take(self) -> list[Fetch]:
        """Those that were begun since they were last taken."""
        untaken = [underway for underway in self._underway.values() if not underway.is_taken]
        for underway in untaken:
            underway.is_taken = True
        return [underway.fetch for underway in untaken]

    def land(self, fetch_id: FetchId, names: Iterable[BlockKey], *, headroom: int) -> list[Piece]:
        """Memory for what has come, as far as that leads to a boundary and there is room for it.

        headroom: blocks to leave for those that run.
        """
        underway = self._underway[fetch_id]
        assert not underway.holding.block_table, f"fetch {fetch_id} has landed"
        if underway.is_void or not underway.waiting:
            return []
        came, path = set(names), underway.path
        matched = self._cache.match(path)
        room = max(0, self._pools.room_beside(matched) - headroom)
        reach = num_came = len(matched) + _run(path[len(matched) :], came)
        reach = min(reach, len(matched) + room)
        resume = self._rule.furthest(
            reach, lambda i: path[i] in self._cache.segments or segment_key(path[i]) in came
        )
        if resume.boundary < len(path):
            self.fallbacks[Fallback.NO_ROOM if reach < num_came else Fallback.MISSING] += 1
        if resume.start <= find_hit(self._cache, self._rule, path).resume.start:
            return []
        return self._make_room(underway, resume, len(matched))

    def _make_room(self, underway: _Underway, resume: Resume, num_matched: int) -> list[Piece]:
        path = underway.path
        holding = self._hold(path, resume)
        lacking = [i for i in self._rule.segments_at(resume.start) if i not in holding.segments]
        if len(lacking) > self._pools.num_available_segments:
            self._pools.release(holding)
            self.fallbacks[Fallback.NO_ROOM] += 1
            return []
        underway.holding = holding
        underway.first, underway.segments = min(num_matched, resume.boundary), tuple(lacking)
        blocks = self._pools.claim_blocks(resume.boundary - underway.first)
        holding.block_table += blocks
        pieces = [
            Piece(key=underway.keys[i + 1], parent=underway.keys[i], block=block)
            for i, block in enumerate(blocks, underway.first)
        ]
        for i in lacking:
            segment = self._pools.claim_segment()
            assert segment is not None
            holding.segments[i] = segment
            pieces.append(Piece(key=segment_key(path[i]), parent=path[i], segment=segment))
        return pieces

    def landed(self, fetch_id: FetchId) -> None:
        """The pieces hold what they are named after: cache them, and let those who wait go on."""
        underway = self._end(fetch_id)
        if underway.holding.block_table and not underway.is_void:
            self._insert(underway)
        for sequence in underway.waiting:
            sequence.fetching = None
            sequence.fetched.update(self._places_of_blocks(underway))
            if sequence is underway.waiting[0] or not self.begin(sequence, after=underway.fetch):
                path = underway.path
                self._keep(sequence, path, find_hit(self._cache, self._rule, path).resume)
        self._pools.release(underway.holding)

    def _insert(self, underway: _Underway) -> None:
        keys, table = underway.keys, underway.holding.block_table
        first, own = underway.first, table[underway.first :]
        path = keys[first + 1 : len(table) + 1]
        kept = self._cache.insert(keys[first], path, own)
        table[first:] = kept
        self._cache.unlock([block for block, other in zip(own, kept, strict=True) if block != other])
        state = [keys[i + 1] for i in underway.segments]
        for i, key in zip(underway.segments, state, strict=True):
            self._cache.segments.attach(key, underway.holding.segments[i], kept=True)
        names = [*path, *map(segment_key, state)]
        self._saves.stored(name for name in names if underway.places.get(name) == "own_store")
        self._saves.note(Occasion.CACHED, path, state)
        self._saves.note(Occasion.SEEN_AGAIN, path, state)
        self.fetched_tokens.update(self._tokens_by_place(underway, path))

    def _tokens_by_place(self, underway: _Underway, path: Iterable[BlockKey]) -> dict[Place, int]:
        places = Counter(underway.places[key] for key in path)
        return {place: num_blocks * self._pools.block_size for place, num_blocks in places.items()}

    def _places_of_blocks(self, underway: _Underway) -> dict[BlockKey, Place]:
        path = underway.keys[underway.first + 1 : len(underway.holding.block_table) + 1]
        return {key: underway.places[key] for key in path}

    def failed(self, fetch_id: FetchId, reason: Fallback) -> None:
        """Nothing has come, or the copy of what has: nobody must wait for it any longer."""
        underway = self._end(fetch_id)
        self.fallbacks[reason] += 1
        for sequence in underway.waiting:
            sequence.fetching = None
            sequence.num_promised = 0
        self._pools.release(underway.holding)

    def _end(self, fetch_id: FetchId) -> _Underway:
        underway = self._underway.pop(fetch_id)
        for name in underway.places:
            if self._coming.get(name) == fetch_id:
                del self._coming[name]
        return underway

    def admitted(self, sequence: Sequence, *, num_promised: int) -> None:
        """It owns by now what it uses of what was kept for it."""
        self._let_go(sequence)
        if sequence.num_computed < num_promised:
            self.fallbacks[Fallback.EVICTED] += 1

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone. What is being copied for it stays owned until the copy has ended."""
        self._let_go(sequence)
        if sequence.fetching is not None:
            underway = self._underway[sequence.fetching]
            underway.waiting.remove(sequence)
            if not underway.waiting and not underway.is_taken:
                self._end(sequence.fetching)
            sequence.fetching = None

    def reset(self) -> None:
        """What was saved is not what would be computed now: those who wait compute."""
        fetching = [sequence for underway in self._underway.values() for sequence in underway.waiting]
        for underway in self._underway.values():
            underway.is_void = True
        self._coming.clear()  # who comes from now on is not to wait for any of it
        for sequence in [*self._kept, *fetching]:
            sequence.fetched.clear()
            sequence.num_promised = 0
            self.forget(sequence)

    def num_kept_blocks(self, *, besides: Sequence) -> int:
        """At most so many become available if all others give way."""
        return sum(len(kept.block_table) for sequence, kept in self._kept.items() if sequence is not besides)

    def give_way(self, *, besides: Sequence | None = None) -> bool:
        """Let go of what is kept for the last in order that waits; whether there was any such."""
        others = [sequence for sequence in self._kept if sequence is not besides]
        if not others:
            return False
        self._let_go(max(others, key=lambda sequence: sequence.rank))
        return True

    def _keep(self, sequence: Sequence, path: Series[BlockKey], resume: Resume) -> None:
        """Own for it what there is of what it needs to be taken up there."""
        holding = self._hold(path, resume)
        self._let_go(sequence)
        self._kept[sequence] = holding
        sequence.num_promised = self._rule.first_token(resume, self._pools.block_size)

    def _let_go(self, sequence: Sequence) -> None:
        if (holding := self._kept.pop(sequence, None)) is not None:
            self._pools.release(holding)

    def _hold(self, path: Series[BlockKey], resume: Resume) -> Holding:
        blocks: list[BlockId] = self._cache.match(path[: resume.boundary])
        self._cache.lock(blocks)
        state = [i for i in self._rule.segments_at(resume.start) if path[i] in self._cache.segments]
        segments = self._cache.segments.lock([path[i] for i in state])
        return Holding(block_table=blocks, segments=dict(zip(state, segments, strict=True)))

    def holdings(self) -> Iterator[Holding]:
        yield from self._kept.values()
        yield from (underway.holding for underway in self._underway.values())

    def check(self) -> None:
        for fetch_id, underway in self._underway.items():
            assert all(sequence.fetching == fetch_id for sequence in underway.waiting)
        assert set(self._coming.values()) <= self._underway.keys()


def _run(names: Iterable[BlockKey], there: Container[BlockKey]) -> int:
    """How many of them are there, from the first to the last before one that is not."""
    count = 0
    for name in names:
        if name not in there:
            break
        count += 1
    return count
