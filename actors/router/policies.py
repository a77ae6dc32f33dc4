"""Which engine a request goes to. Each way to choose is a plain class, and has a name."""

import math
from typing import Literal, Protocol

import numpy as np

from shoal.actors.router.engine_view import RECENT_S, EngineView
from shoal.actors.router.fleet import Fleet, Numbers
from shoal.actors.router.outlook import Outlook, Reach

RoutingPolicyName = Literal["cost", "round_robin", "least_loaded", "greedy_prefix"]


class RoutingPolicy(Protocol):
    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
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

ROUNDING = 1e-9
"""More than is lost when the same cost is added up in another order, and no more than that."""


class CheapestEngine:
    """Where a request costs the least time: its own, and that of everybody behind it.

        cost in ms = (COMPUTE_WEIGHT / (1 - load) · tokens to compute there
                      + (fetch weight + DISPLACEMENT_WEIGHT) · tokens to fetch there
                      + tokens standing there) / tokens per ms there

    The longest prefix alone would be a trap: all who share a system prompt would go to one engine for ever.
    Here they stay together until the work that stands there outweighs computing the prefix once more, or
    fetching it; then another engine has it too.
    """

    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
        own, fastest = fleet.speeds()
        recent_tokens, recent_computed = fleet.recent(now)
        weight = COMPUTE_WEIGHT / (1 - _load(recent_computed, own))
        standing, tokens_per_s = fleet.standing(recent_tokens, own, fastest)
        at_least = (_least_tokens(outlook.reach(fleet), fleet, weight) + standing) / tokens_per_s
        chosen, lowest = fleet.engines[0], (math.inf, 0.0)
        for i, bound in fleet.cheapest_first(at_least):
            if bound >= lowest:
                break
            engine = fleet.engines[i]
            prospect = outlook.of(engine)
            fetching = prospect.fetch_tokens(engine) + DISPLACEMENT_WEIGHT * prospect.fetched_tokens
            tokens = weight * prospect.computed_tokens + fetching + float(standing[i])
            cost = tokens / float(tokens_per_s[i]), engine.last_placed
            if cost < lowest:
                chosen, lowest = engine, cost
        return chosen


def _least_tokens(reach: Reach, fleet: Fleet, weight: float) -> Numbers:
    """What an engine's cost in tokens, but for what stands there, is not below. It is that cost where neither
    stores nor state matter."""
    computing: Numbers = weight * (reach.prompt_tokens - reach.device_tokens)
    if not reach.stored_tokens:
        return computing
    other_weight = fleet.other_fetch_weight
    own_weight = np.minimum(fleet.own_fetch_weight, other_weight)
    lacking = np.maximum(0.0, reach.stored_tokens - reach.device_tokens)
    own = np.minimum(lacking, reach.own_store_tokens)
    other = lacking - own
    if fleet.has_no_segments:  # else more is spared than is fetched
        slow = other_weight > 1  # here the own store must make up for it, or nothing is fetched
        gained = own * np.maximum(0.0, 1 - own_weight)
        other[slow] = np.minimum(other[slow], gained[slow] / (other_weight[slow] - 1))
    spared = own * np.maximum(0.0, weight - own_weight - DISPLACEMENT_WEIGHT)
    spared += other * np.maximum(0.0, weight - other_weight - DISPLACEMENT_WEIGHT)
    computing -= (1 + ROUNDING) * spared
    return computing


def _load(recent_computed: Numbers, tokens_per_s: Numbers) -> float:
    """The share of the time for which engines compute prompts, by what was placed lately."""
    could_compute = RECENT_S * np.add.reduce(tokens_per_s)
    return min(MAX_LOAD, float(np.add.reduce(recent_computed) / could_compute))


class RoundRobin:
    """Each in turn, whatever it holds and however much stands there."""

    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
        return min(fleet.engines, key=lambda engine: engine.last_placed)


class LeastLoaded:
    """Where the least work stands, whatever it holds."""

    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
        return min(fleet.engines, key=lambda engine: (engine.waiting_tokens, engine.last_placed))


class GreedyPrefix:
    """Where most of the prompt is on the device, however much stands there.

    A trap, and here to be measured: whoever was the first to see what all prompts have in common gets all.
    """

    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
        return min(fleet.engines, key=lambda engine: (-outlook.of(engine).num_on_device, engine.last_placed))


_POLICIES: dict[RoutingPolicyName, type[RoutingPolicy]] = {
    "cost": CheapestEngine,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "greedy_prefix": GreedyPrefix,
}


def routing_policy(name: RoutingPolicyName) -> RoutingPolicy:
    return _POLICIES[name]()
