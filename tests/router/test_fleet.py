"""Weighing all engines at once chooses what looking at each would, whatever has happened before."""

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    RequestId,
)
from shoal.actors.router.engine_view import (
    CONVINCING_TOKENS,
    RECENT_S,
    RECENT_WEIGHT,
    UNMEASURED_TOKENS_PER_S,
    EngineView,
)
from shoal.actors.router.fleet import Fleet
from shoal.actors.router.members import Members
from shoal.actors.router.outlook import Outlook
from shoal.actors.router.placement import Placer
from shoal.actors.router.policies import COMPUTE_WEIGHT, DISPLACEMENT_WEIGHT, MAX_LOAD, CheapestEngine
from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot

BLOCK = 16
ENGINES = [EngineId(f"engine-{i}") for i in range(5)]
STORES = [StoreId(f"store-{i}") for i in range(2)]
RULES = [BoundaryRule(), BoundaryRule(num_segments=1), BoundaryRule(num_segments=1, num_recomputed=2)]


def block(path: str, index: int) -> BlockKey:
    """Paths have their first two blocks in common."""
    return BlockKey(f"{path if index >= 2 else ''}{index}".encode())


class LooksAtEach:
    """The cost as it is written down, of one engine after the other; and the engine that is chosen."""

    def __init__(self) -> None:
        self._chooses = CheapestEngine()

    def choose(self, fleet: Fleet, outlook: Outlook, now: float) -> EngineView:
        for engine in fleet.engines:
            noted = engine.num_requests, len(engine.expected)
            engine.forget_old(now)
            assert noted == (engine.num_requests, len(engine.expected)), "what has ended is still counted"
        chosen = self._chooses.choose(fleet, outlook, now)
        costs = {engine.engine_id: cost(engine, fleet, outlook, now) for engine in fleet.engines}
        lowest = min(costs.values())
        assert costs[chosen.engine_id] == pytest.approx(lowest, rel=1e-9)
        stands = {engine.engine_id: what_stands(engine, outlook, now) for engine in fleet.engines}
        for engine in fleet.engines:
            if stands[engine.engine_id] == stands[chosen.engine_id]:  # rounding parts equal costs of others
                assert engine.last_placed >= chosen.last_placed, "equal ones take turns"
        return chosen


def what_stands(engine: EngineView, outlook: Outlook, now: float) -> tuple[object, ...]:
    """All that an engine's cost depends on."""
    prospect = outlook.of(engine)
    fetching = prospect.fetch_tokens(engine), prospect.fetched_tokens
    return prospect.computed_tokens, fetching, engine.waiting_tokens, engine.recent(now), engine.tokens_per_s


def cost(engine: EngineView, fleet: Fleet, outlook: Outlook, now: float) -> float:
    engines = fleet.engines
    fastest = max(other.tokens_per_s for other in engines) or UNMEASURED_TOKENS_PER_S
    busy_s = sum(other.recent(now)[1] for other in engines) / sum(e.tokens_per_s or fastest for e in engines)
    weight = COMPUTE_WEIGHT / (1 - min(MAX_LOAD, busy_s / RECENT_S))
    recent, _ = engine.recent(now)
    convinces = recent / (recent + CONVINCING_TOKENS) if engine.tokens_per_s else 0.0
    tokens_per_s = fastest + (engine.tokens_per_s - fastest) * convinces
    prospect = outlook.of(engine)
    tokens = weight * prospect.computed_tokens
    tokens += prospect.fetch_tokens(engine) + DISPLACEMENT_WEIGHT * prospect.fetched_tokens
    return (tokens + engine.waiting_tokens + RECENT_WEIGHT * recent) / tokens_per_s


