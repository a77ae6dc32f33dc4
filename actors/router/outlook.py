"""What engines could spare themselves of one prompt: by what they hold, and by what stores have."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.actors.messages import PlacementRequest, PrefixSource
from shoal.actors.router.engine_view import EngineView
from shoal.actors.router.fetch_plan import Holder, plan_fetch
from shoal.actors.router.whereabouts import Whereabouts
from shoal.kvstore.boundary import BoundaryRule, Resume
from shoal.kvstore.directory import Directory
from shoal.kvstore.messages import StoreId

COMPUTE_WEIGHT = 4.0
"""To compute a token costs so many times what it costs to stand behind one: it delays all who come later."""

OWN_FETCH_WEIGHT, OTHER_FETCH_WEIGHT = 0.25, 1.0
"""To fetch one, from the engine's own node's store or from another's: it delays its own request alone, and by
less than computing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    num_on_device: int
    """Leading blocks that the engine holds, or is expected to by the time the request is there."""
    resume: Resume
    """In blocks. Where it would go on computing, with what it holds and what is worth fetching."""
    tokens: float
    """What the request costs there by itself, in tokens that stand there."""


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
        self._leading = directory.match(request.block_keys)
        self._furthest: dict[BoundaryRule, int] = {}
        self._own = stores
        self._bits = {store_id: directory.bit(store_id) for store_id in stores.values()}
        self._any_store = sum(self._bits.values())
        self._num_stored = self._where.leading(self._any_store) if self._any_store else 0

    def of(self, engine: EngineView) -> Prospect:
        num_on_device = self._num_on_device(engine)
        on_device = self._resume(engine, num_on_device, self._directory.bit(engine.engine_id))
        alone = COMPUTE_WEIGHT * self.computed_tokens(on_device)
        if self._any_store and on_device.boundary < self._limit:
            with_stores = self._resume_with_stores(engine, num_on_device)
            fetch_tokens = self._fetch_tokens(engine, num_on_device, with_stores)
            helped = COMPUTE_WEIGHT * self.computed_tokens(with_stores) + fetch_tokens
            if helped < alone:
                return Prospect(num_on_device=num_on_device, resume=with_stores, tokens=helped)
        return Prospect(num_on_device=num_on_device, resume=on_device, tokens=alone)

    def computed_tokens(self, resume: Resume) -> int:
        return self._request.num_prompt_tokens - resume.start * self._block_size

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

    def _num_on_device(self, engine: EngineView) -> int:
        length = self._leading.get(engine.engine_id, 0)
        return self._extend(length, engine, self._directory.bit(engine.engine_id))

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

    def _resume_with_stores(self, engine: EngineView, num_on_device: int) -> Resume:
        holders = self._directory.bit(engine.engine_id) | self._any_store
        num_blocks = self._extend(max(num_on_device, self._num_stored), engine, holders)
        return self._resume(engine, num_blocks, holders)

    def _fetch_tokens(self, engine: EngineView, num_on_device: int, resume: Resume) -> float:
        """A segment counts as a block. Those that are expected are counted too: they are few."""
        own_store = self._own.get(engine.node)
        bit = self._bits[own_store] if own_store else 0
        device = self._directory.bit(engine.engine_id)
        where = self._where
        segments = [i for i in engine.rule.segments_at(resume.start) if not where.segment(i) & device]
        num_own = sum(bool(where.segment(i) & bit) for i in segments)
        num_fetched = max(0, resume.boundary - num_on_device) + len(segments)
        if own_store and self._leading.get(own_store, 0) >= resume.boundary:
            num_own += max(0, resume.boundary - num_on_device)
        elif bit:
            num_own += sum(bool(where.blocks[i] & bit) for i in range(num_on_device, resume.boundary))
        num_other = num_fetched - num_own
        return self._block_size * (OWN_FETCH_WEIGHT * num_own + OTHER_FETCH_WEIGHT * num_other)
