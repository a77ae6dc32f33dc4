"""What engines could spare themselves of one prompt: by what they hold, and by what stores have."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.actors.messages import EngineId, PlacementRequest, PrefixSource
from shoal.actors.router.engine_view import EngineView
from shoal.actors.router.fetch_plan import Holder, plan_fetch
from shoal.actors.router.fleet import Fleet, Numbers
from shoal.actors.router.whereabouts import Whereabouts
from shoal.kvstore.boundary import BoundaryRule, Resume
from shoal.kvstore.directory import Directory
from shoal.kvstore.messages import StoreId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One way to take a prompt up."""

    num_on_device: int
    """Leading blocks that the engine holds, or is expected to by the time the request is there."""
    resume: Resume
    """In blocks. Where it goes on computing."""
    computed_tokens: int
    own_tokens: int = 0
    """To fetch from its own node's store,"""
    other_tokens: int = 0
    """and from other nodes'."""

    @property
    def fetched_tokens(self) -> int:
        return self.own_tokens + self.other_tokens

    def fetch_tokens(self, engine: EngineView) -> float:
        """So many tokens could be computed in the time that fetching takes."""
        if not self.own_tokens and not self.other_tokens:
            return 0.0
        own, other = engine.fetch_weights
        return own * self.own_tokens + other * self.other_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far engines may get with a prompt at best, a number for each; all in tokens."""

    prompt_tokens: int
    device_tokens: Numbers
    """Of the blocks that the engine holds or expects, be their state there or not."""
    stored_tokens: int
    """So far nobody gets beyond with all that stores have; 0 if nobody gets further than its device does."""
    own_store_tokens: Numbers | float
    """Beyond what is on the device, the own node's store has no more than this of them."""


_Similar = tuple[int, int, StoreId | None, int, int, int, EngineId | None]


