"""Which engine a request goes to. Each way to choose is a plain class, and has a name."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from shoal.actors.router.engine_view import RECENT_S, UNMEASURED_TOKENS_PER_S, EngineView
from shoal.actors.router.outlook import Outlook

RoutingPolicyName = Literal["cost", "round_robin", "least_loaded", "greedy_prefix"]


class RoutingPolicy(Protocol):
    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        """One of them, and there is at least one. Among equals the one that was placed on longest ago."""
        ...


COMPUTE_WEIGHT = 4.0
"""To compute a token costs so many times what it costs to stand behind one, while engines are idle; when they
compute for a share `load` of the time, 1 / (1 - load) times as much: it delays all who come until they are
idle again."""

MAX_LOAD = 0.75
"""The weight grows no more beyond it: there queues grow whatever is hit."""

DISPLACEMENT_WEIGHT = 1.5
"""A fetched token costs so much beside the time that it takes: it takes another's place on the device, and
has had one on a device before."""


class CheapestEngine:
    """Where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT / (1 - load) · tokens to compute there
                      + (fetch weight + DISPLACEMENT_WEIGHT) · tokens to fetch there
                      + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more, or
    fetching it; then another engine has it too.
    """

    def choose(self, engines: Sequence[EngineView], outlook: Outlook, now: float) -> EngineView:
        fastest = max(engine.tokens_per_s for engine in engines) or UNMEASURED_TOKENS_PER_S
        recent = [engine.recent(now) for engine in engines]
        recent_computed = sum(computed for _, computed in recent)
        weight = COMPUTE_WEIGHT / (1 - _load(engines, recent_computed, fastest))
        chosen, lowest = engines[0], (math.inf, 0)
        for engine, (recent_tokens, _) in zip(engines, recent, strict=True):
            standing, tokens_per_s = engine.standing(recent_tokens, fastest)
            if standing / tokens_per_s > lowest[0]:
                continue  # whatever it holds: of many engines most are passed over here
            prospect = outlook.of(engine)
            fetching = prospect.fetch_tokens(engine) + DISPLACEMENT_WEIGHT * prospect.fetched_tokens
            tokens = weight * prospect.computed_tokens + fetching + standing
            cost = tokens / tokens_per_s, engine.last_placed
            if cost < lowest:
                chosen, lowest = engine, cost
        return chosen


def _load(engines: Sequence[EngineView], recent_computed: float, fastest: float) -> float:
    """The share of the time for which engines compute prompts, by what was placed lately."""
    tokens_per_s = sum(engine.tokens_per_s or fastest for engine in engines)
    return min(MAX_LOAD, recent_computed / (RECENT_S * tokens_per_s))


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
