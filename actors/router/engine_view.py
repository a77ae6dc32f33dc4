"""What is known of one engine: its own account, and our placements that the account does not have yet."""

import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from shoal.actors.messages import EngineInfo, EngineReport, PlacementRequest, RequestId
from shoal.kvstore.block_hash import BlockKey

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

OWN_FETCH_WEIGHT, OTHER_FETCH_WEIGHT = 0.25, 1.0
"""To fetch a token, from the engine's own node's store or from another's, by what it takes to compute one,
while the engine has not said how fast it does either: a fetch delays its own request alone."""

UNMEASURED_TOKENS_PER_S = 1000.0
"""While no engine at all has measured itself."""

CONVINCING_TOKENS = 16384
"""So much recent work makes an engine's measure of its speed count by half. One that was slow once, as with a
first prompt, would otherwise be passed over, and so never measure itself again."""

NUM_NUMBERS = 8
"""That a view writes for whoever weighs all engines at once (`Fleet`)."""

Attempt = tuple[RequestId, int]


class EngineView:
    def __init__(self, info: EngineInfo) -> None:
        self.engine_id = info.engine_id
        self.node = info.node
        self.rule = info.rule
        self.blocks_per_segment = info.segment_bytes / info.block_bytes if info.block_bytes else 1.0
        """By their bytes: to fetch a segment takes as long as so many blocks."""
        self.tokens_per_s = 0.0
        """By its own measure; 0 before the first."""
        self.is_measured = False
        """Whether it knows how fast it computes and fetches."""
        self.fetch_weights = OWN_FETCH_WEIGHT, OTHER_FETCH_WEIGHT
        self.last_placed = 0
        """The number of the placement."""
        self._sequence = 0
        self._num_requests = 0
        self._uncomputed_tokens = 0
        self._notes: OrderedDict[Attempt, tuple[float, int]] = OrderedDict()  # when, tokens to compute
        self._noted_tokens = 0
        """Of all notes: to sum them up for each placement would cost a burst its square."""
        self.expected: OrderedDict[BlockKey, float] = OrderedDict()  # since when
        """Blocks that will be here, though no report has said so yet."""
        self._recent_tokens, self._recent_computed, self._recent_at = 0.0, 0.0, 0.0
        self._numbers = np.zeros(NUM_NUMBERS)

    @property
    def num_requests(self) -> int:
        return self._num_requests + len(self._notes)

    @property
    def waiting_tokens(self) -> float:
        """Work that stands here now, in tokens."""
        num_requests = self._num_requests + len(self._notes)
        return self._uncomputed_tokens + self._noted_tokens + ROW_WEIGHT * OUTPUT_TOKENS * num_requests

    def write_to(self, numbers: NDArray[np.float64]) -> None:
        """Write there what is weighed of this engine, now and whenever it changes."""
        self._numbers = numbers
        self._write()

    def _write(self) -> None:
        self._numbers[:] = (
            self.waiting_tokens,
            self.tokens_per_s,
            *self.fetch_weights,
            self.last_placed,
            self._recent_tokens,
            self._recent_computed,
            self._recent_at,
        )

    def recent(self, now: float) -> tuple[float, float]:
        """Work that was placed here, faded: all tokens; those of prompts, which are no guess."""
        kept = math.exp((self._recent_at - now) / RECENT_S)
        return self._recent_tokens * kept, self._recent_computed * kept

    def report(self, report: EngineReport) -> None:
        for key in report.received:
            self._drop_note(key)
        for block_key in (*report.stored, *report.removed):
            self.expected.pop(block_key, None)
        if report.sequence > self._sequence:  # a late one is no news of what stands there now
            self._sequence = report.sequence
            self._num_requests = report.num_requests
            self._uncomputed_tokens = report.uncomputed_tokens
            self.tokens_per_s = report.tokens_per_s
            self._weigh_fetches(report)
        self._write()

    def _weigh_fetches(self, report: EngineReport) -> None:
        own, other = report.own_fetch_tokens_per_s, report.other_fetch_tokens_per_s
        self.is_measured = bool(self.tokens_per_s and own and other)
        self.fetch_weights = OWN_FETCH_WEIGHT, OTHER_FETCH_WEIGHT
        if self.is_measured:
            self.fetch_weights = self.tokens_per_s / own, self.tokens_per_s / other

    def note(
        self, request: PlacementRequest, num_held: int, computed_tokens: int, now: float, number: int
    ) -> None:
        """The request goes here: it is work, and its prefix will be here, though no report says so yet.

        num_held: leading blocks that are here already, or expected. number: of placements so far.
        """
        self.last_placed = number
        attempt = (request.request_id, request.attempt)
        self._drop_note(attempt)
        self._notes[attempt] = (now, computed_tokens)
        self._noted_tokens += computed_tokens
        for block_key in request.block_keys[num_held:]:
            self.expected.setdefault(block_key, now)
        recent_tokens, recent_computed = self.recent(now)
        self._recent_tokens = recent_tokens + computed_tokens + OUTPUT_TOKENS
        self._recent_computed = recent_computed + computed_tokens
        self._recent_at = now
        self._write()

    def pretend(self, recent_tokens: float, now: float) -> None:
        """As if so much had been placed here lately. One that comes to others would else have all that they
        are asked for until as much stands there as they had of late: a queue on one beside idle ones."""
        self._recent_tokens, self._recent_at = recent_tokens, now
        self._write()

    def forget_old(self, now: float) -> None:
        while self._notes and now - next(iter(self._notes.values()))[0] >= NOTE_LIFETIME_S:
            self._drop_note(next(iter(self._notes)))
            self._write()
        while self.expected and now - next(iter(self.expected.values())) >= EXPECTATION_LIFETIME_S:
            self.expected.popitem(last=False)

    def _drop_note(self, attempt: Attempt) -> None:
        _, tokens = self._notes.pop(attempt, (0.0, 0))
        self._noted_tokens -= tokens