engines = st.sampled_from(ENGINES)
paths = st.sampled_from("ab")
RULES_OF_ALL = st.just((RULES[0],) * len(ENGINES)) | st.tuples(*[st.sampled_from(RULES)] * len(ENGINES))
speeds = st.sampled_from(
    [(1000.0, 8000.0, 4000.0), (1000.0, 8000.0, 900.0), (500.0, 400.0, 300.0), (0.0,) * 3]
)
spans = st.tuples(st.integers(0, 20), st.integers(0, 40))


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.members = Members(lambda: self.now)
        self.placer = Placer(self.members, block_size=BLOCK, clock=lambda: self.now, policy=LooksAtEach())
        self.sequences: dict[str, int] = {}
        self.placed: list[tuple[EngineId, RequestId]] = []

    @initialize(rules=RULES_OF_ALL, stores=st.integers(0, 2))
    def begin(self, rules: tuple[BoundaryRule, ...], stores: int) -> None:
        self.rule_of = dict(zip(ENGINES, rules, strict=True))
        self.name(frozenset(ENGINES))
        nodes = ["node-0", "node-1"]
        self.members.set_stores(
            StoreInfo(store_id=store_id, node=node, budget_bytes=1)
            for store_id, node in zip(STORES[:stores], nodes, strict=False)
        )
        self.answer()
        for store_id in STORES[:stores]:
            self.report_store(store_id, "a", (0, 25), with_segments=True)

    def answer(self) -> None:
        for holder in self.members.take_snapshot_requests():
            sequence = self.sequences.get(holder, 0)
            snapshot: Any = StoreSnapshot(store_id=StoreId(holder), sequence=sequence, block_keys=())
            if holder in ENGINES:
                snapshot = PrefixSnapshot(engine_id=EngineId(holder), sequence=sequence, block_keys=())
            self.members.restore(snapshot)

    def next_sequence(self, holder: str) -> int:
        self.sequences[holder] = self.sequences.get(holder, 0) + 1
        return self.sequences[holder]

    @rule(present=st.frozensets(engines, min_size=1))
    def name(self, present: frozenset[EngineId]) -> None:
        self.members.set_engines(
            EngineInfo(
                engine_id=engine_id,
                node=f"node-{number % 3}",
                backend="",
                memory="",
                fingerprint=b"",
                rule=self.rule_of[engine_id],
                block_bytes=2,
                segment_bytes=number % 8,
            )
            for number, engine_id in enumerate(ENGINES)
            if engine_id in present
        )
        self.answer()

    @rule(path=paths, length=st.integers(0, 40), excluded=st.frozensets(engines, max_size=2))
    def place(self, path: str, length: int, excluded: frozenset[EngineId]) -> None:
        request = PlacementRequest(
            request_id=RequestId(f"r{len(self.placed)}"),
            attempt=1,
            num_prompt_tokens=length * BLOCK + 5,
            block_keys=tuple(block(path, i) for i in range(length)),
            exclude=excluded,
        )
        if (placed := self.placer.place(request)) is not None:
            self.placed.append((placed.engine_id, request.request_id))

    @rule(
        engine_id=engines,
        path=paths,
        span=spans,
        change=st.sampled_from(["stored", "removed", "stored with segments"]),
        uncomputed=st.integers(0, 3000),
        speeds=speeds,
    )
    def report(  # noqa: PLR0917
        self,
        engine_id: EngineId,
        path: str,
        span: tuple[int, int],
        change: str,
        uncomputed: int,
        speeds: tuple[float, float, float],
    ) -> None:
        keys = tuple(block(path, i) for i in range(*span))
        keys += tuple(map(segment_key, keys)) if change != "stored" else ()
        self.members.report(
            EngineReport(
                engine_id=engine_id,
                sequence=self.next_sequence(engine_id),
                num_requests=0,
                uncomputed_tokens=uncomputed,
                tokens_per_s=speeds[0],
                own_fetch_tokens_per_s=speeds[1],
                other_fetch_tokens_per_s=speeds[2],
                received=tuple((name, 1) for placed, name in self.placed[-3:] if placed == engine_id),
                stored=() if change == "removed" else keys,
                removed=keys if change == "removed" else (),
            )
        )

    @rule(
        store_id=st.sampled_from(STORES),
        path=paths,
        span=spans,
        with_segments=st.booleans(),
    )
    def report_store(self, store_id: StoreId, path: str, span: tuple[int, int], with_segments: bool) -> None:
        keys = tuple(block(path, i) for i in range(*span))
        keys += tuple(map(segment_key, keys)) if with_segments else ()
        sequence = self.next_sequence(store_id)
        self.members.report_store(StoreReport(store_id=store_id, sequence=sequence, stored=keys))

    @rule(seconds=st.sampled_from([0.5, 9.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_the_fleet_knows_is_what_its_engines_say(self) -> None:
        fleet = self.members.fleet
        if not fleet.engines:
            return
        tokens, _ = fleet.standing(fleet.recent(self.now)[0], *fleet.speeds())
        for i, engine in enumerate(fleet.engines):
            recent, _ = engine.recent(self.now)
            assert math.isclose(tokens[i], engine.waiting_tokens + RECENT_WEIGHT * recent)
            assert self.members.engines[engine.engine_id] is engine


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
