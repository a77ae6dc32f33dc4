"""Which engine a request goes to. Each way to choose is a plain class, and has a name."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from shoal.actors.router.engine_view import UNMEASURED_TOKENS_PER_S, EngineView
from shoal.actors.router.outlook import Outlook

RoutingPolicyName = Literal["cost", "round_robin", "least_loaded", "greedy_prefix"]


class RoutingPolicy(Protocol):
    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        """One of them, and there is at least one. Among equals the one that was placed on longest ago."""
        ...


class CheapestEngine:
    """Where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT · tokens to compute there + a fetch weight · tokens to fetch there
                      + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more, or
    fetching it; then another engine has it too.
    """

    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        fastest = max(engine.tokens_per_s for engine in engines) or UNMEASURED_TOKENS_PER_S

        chosen, lowest = engines[0], (math.inf, 0)
        for engine in engines:
            standing, tokens_per_s = engine.prospects(fastest, now)
            if standing / tokens_per_s > lowest[0]:
                continue  # whatever it holds: of many engines most are passed over here
            cost = (standing + outlook.of(engine).tokens) / tokens_per_s, engine.last_placed
            if cost < lowest:
                chosen, lowest = engine, cost
        return chosen


class RoundRobin:
    """Each in turn, whatever it holds and however much stands there."""

    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        return min(engines, key=lambda engine: engine.last_placed)


class LeastLoaded:
    """Where the least work stands, whatever it holds."""

    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        return min(engines, key=lambda engine: (engine.waiting_tokens, engine.last_placed))


class GreedyPrefix:
    """Where most of the prompt is on the device, however much stands there.

    A trap, and here to be measured: whoever was the first to see what all prompts have in common gets all.
    """

    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        return min(engines, key=lambda engine: (-outlook.of(engine).num_on_device, engine.last_placed))


_POLICIES: dict[RoutingPolicyName, type[RoutingPolicy]] = {
    "cost": CheapestEngine,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "greedy_prefix": GreedyPrefix,
}


def routing_policy(name: RoutingPolicyName) -> RoutingPolicy:
    return _POLICIES[name]()
