"""Prefixes that stores have: what is usable, what it costs to fetch, and from whom."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    PrefixSource,
    RequestId,
)
from shoal.actors.router.members import Members
from shoal.actors.router.placement import Placement, Placer
from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key, segment_key
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.messages import StoreId, StoreInfo, StoreReport, StoreSnapshot

A, B = EngineId("engine-a"), EngineId("engine-b")
EAST, WEST = StoreId("store-east"), StoreId("store-west")
BLOCK = 16
KEYS = extend_keys(root_key(b"model", ""), range(10 * BLOCK), BLOCK)
WINDOW = BoundaryRule(num_segments=1)


def blocks(indices: Iterable[int]) -> tuple[BlockKey, ...]:
    return tuple(KEYS[i] for i in indices)


def segments(indices: Iterable[int]) -> tuple[BlockKey, ...]:
    return tuple(segment_key(KEYS[i]) for i in indices)


@dataclass
class Cluster:
    """A on the node `east`, B on `west`, each with its store; all have what a test says."""

    rule: BoundaryRule = field(default_factory=BoundaryRule)
    segment_bytes: int = 1
    """A block has as many by default."""
    sequences: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = Members(lambda: 0.0)
        self.placement = Placer(self.members, block_size=BLOCK, clock=lambda: 0.0)
        self.members.set_engines([self.engine(A, "east"), self.engine(B, "west")])
        self.set_stores(EAST, WEST)

    def engine(self, engine_id: EngineId, node: str) -> EngineInfo:
        return EngineInfo(
            engine_id=engine_id,
            node=node,
            backend="",
            memory="",
            fingerprint=b"",
            rule=self.rule,
            block_bytes=1,
            segment_bytes=self.segment_bytes,
        )

    def set_stores(self, *store_ids: StoreId) -> None:
        self.members.set_stores(
            StoreInfo(store_id=store_id, node=store_id.removeprefix("store-"), budget_bytes=1)
            for store_id in store_ids
        )
        for holder in self.members.take_snapshot_requests():
            if holder in (A, B):
                snapshot = PrefixSnapshot(engine_id=EngineId(holder), sequence=0, block_keys=())
                self.members.restore(snapshot)
            else:
                self.members.restore(StoreSnapshot(store_id=StoreId(holder), sequence=0, block_keys=()))

    def _sequence(self, holder: str) -> int:
        self.sequences[holder] = self.sequences.get(holder, 0) + 1
        return self.sequences[holder]

    def engine_has(
        self,
        engine_id: EngineId,
        keys: tuple[BlockKey, ...],
        *,
        uncomputed: int = 0,
        fetch_tokens_per_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """It computes 1,000 tokens/s."""
        self.members.report(
            EngineReport(
                engine_id=engine_id,
                sequence=self._sequence(engine_id),
                num_requests=0,
                uncomputed_tokens=uncomputed,
                tokens_per_s=1000.0,
                own_fetch_tokens_per_s=fetch_tokens_per_s[0],
                other_fetch_tokens_per_s=fetch_tokens_per_s[1],
                received=(),
                stored=keys,
            )
        )

    def store_has(
        self, store_id: StoreId, keys: tuple[BlockKey, ...], removed: tuple[BlockKey, ...] = ()
    ) -> None:
        sequence = self._sequence(store_id)
        self.members.report_store(
            StoreReport(store_id=store_id, sequence=sequence, stored=keys, removed=removed)
        )

    def place(self, num_tokens: int = 10 * BLOCK + 1, *exclude: EngineId) -> Placement:
        placed = self.placement.place(
            PlacementRequest(
                request_id=RequestId("r"),
                attempt=1,
                num_prompt_tokens=num_tokens,
                block_keys=tuple(KEYS[: num_tokens // BLOCK]),
                exclude=frozenset(exclude),
            )
        )
        assert placed is not None
        return placed


def source(store_id: StoreId, first: int, end: int, *segments: int) -> PrefixSource:
    return PrefixSource(store_id=store_id, first=first, end=end, segments=segments)


def test_a_prefix_in_a_store_is_fetched_where_that_is_nearest() -> None:
    cluster = Cluster()
    cluster.store_has(WEST, blocks(range(8)))
    assert cluster.place() == Placement(
        engine_id=B, expected_hit_tokens=8 * BLOCK, sources=(source(WEST, 0, 8),)
    )


def test_work_that_stands_there_sends_it_to_another_node_and_the_store_with_it() -> None:
    """Fetching 8 blocks from another node costs as much as standing behind 96 tokens more."""
    cluster = Cluster()
    cluster.store_has(WEST, blocks(range(8)))
    cluster.engine_has(B, (), uncomputed=95)
    assert cluster.place().engine_id == B
    cluster = Cluster()
    cluster.store_has(WEST, blocks(range(8)))
    cluster.engine_has(B, (), uncomputed=97)
    assert cluster.place() == Placement(
        engine_id=A, expected_hit_tokens=8 * BLOCK, sources=(source(WEST, 0, 8),)
    )


def test_a_fetch_weighs_what_it_takes_by_what_computing_takes() -> None:
    """128 tokens from another node at 4,000 tokens/s weigh 32, from the own one at 8,000 weigh 16."""
    for uncomputed, chosen in ((15, B), (17, A)):
        cluster = Cluster()
        cluster.store_has(WEST, blocks(range(8)))
        cluster.engine_has(A, (), fetch_tokens_per_s=(8000.0, 4000.0))
        cluster.engine_has(B, (), uncomputed=uncomputed, fetch_tokens_per_s=(8000.0, 4000.0))
        assert cluster.place().engine_id == chosen


def test_what_is_fetched_takes_a_place_on_the_device_where_it_is_not() -> None:
    """128 tokens on one device outweigh 224 that stand there, though the other can fetch them."""
    for uncomputed, chosen in ((223, A), (225, B)):
        cluster = Cluster()
        cluster.engine_has(A, blocks(range(8)), uncomputed=uncomputed)
        cluster.store_has(WEST, blocks(range(8)))
        assert cluster.place().engine_id == chosen


def test_what_the_engine_would_rather_compute_is_no_hit() -> None:
    """Else requests would be spread in the belief that their prefixes come along."""
    cluster = Cluster()
    cluster.store_has(WEST, blocks(range(8)))
    for engine_id in (A, B):
        cluster.engine_has(engine_id, (), fetch_tokens_per_s=(8000.0, 900.0))
    assert cluster.place(10 * BLOCK + 1, B) == Placement(engine_id=A, expected_hit_tokens=0)
    assert cluster.place(10 * BLOCK + 1, A).sources == (source(WEST, 0, 8),), "it is fast to its own store"


@pytest.mark.parametrize(("segment_bytes", "hit_tokens"), [(1, 10 * BLOCK), (9, 10 * BLOCK), (11, 0)])
def test_a_large_state_is_a_hit_if_it_is_fetched_sooner_than_its_prefix_is_computed(
    segment_bytes: int, hit_tokens: int
) -> None:
    """Ten blocks take half as long to fetch as to compute."""
    cluster = Cluster(rule=WINDOW, segment_bytes=segment_bytes)
    for engine_id in (A, B):
        cluster.engine_has(engine_id, (), fetch_tokens_per_s=(2000.0, 2000.0))
    cluster.store_has(EAST, blocks(range(10)) + segments([9]))
    assert cluster.place().expected_hit_tokens == hit_tokens


def test_over_a_slow_network_the_own_nodes_store_still_counts() -> None:
    cluster = Cluster()
    cluster.store_has(EAST, blocks(range(3)))
    cluster.store_has(WEST, blocks(range(8)))
    cluster.engine_has(A, (), fetch_tokens_per_s=(8000.0, 500.0))
    placed = cluster.place(10 * BLOCK + 1, B)
    assert (placed.expected_hit_tokens, placed.sources) == (3 * BLOCK, (source(EAST, 0, 3),))


def test_what_the_device_holds_is_not_fetched() -> None:
    cluster = Cluster()
    cluster.engine_has(A, blocks(range(3)))
    cluster.store_has(EAST, blocks(range(8)))
    cluster.store_has(WEST, blocks(range(10)))
    assert cluster.place(10 * BLOCK + 1, B).sources == (source(EAST, 3, 8), source(WEST, 8, 10))
    cluster = Cluster()
    cluster.engine_has(A, blocks(range(10)))
    cluster.store_has(EAST, blocks(range(10)))
    assert cluster.place() == Placement(engine_id=A, expected_hit_tokens=10 * BLOCK)


def test_a_prefix_is_as_long_as_device_and_stores_together_reach() -> None:
    cluster = Cluster()
    cluster.engine_has(A, blocks([0, 1, 4, 5]))
    cluster.store_has(EAST, blocks([2, 6]))
    cluster.store_has(WEST, blocks([3, 8]))
    placed = cluster.place(10 * BLOCK + 1, B)
    assert placed.expected_hit_tokens == 7 * BLOCK, "nobody has block 7"
    assert set(placed.sources) == {source(EAST, 2, 3), source(EAST, 6, 7), source(WEST, 3, 4)}


def test_few_stores_are_asked_and_the_own_one_first() -> None:
    cluster = Cluster()
    north = StoreId("store-north")
    cluster.set_stores(EAST, WEST, north)
    cluster.store_has(EAST, blocks([0]))
    cluster.store_has(WEST, blocks(range(2, 5)))
    cluster.store_has(north, blocks(range(10)))
    assert cluster.place(10 * BLOCK + 1, B).sources == (source(EAST, 0, 1), source(north, 1, 10))


def test_the_last_token_is_computed_though_all_blocks_are_there() -> None:
    cluster = Cluster()
    cluster.store_has(EAST, blocks(range(10)))
    assert cluster.place(10 * BLOCK) == Placement(
        engine_id=A, expected_hit_tokens=9 * BLOCK, sources=(source(EAST, 0, 9),)
    )


def test_25_blocks_without_the_state_at_their_end_are_a_shorter_hit() -> None:
    cluster = Cluster(rule=WINDOW)
    cluster.engine_has(A, blocks(range(6)) + segments([1]))
    assert cluster.place() == Placement(engine_id=A, expected_hit_tokens=2 * BLOCK)
    cluster = Cluster(rule=WINDOW)
    cluster.engine_has(A, blocks(range(6)))
    assert cluster.place().expected_hit_tokens == 0


def test_state_that_the_device_lacks_is_fetched_beside_blocks_that_it_has() -> None:
    cluster = Cluster(rule=WINDOW)
    cluster.engine_has(A, blocks(range(6)) + segments([1]))
    cluster.store_has(EAST, blocks(range(2)) + segments([5]))
    assert cluster.place() == Placement(
        engine_id=A, expected_hit_tokens=6 * BLOCK, sources=(source(EAST, 5, 5, 5),)
    )


def test_blocks_and_their_segments_are_one_source() -> None:
    cluster = Cluster(rule=BoundaryRule(num_segments=2))
    cluster.store_has(EAST, blocks(range(8)) + segments([2, 3, 7]))
    assert cluster.place().sources == (source(EAST, 0, 4, 2, 3),), "the state at block 8 is not whole"


def test_layers_that_are_not_stored_are_computed_again_and_count() -> None:
    cluster = Cluster(rule=BoundaryRule(num_segments=1, num_recomputed=3))
    cluster.store_has(EAST, blocks(range(8)) + segments([4, 7]))
    assert cluster.place() == Placement(
        engine_id=A, expected_hit_tokens=5 * BLOCK, sources=(source(EAST, 0, 8, 4),)
    )


@pytest.mark.parametrize(("num_recomputed", "resumed"), [(0, 8), (3, 5)])
def test_tokens_before_a_start_that_are_computed_again_are_no_hit(num_recomputed: int, resumed: int) -> None:
    rule = BoundaryRule(num_segments=1, num_recomputed=num_recomputed, num_rewound=4)
    cluster = Cluster(rule=rule)
    cluster.engine_has(A, blocks(range(8)) + segments([4, 7]))
    assert cluster.place() == Placement(engine_id=A, expected_hit_tokens=resumed * BLOCK - 4)
    assert Cluster(rule=rule).place(5).expected_hit_tokens == 0


def test_what_is_only_expected_is_fetched_if_a_store_has_it() -> None:
    """The request that it is expected from may never compute it; but it draws the next one there."""
    cluster = Cluster(rule=WINDOW)
    first = cluster.place()
    second = cluster.place()
    assert second == Placement(engine_id=first.engine_id, expected_hit_tokens=10 * BLOCK)
    own = EAST if first.engine_id == A else WEST
    cluster.store_has(own, blocks(range(10)) + segments([9]))
    assert cluster.place().sources == (source(own, 0, 10, 9),)


def test_12_a_store_that_is_gone_or_has_evicted_is_no_source() -> None:
    cluster = Cluster()
    cluster.store_has(EAST, blocks(range(8)))
    cluster.store_has(WEST, blocks(range(4)))
    cluster.set_stores(WEST)
    placed = cluster.place(10 * BLOCK + 1, A)
    assert (placed.expected_hit_tokens, placed.sources) == (4 * BLOCK, (source(WEST, 0, 4),))
    assert cluster.members.held().keys() == {A, B, WEST}
    cluster.store_has(WEST, (), removed=blocks(range(4)))
    cluster.store_has(EAST, blocks(range(8)))
    assert cluster.members.held()[WEST] == frozenset()
    assert cluster.place(10 * BLOCK + 1, A).sources == ()


def test_10_a_store_whose_report_was_lost_is_asked_for_a_snapshot() -> None:
    cluster = Cluster()
    cluster.sequences[EAST] = 1
    cluster.store_has(EAST, blocks(range(8)))
    assert cluster.place().sources == ()
    assert cluster.members.take_snapshot_requests() == [EAST]
    snapshot = StoreSnapshot(store_id=EAST, sequence=2, block_keys=blocks(range(8)))
    cluster.members.restore(snapshot)
    assert cluster.members.held()[EAST] == frozenset(blocks(range(8)))


@pytest.mark.parametrize("rule", [BoundaryRule(), WINDOW])
def test_1_one_at_a_time_both_engines_use_what_one_store_has(rule: BoundaryRule) -> None:
    """The prefix is short; fetching it costs less than what was placed lately on whoever has it."""
    cluster = Cluster(rule=rule)
    cluster.store_has(EAST, blocks(range(10)) + segments(range(10)))
    placed = [cluster.place() for _ in range(10)]
    assert {placement.engine_id for placement in placed} == {A, B}
    assert all(placement.expected_hit_tokens == 10 * BLOCK for placement in placed)
