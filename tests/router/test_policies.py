"""The ways to choose an engine, by the same few examples."""

from collections import Counter
from typing import get_args

import pytest

from shoal.actors.messages import EngineId, EngineReport, PlacementRequest, PrefixSnapshot, RequestId
from shoal.actors.router.members import Members
from shoal.actors.router.placement import Placer
from shoal.actors.router.policies import RoutingPolicyName, routing_policy
from tests.router.test_placement import BLOCK, A, B, C, Tokens, infos, keys, tokens

NAMES: tuple[RoutingPolicyName, ...] = get_args(RoutingPolicyName)


class Cluster:
    """Three engines; what they hold and have to do is told by hand."""

    def __init__(self, name: RoutingPolicyName) -> None:
        self.members = Members(lambda: 0.0)
        self.placer = Placer(self.members, block_size=BLOCK, clock=lambda: 0.0, policy=routing_policy(name))
        self.members.set_engines(infos(A, B, C))
        self.members.take_snapshot_requests()
        for engine_id in (A, B, C):
            self.members.restore(PrefixSnapshot(engine_id=engine_id, sequence=0, block_keys=()))
        self._num_requests = 0

    def has(self, engine_id: EngineId, prefix: Tokens = (), *, uncomputed: int = 0) -> None:
        self.members.report(
            EngineReport(
                engine_id=engine_id,
                sequence=1,
                num_requests=0,
                uncomputed_tokens=uncomputed,
                tokens_per_s=1000.0,
                received=(),
                stored=keys(prefix),
            )
        )

    def where(self, prompt: Tokens, *exclude: EngineId) -> EngineId:
        self._num_requests += 1
        placed = self.placer.place(
            PlacementRequest(
                request_id=RequestId(f"r{self._num_requests}"),
                attempt=1,
                num_prompt_tokens=len(prompt),
                block_keys=keys(prompt),
                exclude=frozenset(exclude),
            )
        )
        assert placed is not None
        return placed.engine_id


def test_round_robin_takes_turns_whatever_there_is() -> None:
    cluster = Cluster("round_robin")
    cluster.has(B, tokens(1, 320), uncomputed=10_000)
    assert [cluster.where(tokens(1, 330)) for _ in range(6)] == [A, B, C, A, B, C]


def test_round_robin_passes_over_those_that_failed_and_comes_back_to_them() -> None:
    cluster = Cluster("round_robin")
    assert [cluster.where(tokens(1, 330), A) for _ in range(3)] == [B, C, B]
    assert cluster.where(tokens(1, 330)) == A


def test_least_loaded_goes_where_the_least_work_stands() -> None:
    cluster = Cluster("least_loaded")
    cluster.has(A, tokens(1, 320), uncomputed=900)
    cluster.has(B, uncomputed=500)
    cluster.has(C, uncomputed=800)
    assert [cluster.where(tokens(1, 330)) for _ in range(2)] == [B, C], "what was placed there counts"


def test_greedy_prefix_goes_where_most_of_the_prompt_is_however_much_stands_there() -> None:
    cluster = Cluster("greedy_prefix")
    cluster.has(A, tokens(1, 32))
    cluster.has(B, tokens(1, 320), uncomputed=10**9)
    assert cluster.where(tokens(1, 330)) == B


def test_greedy_prefix_sends_all_who_share_anything_to_one_engine() -> None:
    cluster = Cluster("greedy_prefix")
    places = Counter(cluster.where(tokens(1, 32) + tokens(i, 1000)) for i in range(2, 50))
    assert len(places) == 1


@pytest.mark.parametrize("name", NAMES)
def test_one_engine_is_chosen_whatever_the_policy(name: RoutingPolicyName) -> None:
    assert {Cluster(name).where(tokens(i, 100), A, B) for i in range(3)} == {C}


@pytest.mark.parametrize("name", NAMES)
def test_prompts_with_nothing_in_common_are_spread_by_every_policy(name: RoutingPolicyName) -> None:
    cluster = Cluster(name)
    assert Counter(cluster.where(tokens(i, 500)) for i in range(9)) == {A: 3, B: 3, C: 3}


def test_a_held_prefix_is_worth_more_where_engines_are_busy() -> None:
    """Idle ones compute 160 tokens anew rather than have them behind 900; busy ones do not."""
    idle, busy = Cluster("cost"), Cluster("cost")
    for i in range(30):
        for engine_id in (A, B, C):
            busy.where(tokens(100 + i, 5000), *{A, B, C} - {engine_id})
    for cluster, chosen in ((idle, B), (busy, A)):
        cluster.has(A, tokens(1, 160), uncomputed=900)
        assert cluster.where(tokens(1, 170)) == chosen
