"""Where a request goes. Plain state and arithmetic; the clock is injected."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.actors.messages import EngineId, PlacementRequest, PrefixSource
from shoal.actors.router.engine_view import EXPECTATION_LIFETIME_S, NOTE_LIFETIME_S, EngineView
from shoal.actors.router.members import Members
from shoal.actors.router.outlook import Outlook
from shoal.actors.router.policies import CheapestEngine, RoutingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId
    expected_hit_tokens: int
    """Tokens of the prompt that the engine need not compute: it holds them, or fetches them."""
    sources: tuple[PrefixSource, ...] = ()


_Noted = tuple[float, EngineView]


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
        self._noted = {lifetime: deque[_Noted]() for lifetime in (NOTE_LIFETIME_S, EXPECTATION_LIFETIME_S)}
        """What is noted of each placement is forgotten in time, what the engine has not ended first."""

    def place(self, request: PlacementRequest) -> Placement | None:
        """None when there is no engine but those that the request excludes."""
        now, members = self._clock(), self._members
        self._forget_old(now)
        fleet = members.fleet.without(request.exclude)
        if not fleet.engines:
            return None
        outlook = Outlook(request, members.directory, members.stores, self._block_size)
        engine = self._policy.choose(fleet, outlook, now)
        self._num_placed += 1
        chosen = outlook.of(engine)
        engine.note(request, chosen.num_on_device, chosen.computed_tokens, now, self._num_placed)
        for noted in self._noted.values():
            noted.append((now, engine))
        return Placement(
            engine_id=engine.engine_id,
            expected_hit_tokens=request.num_prompt_tokens - chosen.computed_tokens,
            sources=outlook.sources(engine, chosen.resume),
        )

    def _forget_old(self, now: float) -> None:
        """Only engines whose notes may have ended are asked, however many there are."""
        for lifetime, noted in self._noted.items():
            while noted and now - noted[0][0] >= lifetime:
                noted.popleft()[1].forget_old(now)
