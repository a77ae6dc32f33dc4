"""Where a request goes. Plain state and arithmetic; the clock is injected."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shoal.actors.messages import (
    EngineId,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    RequestId,
)
from shoal.actors.router.prefix_feed import PrefixFeed
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory

COMPUTE_WEIGHT = 4.0
"""To compute a token costs so many times what it costs to stand behind one: it delays all who come later."""

OUTPUT_TOKENS = 128
"""What a request will draw, as far as one can know: so often it computes a row beside its neighbours."""

ROW_WEIGHT = 2.0
"""What such a row costs, in tokens that stand there: beside others it lengthens a step by about as much as
two tokens of a prompt do."""

RECENT_WEIGHT, RECENT_S = 0.25, 60.0
"""A token that was placed lately counts so much of one that stands there now, and fades by e in this time.
Without it, requests that come one by one, each to idle engines, would all follow the prefix they share."""

NOTE_LIFETIME_S = 10.0
"""A placement whose request never reaches its engine (a client that left meanwhile) is counted this long."""

EXPECTATION_LIFETIME_S = 60.0
"""How long a prefix is believed to be on its way where it was placed: longer than a prompt waits. One that
never comes does little harm, as the next request that it draws there computes it."""

UNMEASURED_TOKENS_PER_S = 1000.0
"""While no engine at all has measured itself."""

CONVINCING_TOKENS = 16384
"""So much recent work makes an engine's measure of its speed count by half. One that was slow once, as with a
first prompt, would otherwise be passed over, and so never measure itself again."""

Attempt = tuple[RequestId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId
    expected_hit_tokens: int
    """Tokens of the prompt that the engine is believed to hold."""


class _Engine:
    """What is known of one engine: its own account, and our placements that the account does not have yet."""

    def __init__(self, engine_id: EngineId, directory: Directory[EngineId]) -> None:
        self.engine_id = engine_id
        self.feed = PrefixFeed(engine_id, directory)
        self.tokens_per_s = 0.0
        """By its own measure; 0 before the first."""
        self.last_placed = 0
        self._sequence = 0
        self._num_requests = 0
        self._uncomputed_tokens = 0
        self._notes: OrderedDict[Attempt, tuple[float, int]] = OrderedDict()  # when, tokens to compute
        self._noted_tokens = 0
        """Of all notes: to sum them up for each placement would cost a burst its square."""
        self._expected: OrderedDict[BlockKey, float] = OrderedDict()  # since when
        self._recent_tokens, self._recent_at = 0.0, 0.0

    @property
    def num_requests(self) -> int:
        return self._num_requests + len(self._notes)

    def standing_tokens(self, now: float) -> float:
        """Work that a newcomer meets here, in tokens."""
        waiting = (
            self._uncomputed_tokens + self._noted_tokens + ROW_WEIGHT * OUTPUT_TOKENS * self.num_requests
        )
        return waiting + RECENT_WEIGHT * self.recent_tokens(now)

    def recent_tokens(self, now: float) -> float:
        """Work that was placed here, faded."""
        return self._recent_tokens * math.exp((self._recent_at - now) / RECENT_S)

    def believed_tokens_per_s(self, fastest: float, now: float) -> float:
        """Its own measure as far as that convinces, for the rest as fast as any, so that it is tried."""
        if not self.tokens_per_s:
            return fastest
        recent = self.recent_tokens(now)
        return fastest + (self.tokens_per_s - fastest) * recent / (recent + CONVINCING_TOKENS)

    def expects(self, block_key: BlockKey) -> bool:
        return block_key in self._expected

    def report(self, report: EngineReport) -> None:
        for key in report.received:
            self._drop_note(key)
        for block_key in (*report.stored, *report.removed):
            self._expected.pop(block_key, None)
        self.feed.report(report)
        if report.sequence > self._sequence:  # a late one is no news of what stands there now
            self._sequence = report.sequence
            self._num_requests = report.num_requests
            self._uncomputed_tokens = report.uncomputed_tokens
            self.tokens_per_s = report.tokens_per_s

    def note(self, request: PlacementRequest, hit_blocks: int, computed_tokens: int, now: float) -> None:
        """The request goes here: it is work, and its prefix will be here, though no report says so yet."""
        attempt = (request.request_id, request.attempt)
        self._drop_note(attempt)
        self._notes[attempt] = (now, computed_tokens)
        self._noted_tokens += computed_tokens
        for block_key in request.block_keys[hit_blocks:]:
            self._expected.setdefault(block_key, now)
        self._recent_tokens = self.recent_tokens(now) + computed_tokens + OUTPUT_TOKENS
        self._recent_at = now

    def forget_old(self, now: float) -> None:
        while self._notes and now - next(iter(self._notes.values()))[0] >= NOTE_LIFETIME_S:
            self._drop_note(next(iter(self._notes)))
        while self._expected and now - next(iter(self._expected.values())) >= EXPECTATION_LIFETIME_S:
            self._expected.popitem(last=False)

    def _drop_note(self, attempt: Attempt) -> None:
        _, tokens = self._notes.pop(attempt, (0.0, 0))
        self._noted_tokens -= tokens


class CheapestEngine:
    """Places where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT · tokens to compute there + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more; then
    another engine has it too. Among equals the one placed on longest ago is next.

    An engine's report is some milliseconds old. What was placed since is known from our own notes: without
    them a burst would go where the last report was lowest, and would see nothing of the prefix it shares.
    """

    def __init__(self, *, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._directory: Directory[EngineId] = Directory()
        self._engines: dict[EngineId, _Engine] = {}
        self._num_placed = 0

    def set_engines(self, engine_ids: Iterable[EngineId]) -> None:
        """Exactly these may be placed on. What is known of those that stay is kept, of the others nothing."""
        wanted = set(engine_ids)
        for gone in self._engines.keys() - wanted:
            del self._engines[gone]
            self._directory.forget(gone)
        for new in sorted(wanted - self._engines.keys()):
            self._engines[new] = _Engine(new, self._directory)

    def place(self, request: PlacementRequest) -> Placement | None:
        """None when there is no engine but those that the request excludes."""
        now = self._clock()
        engines = [e for engine_id, e in self._engines.items() if engine_id not in request.exclude]
        if not engines:
            return None
        hits = self._hit_blocks(request.block_keys, engines, now)
        fastest = max(e.tokens_per_s for e in self._engines.values()) or UNMEASURED_TOKENS_PER_S

        def rank(engine: _Engine) -> tuple[float, int]:
            computed = request.num_prompt_tokens - self._hit_tokens(request, hits[engine])
            tokens = COMPUTE_WEIGHT * computed + engine.standing_tokens(now)
            return 1e3 * tokens / engine.believed_tokens_per_s(fastest, now), engine.last_placed

        engine = min(engines, key=rank)
        self._num_placed += 1
        engine.last_placed = self._num_placed
        hit_tokens = self._hit_tokens(request, hits[engine])
        engine.note(request, hits[engine], request.num_prompt_tokens - hit_tokens, now)
        return Placement(engine_id=engine.engine_id, expected_hit_tokens=hit_tokens)

    def report(self, report: EngineReport) -> None:
        """Take an engine's account. An engine that may not be placed on has none."""
        if engine := self._engines.get(report.engine_id):
            engine.report(report)

    def take_snapshot_requests(self) -> list[EngineId]:
        """Engines to be asked for a snapshot now; `restore` or `give_up` must follow for each."""
        return [engine_id for engine_id, engine in self._engines.items() if engine.feed.take_request()]

    def restore(self, snapshot: PrefixSnapshot) -> None:
        if engine := self._engines.get(snapshot.engine_id):
            engine.feed.restore(snapshot)

    def give_up(self, engine_id: EngineId) -> None:
        """No snapshot came; the engine may be asked again."""
        if engine := self._engines.get(engine_id):
            engine.feed.give_up()

    def loads(self) -> dict[EngineId, int]:
        """Requests counted on each engine now."""
        now = self._clock()
        for engine in self._engines.values():
            engine.forget_old(now)
        return {engine_id: engine.num_requests for engine_id, engine in self._engines.items()}

    def held(self) -> dict[EngineId, frozenset[BlockKey]]:
        """What each engine is known to hold; only of engines whose reports are followed without a gap."""
        return {e: self._directory.keys_of(e) for e, engine in self._engines.items() if engine.feed.following}

    def _hit_blocks(
        self, keys: Sequence[BlockKey], engines: Iterable[_Engine], now: float
    ) -> dict[_Engine, int]:
        """How many leading blocks each engine holds, or is expected to by the time the request is there."""
        held = self._directory.match(keys)
        hits = {}
        for engine in engines:
            engine.forget_old(now)
            length = held.get(engine.engine_id, 0)
            while length < len(keys) and self._will_hold(engine, keys[length]):
                length += 1
            hits[engine] = length
        return hits

    def _will_hold(self, engine: _Engine, key: BlockKey) -> bool:
        return engine.expects(key) or self._directory.holds(engine.engine_id, key)

    def _hit_tokens(self, request: PlacementRequest, hit_blocks: int) -> int:
        """The last token of a prompt is always computed, and a hit ends at a block."""
        return min(hit_blocks, (request.num_prompt_tokens - 1) // self._block_size) * self._block_size