class Outlook:
    def __init__(
        self,
        request: PlacementRequest,
        directory: Directory[Holder],
        stores: Mapping[str, StoreId],
        block_size: int,
    ) -> None:
        """stores: by node."""
        self._request = request
        self._block_size = block_size
        # the last token of a prompt is always computed, and a hit ends at a block
        self._limit = min(len(request.block_keys), (request.num_prompt_tokens - 1) // block_size)
        self._directory = directory
        self._where = Whereabouts(directory, request.block_keys)
        self._leading = directory.leading(self._where.blocks)
        self._furthest: dict[BoundaryRule, int] = {}
        self._ways: dict[_Similar, tuple[Prospect, ...]] = {}
        self._own = stores
        self._bits = {store_id: directory.bit(store_id) for store_id in stores.values()}
        self._any_store = sum(self._bits.values())
        self._num_stored = self._where.leading(self._any_store) if self._any_store else 0

    def of(self, engine: EngineView) -> Prospect:
        """What the request means to that engine. Those that have equally much of the prompt share one."""
        num_on_device = self._num_on_device(engine)
        reach, own_store = num_on_device, None
        if self._any_store:
            device = self._directory.bit(engine.engine_id)
            reach = self._extend(max(num_on_device, self._num_stored), engine, device | self._any_store)
            own_store = self._own.get(engine.node)
        rule = engine.rule
        alone = engine.engine_id if rule.num_segments else None  # who has which segments varies
        needed = rule.num_segments, rule.num_recomputed, rule.num_rewound
        similar = (num_on_device, reach, own_store, *needed, alone)
        ways = self._ways.get(similar)
        if ways is None:
            ways = self._ways[similar] = tuple(self._ways_of(engine, num_on_device, reach))
        return ways[0] if len(ways) == 1 else self._best(ways, engine)

    def reach(self, fleet: Fleet) -> Reach:
        size = self._block_size
        on_device = np.minimum(self._all_on_device(fleet), self._limit)
        furthest = self._furthest_of_any(fleet.engines) if self._any_store else 0
        if furthest <= np.minimum.reduce(on_device):
            furthest = 0
        return Reach(
            prompt_tokens=self._request.num_prompt_tokens,
            device_tokens=on_device * size,
            stored_tokens=furthest * size,
            own_store_tokens=self._in_own_store(fleet, on_device, furthest) * size if furthest else 0.0,
        )

    def _in_own_store(self, fleet: Fleet, on_device: Numbers, furthest: int) -> Numbers:
        """So many of the first `furthest` blocks at most, beyond what each has on its device."""
        held = Counter(self._where.blocks[:furthest]).items()
        num_held, leading = [0] * len(fleet.nodes), [0] * len(fleet.nodes)
        for number, node in enumerate(fleet.nodes):
            if (store_id := self._own.get(node)) is not None:
                bit = self._bits[store_id]
                num_held[number] = sum(num_blocks for holders, num_blocks in held if holders & bit)
                leading[number] = self._leading.get(store_id, 0)
        on_node = fleet.on_node
        beyond: Numbers = np.array(num_held)[on_node] - np.minimum(on_device, np.array(leading)[on_node])
        return beyond

    def _all_on_device(self, fleet: Fleet) -> Numbers:
        """`_num_on_device` of each."""
        lengths = [0] * len(fleet.engines)
        for holder, length in self._leading.items():
            if (i := fleet.index.get(holder)) is not None:
                lengths[i] = length
        next_keys = (*self._request.block_keys, None)
        for i, engine in enumerate(fleet.engines):
            if next_keys[lengths[i]] in engine.expected:
                lengths[i] = self._num_on_device(engine)
        return np.array(lengths, dtype=np.float64)

    def _furthest_of_any(self, engines: Sequence[EngineView]) -> int:
        """The first block that nobody holds, unless somebody expects it: then there may be more behind it."""
        keys, blocks = self._request.block_keys, self._where.blocks
        end = blocks.index(0) if 0 in blocks else len(blocks)
        if end < self._limit and any(keys[end] in engine.expected for engine in engines):
            return self._limit
        return min(end, self._limit)

    def _num_on_device(self, engine: EngineView) -> int:
        """Blocks that it holds without a gap; if it expects the next one, those behind it too."""
        length = self._leading.get(engine.engine_id, 0)
        keys = self._request.block_keys
        if length == len(keys) or keys[length] not in engine.expected:
            return length
        return self._extend(length, engine, self._directory.bit(engine.engine_id))

    def _best(self, ways: Sequence[Prospect], engine: EngineView) -> Prospect:
        """The first that the engine will take: it fetches what is there sooner than computed."""
        on_device, *fetched = ways
        for way in fetched:
            spared = on_device.computed_tokens - way.computed_tokens
            if spared and (way.fetch_tokens(engine) < spared or not engine.is_measured):
                return way
        return on_device

    def _ways_of(self, engine: EngineView, num_on_device: int, reach: int) -> Iterator[Prospect]:
        """With what is on the device; with all stores; with the own node's."""
        device, own_store = self._directory.bit(engine.engine_id), self._own.get(engine.node)
        on_device = self._resume(engine, num_on_device, device)
        yield Prospect(
            num_on_device=num_on_device,
            resume=on_device,
            computed_tokens=self._computed_tokens(engine, on_device),
        )
        if not self._any_store or on_device.boundary >= self._limit:
            return
        yield self._fetching(engine, num_on_device, reach, self._any_store)
        if own_store and self._any_store != self._bits[own_store]:
            own = self._bits[own_store]
            reach = self._extend(num_on_device, engine, device | own)
            yield self._fetching(engine, num_on_device, reach, own)

    def _fetching(self, engine: EngineView, num_on_device: int, reach: int, stores: int) -> Prospect:
        """A segment counts as the blocks that have its bytes; one that is expected too, as they are few."""
        device, own_store = self._directory.bit(engine.engine_id), self._own.get(engine.node)
        resume = self._resume(engine, reach, device | stores)
        where, own = self._where, self._bits[own_store] if own_store else 0
        blocks = range(num_on_device, resume.boundary)
        segments = [i for i in engine.rule.segments_at(resume.start) if not where.segment(i) & device]
        num_own = 0
        if own_store and self._leading.get(own_store, 0) >= resume.boundary:
            num_own = len(blocks)
        elif own:
            num_own = sum(bool(where.blocks[i] & own) for i in blocks)
        own_segments = sum(bool(where.segment(i) & own) for i in segments)
        segment_tokens = round(engine.blocks_per_segment * self._block_size)
        return Prospect(
            num_on_device=num_on_device,
            resume=resume,
            computed_tokens=self._computed_tokens(engine, resume),
            own_tokens=num_own * self._block_size + own_segments * segment_tokens,
            other_tokens=(len(blocks) - num_own) * self._block_size
            + (len(segments) - own_segments) * segment_tokens,
        )

    def _computed_tokens(self, engine: EngineView, resume: Resume) -> int:
        return self._request.num_prompt_tokens - engine.rule.first_token(resume, self._block_size)

    def sources(self, engine: EngineView, resume: Resume) -> tuple[PrefixSource, ...]:
        """Of all that the engine needs there and does not hold: what is only expected may fail to come."""
        if not self._any_store:
            return ()
        own, where = self._directory.bit(engine.engine_id), self._where
        blocks = [i for i in range(resume.boundary) if not where.blocks[i] & own]
        segments = [i for i in engine.rule.segments_at(resume.start) if not where.segment(i) & own]
        if not blocks and not segments:
            return ()
        return plan_fetch(where, blocks, segments, self._bits, self._own.get(engine.node))

    def _extend(self, length: int, engine: EngineView, holders: int) -> int:
        """So many leading blocks are there, and those behind them that a holder has or the engine expects."""
        keys, blocks, expected = self._request.block_keys, self._where.blocks, engine.expected
        while length < len(keys) and (blocks[length] & holders or keys[length] in expected):
            length += 1
        return length

    def _resume(self, engine: EngineView, num_blocks: int, holders: int) -> Resume:
        """With so many blocks, and with the segments that one of the holders has.

        A block that is expected will come with its segment.
        """
        num_blocks = min(num_blocks, self._limit)
        keys, segment, expected = self._request.block_keys, self._where.segment, engine.expected
        if not num_blocks or keys[num_blocks - 1] not in expected:
            num_blocks = min(num_blocks, self._furthest_of_all(engine.rule))
        return engine.rule.furthest(num_blocks, lambda i: bool(segment(i) & holders) or keys[i] in expected)

    def _furthest_of_all(self, rule: BoundaryRule) -> int:
        """Beyond this boundary nobody has the segments: so that not every engine need look for them there."""
        if rule not in self._furthest:
            self._furthest[rule] = rule.furthest(self._limit, lambda i: bool(self._where.segment(i))).boundary
        return self._furthest[rule]
