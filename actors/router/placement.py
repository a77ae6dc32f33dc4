"""Where a request goes. Plain state and arithmetic; the clock is injected."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.actors.messages import EngineId, PlacementRequest, PrefixSource
from shoal.actors.router.engine_view import UNMEASURED_TOKENS_PER_S, EngineView
from shoal.actors.router.members import Members
from shoal.actors.router.outlook import Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId
    expected_hit_tokens: int
    """Tokens of the prompt that the engine need not compute: it holds them, or fetches them."""
    sources: tuple[PrefixSource, ...] = ()


class CheapestEngine:
    """Places where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT · tokens to compute there + a fetch weight · tokens to fetch there
                      + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more, or
    fetching it; then another engine has it too. Among equals the one placed on longest ago is next.

    An engine's report is some milliseconds old. What was placed since is known from our own notes: without
    them a burst would go where the last report was lowest, and would see nothing of the prefix it shares.
    """

    def __init__(self, members: Members, *, block_size: int, clock: Callable[[], float]) -> None:
        self._members = members
        self._block_size = block_size
        self._clock = clock
        self._num_placed = 0

    def place(self, request: PlacementRequest) -> Placement | None:
        """None when there is no engine but those that the request excludes."""
        now, members = self._clock(), self._members
        engines = [e for engine_id, e in members.engines.items() if engine_id not in request.exclude]
        if not engines:
            return None
        for engine in engines:
            engine.forget_old(now)
        outlook = Outlook(request, members.directory, members.stores, self._block_size)
        prospects = {engine: outlook.of(engine) for engine in engines}
        fastest = max(e.tokens_per_s for e in members.engines.values()) or UNMEASURED_TOKENS_PER_S

        def rank(engine: EngineView) -> tuple[float, int]:
            tokens = prospects[engine].tokens + engine.standing_tokens(now)
            return 1e3 * tokens / engine.believed_tokens_per_s(fastest, now), engine.last_placed

        engine = min(engines, key=rank)
        self._num_placed += 1
        engine.last_placed = self._num_placed
        chosen = prospects[engine]
        engine.note(request, chosen.num_on_device, outlook.computed_tokens(chosen.resume), now)
        return Placement(
            engine_id=engine.engine_id,
            expected_hit_tokens=chosen.resume.start * self._block_size,
            sources=outlook.sources(engine, chosen.resume),
        )
