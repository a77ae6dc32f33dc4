"""What an engine has to tell the router, gathered between two reports."""

from dataclasses import dataclass, field

from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.messages import EngineId, EngineReport, RequestId
from shoal.kvstore.block_hash import BlockKey

Arrival = tuple[RequestId, int]
"""(request, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How one turn of the loop left the engine, and what came and went in it."""

    num_requests: int
    uncomputed_tokens: int
    tokens_per_s: float
    own_fetch_tokens_per_s: float = 0.0
    other_fetch_tokens_per_s: float = 0.0
    arrived: tuple[Arrival, ...] = ()
    prefixes: PrefixChanges = field(default_factory=PrefixChanges)


class Account:
    """Turns go in, numbered reports come out.

    A report says of each prefix block how it was left, even if that is how it was before: so a report is true
    on top of any snapshot taken since the one before it.
    """

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        self._last = Turn(num_requests=0, uncomputed_tokens=0, tokens_per_s=0.0)
        self._arrived: list[Arrival] = []
        self._is_stored: dict[BlockKey, bool] = {}
        self.sequence = 0
        """Of the latest report."""

    def add(self, turn: Turn) -> bool:
        """Whether there is news to report."""
        self._arrived += turn.arrived
        for is_stored, keys in ((True, turn.prefixes.stored), (False, turn.prefixes.removed)):
            for key in keys:
                self._is_stored.pop(key, None)  # so that parents stay before their children
                self._is_stored[key] = is_stored
        before, self._last = self._last, turn
        has_other_load = (turn.num_requests, turn.uncomputed_tokens) != (
            before.num_requests,
            before.uncomputed_tokens,
        )
        return has_other_load or bool(self._arrived or self._is_stored)

    def take_report(self) -> EngineReport:
        self.sequence += 1
        arrived, self._arrived = self._arrived, []
        is_stored, self._is_stored = self._is_stored, {}
        return EngineReport(
            engine_id=self._engine_id,
            sequence=self.sequence,
            num_requests=self._last.num_requests,
            uncomputed_tokens=self._last.uncomputed_tokens,
            tokens_per_s=self._last.tokens_per_s,
            own_fetch_tokens_per_s=self._last.own_fetch_tokens_per_s,
            other_fetch_tokens_per_s=self._last.other_fetch_tokens_per_s,
            received=tuple(arrived),
            stored=tuple(key for key, stored in is_stored.items() if stored),
            removed=tuple(key for key, stored in is_stored.items() if not stored),
        )
