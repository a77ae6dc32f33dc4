"""Where a request goes. Plain state and arithmetic; the clock is injected."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.actors.messages import EngineId, PlacementRequest, PrefixSource
from shoal.actors.router.members import Members
from shoal.actors.router.outlook import Outlook
from shoal.actors.router.policies import CheapestEngine, RoutingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId
    expected_hit_tokens: int
    """Tokens of the prompt that the engine need not compute: it holds them, or fetches them."""
    sources: tuple[PrefixSource, ...] = ()


class Placer:
    """Sends each request to an engine that the policy chooses, by what all are known to hold and to do.

    An engine's report is some milliseconds old. What was placed since is known from our own notes: without
    them a burst would go where the last report was lowest, and would see nothing of the prefix it shares.
    """

    def __init__(
        self,
        members: Members,
        *,
        block_size: int,
        clock: Callable[[], float],
        policy: RoutingPolicy | None = None,
    ) -> None:
        """policy: the cheapest engine unless another is named."""
        self._members = members
        self._block_size = block_size
        self._clock = clock
        self._policy = policy or CheapestEngine()
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
        engine = self._policy.choose(engines, outlook, now)
        self._num_placed += 1
        engine.last_placed = self._num_placed
        chosen = outlook.of(engine)
        engine.note(request, chosen.num_on_device, chosen.computed_tokens, now)
        return Placement(
            engine_id=engine.engine_id,
            expected_hit_tokens=chosen.resume.start * self._block_size,
            sources=outlook.sources(engine, chosen.resume),
        )
