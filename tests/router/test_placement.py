"""Prefix hits and load in one cost: worked examples, then the herds that users of other routers have seen."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    RequestId,
)
from shoal.actors.router.engine_view import (
    EXPECTATION_LIFETIME_S,
    NOTE_LIFETIME_S,
    OUTPUT_TOKENS,
    ROW_WEIGHT,
)
from shoal.actors.router.members import GRACE_S, Members
from shoal.actors.router.placement import Placement, Placer
from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key

A, B, C, D = (EngineId(f"engine-{letter}") for letter in "abcd")
BLOCK = 16
ROOT = root_key(b"model", "")

Tokens = tuple[int, ...]


def tokens(start: int, length: int) -> Tokens:
    """Different starts have nothing in common."""
    return tuple(range(start * 100_000, start * 100_000 + length))


def keys(prompt: Tokens) -> tuple[BlockKey, ...]:
    return tuple(extend_keys(ROOT, prompt, BLOCK))


def infos(*engine_ids: EngineId) -> list[EngineInfo]:
    return [
        EngineInfo(engine_id=engine_id, node=f"node of {engine_id}", backend="", memory="", fingerprint=b"")
        for engine_id in engine_ids
    ]


@dataclass
class Engine:
    """An engine's own account, and what it has said of it."""

    engine_id: EngineId
    tokens_per_s: float = 1000.0
    held: set[BlockKey] = field(default_factory=set)
    running: dict[RequestId, int] = field(default_factory=dict)  # tokens not computed yet
    sequence: int = 0

    def report(
        self, *received: str, stored: tuple[BlockKey, ...] = (), removed: tuple[BlockKey, ...] = ()
    ) -> EngineReport:
        self.sequence += 1
        self.held = (self.held | set(stored)) - set(removed)
        return EngineReport(
            engine_id=self.engine_id,
            sequence=self.sequence,
            num_requests=len(self.running),
            uncomputed_tokens=sum(self.running.values()),
            tokens_per_s=self.tokens_per_s,
            received=tuple((RequestId(name), 1) for name in received),
            stored=stored,
            removed=removed,
        )

    def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot(
            engine_id=self.engine_id, sequence=self.sequence, block_keys=tuple(sorted(self.held))
        )


class Cluster:
    """A placement among engines that are in step with it, and a clock that only the test moves."""

    def __init__(self, *engine_ids: EngineId) -> None:
        self.now = 0.0
        self.num_snapshots = 0
        self.engines = {engine_id: Engine(engine_id) for engine_id in engine_ids}
        self.members = Members(lambda: self.now)
        self.placement = Placer(self.members, block_size=BLOCK, clock=lambda: self.now)
        self.members.set_engines(infos(*engine_ids))
        self.answer_snapshots()
        self._num_requests = 0

    def answer_snapshots(self) -> None:
        for engine_id in self.members.take_snapshot_requests():
            self.num_snapshots += 1
            self.members.restore(self.engines[EngineId(engine_id)].snapshot())

    def place(self, prompt: Tokens, *exclude: EngineId, name: str = "") -> Placement:
        self._num_requests += 1
        placed = self.placement.place(
            PlacementRequest(
                request_id=RequestId(name or f"r{self._num_requests}"),
                attempt=1,
                num_prompt_tokens=len(prompt),
                block_keys=keys(prompt),
                exclude=frozenset(exclude),
            )
        )
        assert placed is not None
        return placed

    def where(self, prompt: Tokens, *exclude: EngineId) -> EngineId:
        return self.place(prompt, *exclude).engine_id

    def hear(self, engine_id: EngineId, *received: str, stored: Tokens = (), removed: Tokens = ()) -> None:
        report = self.engines[engine_id].report(*received, stored=keys(stored), removed=keys(removed))
        self.members.report(report)
        self.answer_snapshots()

    def serve(self, prompt: Tokens, *, name: str, takes_s: float = 0.0) -> Placement:
        """A whole request: placed, computed, reported."""
        placed = self.place(prompt, name=name)
        self.now += takes_s
        self.hear(placed.engine_id, name, stored=prompt)
        return placed


def test_without_engines_there_is_no_place() -> None:
    members = Members(lambda: 0.0)
    placement = Placer(members, block_size=BLOCK, clock=lambda: 0.0)
    request = PlacementRequest(request_id=RequestId("r"), attempt=1, num_prompt_tokens=10)
    assert placement.place(request) is None
    members.set_engines(infos(A))
    assert placement.place(request) == Placement(engine_id=A, expected_hit_tokens=0)


def test_a_request_goes_where_its_prefix_is() -> None:
    cluster = Cluster(A, B, C)
    cluster.hear(B, stored=tokens(1, 320))
    assert cluster.place(tokens(1, 320) + tokens(2, 50)) == Placement(engine_id=B, expected_hit_tokens=320)


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    cluster = Cluster(A)
    cluster.hear(A, stored=tokens(1, 64))
    assert cluster.place(tokens(1, 64)).expected_hit_tokens == 48
    assert cluster.place(tokens(1, 65)).expected_hit_tokens == 64


def test_a_longer_hit_loses_when_more_work_stands_before_it() -> None:
    """Computing 112 tokens anew costs as much as standing behind 448."""
    rows = int(ROW_WEIGHT * OUTPUT_TOKENS)
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 112))
    prompt = tokens(1, 112) + tokens(2, 10)
    cluster.engines[A].running[RequestId("other")] = 4 * 112 - rows - 1
    cluster.hear(A)
    assert cluster.where(prompt) == A
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 112))
    cluster.engines[A].running[RequestId("other")] = 4 * 112 - rows + 1
    cluster.hear(A)
    assert cluster.where(prompt) == B


def test_a_faster_engine_gets_more_of_the_work() -> None:
    cluster = Cluster(A, B)
    cluster.engines[A].tokens_per_s = 3000.0
    counts = Counter(cluster.serve(tokens(i, 5000), name=f"r{i}").engine_id for i in range(100))
    assert 70 <= counts[A] <= 90, counts


def test_one_slow_prompt_does_not_condemn_an_engine() -> None:
    """The first is slow everywhere: memory is touched for the first time."""
    cluster = Cluster(A, B)
    cluster.engines[A].tokens_per_s = 250.0
    assert cluster.serve(tokens(1, 300), name="first").engine_id == A
    placed = [cluster.serve(tokens(i, 300), name=f"r{i}").engine_id for i in range(2, 12)]
    assert 3 <= placed.count(A) <= 5, placed


def test_an_engine_that_has_measured_nothing_is_tried() -> None:
    cluster = Cluster(A, B)
    cluster.engines[A].tokens_per_s = 50_000.0
    cluster.engines[B].tokens_per_s = 0.0
    cluster.hear(A)
    cluster.hear(B)
    assert {cluster.where(tokens(i, 200)) for i in range(2)} == {A, B}


def test_running_requests_are_load_though_their_prompts_are_computed() -> None:
    cluster = Cluster(A, B)
    cluster.engines[A].running = {RequestId(f"old{i}"): 0 for i in range(3)}
    cluster.hear(A)
    cluster.hear(B)
    assert [cluster.where(tokens(i, 10)) for i in range(3)] == [B, B, B]


def test_a_burst_spreads_before_any_engine_has_reported() -> None:
    cluster = Cluster(A, B, C)
    assert Counter(cluster.where(tokens(i, 100)) for i in range(9)) == {A: 3, B: 3, C: 3}


def test_the_engines_own_account_replaces_our_notes() -> None:
    cluster = Cluster(A, B)
    assert cluster.place(tokens(1, 100), name="r1").engine_id == A
    cluster.engines[A].running[RequestId("r1")] = 100
    cluster.hear(A, "r1")
    assert cluster.members.loads() == {A: 1, B: 0}, "r1 is counted once, by its engine"
    cluster.engines[A].running.clear()
    cluster.hear(A)
    assert cluster.members.loads() == {A: 0, B: 0}


def test_a_late_report_is_no_news_but_what_it_received_is() -> None:
    cluster = Cluster(A)
    cluster.place(tokens(1, 100), name="r1")
    cluster.engines[A].running[RequestId("r1")] = 100
    late = cluster.engines[A].report("r1")
    cluster.engines[A].running.clear()
    cluster.hear(A)
    cluster.members.report(late)
    assert cluster.members.loads() == {A: 0}


def test_a_request_that_never_arrives_is_not_counted_for_ever() -> None:
    cluster = Cluster(A)
    cluster.place(tokens(1, 100))
    cluster.now = NOTE_LIFETIME_S - 0.1
    assert cluster.members.loads() == {A: 1}
    cluster.now = NOTE_LIFETIME_S
    assert cluster.members.loads() == {A: 0}


def test_a_burst_with_one_new_prefix_sees_it_before_it_is_computed() -> None:
    cluster = Cluster(A, B)
    first = cluster.place(tokens(1, 320) + tokens(2, 20))
    second = cluster.place(tokens(1, 320) + tokens(3, 20))
    assert second == Placement(engine_id=first.engine_id, expected_hit_tokens=320)


def test_a_prefix_is_expected_from_its_arrival_until_it_is_stored_or_never_comes() -> None:
    cluster = Cluster(A)
    cluster.place(tokens(1, 320), name="r1")
    cluster.hear(A, "r1")
    assert cluster.place(tokens(1, 321)).expected_hit_tokens == 320, "received, not stored yet"
    cluster.now = EXPECTATION_LIFETIME_S
    assert cluster.place(tokens(1, 321)).expected_hit_tokens == 0


def num_calls(work: Callable[[], object]) -> int:
    """Of Python functions, each turn of a generator included."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_placement_costs_the_same_however_many_have_not_arrived_yet() -> None:
    cluster = Cluster(A, B)
    first = num_calls(lambda: cluster.place(tokens(0, 100)))
    for i in range(1, 1000):
        cluster.place(tokens(i, 100))
    assert num_calls(lambda: cluster.place(tokens(1000, 100))) <= first + 5


def test_what_stands_on_an_engine_is_forgotten_as_it_arrives_or_never_does() -> None:
    """Seen by where others are placed: the engine that nothing stands on is not passed over for ever."""
    cluster = Cluster(A, B)
    assert cluster.where(tokens(1, 5000)) == A
    assert cluster.where(tokens(2, 100), A) == B
    cluster.now = NOTE_LIFETIME_S
    assert cluster.place(tokens(3, 2000), B, name="arrives").engine_id == A
    cluster.hear(A, "arrives", "arrives", "never placed")
    cluster.now = 1e6
    assert [cluster.where(tokens(4 + i, 100)) for i in range(4)] == [B, A, B, A]


def test_an_engine_that_the_ingress_cannot_reach_is_passed_over() -> None:
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 320))
    assert [cluster.where(tokens(1, 320), A) for _ in range(3)] == [B, B, B]
    request = PlacementRequest(
        request_id=RequestId("r"), attempt=1, num_prompt_tokens=10, exclude=frozenset({A, B})
    )
    assert cluster.placement.place(request) is None


def test_1_one_request_at_a_time_does_not_follow_a_short_prefix_for_ever() -> None:
    """Nothing ever stands anywhere; only what was placed lately parts the engines."""
    cluster = Cluster(A, B)
    system = tokens(1, 100)
    placed = [cluster.serve(system + tokens(i, 40), name=f"r{i}", takes_s=0.5) for i in range(2, 102)]
    counts = Counter(placement.engine_id for placement in placed)
    assert max(counts.values()) <= 70, counts
    assert sum(placement.expected_hit_tokens == 96 for placement in placed) >= 98


def test_1_nor_does_it_while_many_short_requests_are_remembered() -> None:
    """Each is counted to draw 128 tokens, but nobody knows that it does: it is no load."""
    cluster = Cluster(A, B)
    for engine in cluster.engines.values():
        engine.tokens_per_s = 350.0
    for i in range(128):
        cluster.serve(tokens(200 + i, 32), name=f"short{i}", takes_s=0.1)
    system = tokens(1, 256)
    placed = [cluster.serve(system + tokens(i, 32), name=f"r{i}", takes_s=0.17) for i in range(2, 102)]
    counts = Counter(placement.engine_id for placement in placed)
    assert max(counts.values()) <= 70, counts


def test_1_a_conversation_stays_where_it_is_while_the_cluster_idles() -> None:
    cluster = Cluster(A, B)
    places = [cluster.serve(tokens(1, 400 * i), name=f"turn{i}", takes_s=20.0) for i in range(1, 11)]
    assert len({placement.engine_id for placement in places}) == 1


def test_2_a_hot_prefix_spreads_and_is_still_hit() -> None:
    """64 at once on 4 engines, 256 tokens of 300 shared; no report comes in between."""
    cluster = Cluster(A, B, C, D)
    placed = [cluster.place(tokens(1, 256) + tokens(i, 44)) for i in range(2, 66)]
    counts = Counter(placement.engine_id for placement in placed)
    assert len(counts) == 4 and max(counts.values()) <= 1.5 * 64 / 4, counts
    assert sum(placement.expected_hit_tokens for placement in placed) >= 0.8 * 63 * 256


def test_2_a_burst_with_one_long_new_prefix_takes_another_engine_for_every_34_requests() -> None:
    """By then their rows slow each other down by more than it costs to compute 3,968 tokens once more."""
    cluster = Cluster(*(EngineId(f"engine-{i}") for i in range(64)))
    counts = Counter(cluster.where(tokens(1, 3968) + tokens(i, 32)) for i in range(2, 258))
    assert (len(counts), max(counts.values())) == (8, 34)


def test_a_held_prefix_is_passed_over_once_where_some_16_times_as_much_was_placed_lately() -> None:
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 384))
    cluster.place(tokens(2, 6500), B, name="r1")
    cluster.hear(A, "r1", stored=tokens(2, 6500))
    prompts = [tokens(1, 384) + tokens(i, 10) for i in range(3, 7)]
    hits = [cluster.serve(prompt, name=f"r{i}").expected_hit_tokens for i, prompt in enumerate(prompts, 2)]
    assert hits == [0, 384, 384, 384]


def test_4_bursts_of_two_ingresses_are_placed_by_one_router_that_counts_both() -> None:
    cluster = Cluster(A, B, C, D)
    names = [f"{ingress}/{i}" for i in range(32) for ingress in ("ingress-0", "ingress-1")]
    counts = Counter(cluster.place(tokens(i, 100), name=name).engine_id for i, name in enumerate(names, 1))
    assert set(counts.values()) == {16}


def test_6_to_be_told_again_who_is_well_forgets_no_request() -> None:
    cluster = Cluster(A, B)
    for i in range(1, 9):
        cluster.place(tokens(i, 100), B, name=f"r{i}")
    for _ in range(3):
        cluster.members.set_engines(infos(A, B))
        assert cluster.members.loads()[A] == 8


def test_7_a_prompt_that_comes_again_goes_where_it_was() -> None:
    cluster = Cluster(A, B)
    placed = [cluster.serve(tokens(1, 200), name=f"r{i}") for i in range(3)]
    assert [placement.expected_hit_tokens for placement in placed] == [0, 192, 192]


def test_case_06_what_runs_is_counted_however_often_the_members_are_named() -> None:
    cluster = Cluster(A, B)
    cluster.engines[A].running = {RequestId(f"r{i}"): 0 for i in range(8)}
    cluster.hear(A)
    for named in ([A, B], [A, B], [B], [A, B]):
        cluster.members.set_engines(infos(*named))
        cluster.now += 10.0
    assert cluster.members.loads() == {A: 8, B: 0}


def test_8_an_engine_that_was_away_for_a_moment_is_known_again_at_once() -> None:
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 320))
    asked_before = cluster.num_snapshots
    cluster.members.set_engines(infos(B))
    assert cluster.where(tokens(1, 321)) == B
    cluster.now += 2.0
    cluster.hear(A, stored=tokens(2, 320))
    cluster.members.set_engines(infos(A, B))
    cluster.answer_snapshots()
    assert cluster.num_snapshots == asked_before
    for start in (1, 2):
        placed = cluster.place(tokens(start, 321))
        assert placed == Placement(engine_id=A, expected_hit_tokens=320)


def test_10_what_is_believed_is_what_the_engine_holds_again_after_one_snapshot() -> None:
    cluster = Cluster(A)
    asked_before = cluster.num_snapshots
    engine = cluster.engines[A]
    cluster.hear(A, stored=tokens(1, 64))
    engine.report(stored=keys(tokens(2, 64)))  # is lost
    twice = engine.report(stored=keys(tokens(3, 64)), removed=keys(tokens(1, 64)))
    cluster.members.report(twice)
    cluster.answer_snapshots()
    cluster.members.report(twice)
    cluster.hear(A, stored=tokens(4, 64))
    assert cluster.num_snapshots == asked_before + 1
    assert cluster.members.held() == {A: frozenset(engine.held)}


def test_12_an_engine_that_is_gone_is_never_chosen_and_leaves_nothing() -> None:
    cluster = Cluster(A, B)
    cluster.hear(A, stored=tokens(1, 320))
    cluster.hear(B, stored=tokens(1, 32))
    cluster.place(tokens(2, 320), name="on its way")
    cluster.members.set_engines(infos(B))
    cluster.now += GRACE_S
    cluster.members.set_engines(infos(B))
    assert cluster.members.held() == {B: frozenset(keys(tokens(1, 32)))}
    assert cluster.members.directory.holders == {B}
    assert cluster.place(tokens(1, 320)) == Placement(engine_id=B, expected_hit_tokens=32)
    cluster.hear(A, stored=tokens(1, 320))
    cluster.members.restore(cluster.engines[A].snapshot())
    assert cluster.members.held().keys() == {B}, "what it still says is not heard"


def test_13_a_prefix_that_was_evicted_is_no_reason_to_go_there() -> None:
    cluster = Cluster(A, B)
    cluster.serve(tokens(1, 64), name="r1")
    assert cluster.place(tokens(1, 65)).expected_hit_tokens == 64
    cluster.hear(A, stored=tokens(2, 64), removed=tokens(1, 64))
    assert cluster.place(tokens(1, 65)).expected_hit_tokens == 0


def test_case_15_what_another_model_computed_of_the_same_prompt_is_no_hit() -> None:
    """Nor does its engine's end disturb anybody: whose keys are whose is known by holder."""
    cluster = Cluster(A, B)
    prompt = tokens(1, 320)
    of_another = tuple(extend_keys(root_key(b"another model", ""), prompt, BLOCK))
    cluster.members.report(cluster.engines[A].report(stored=of_another))
    cluster.hear(B, stored=prompt)
    assert cluster.place(prompt) == Placement(engine_id=B, expected_hit_tokens=304)
    cluster.members.set_engines(infos(B))
    cluster.now += GRACE_S
    cluster.members.set_engines(infos(B))
    assert cluster.place(prompt) == Placement(engine_id=B, expected_hit_tokens=304)
    cluster.members.check()


def test_37_an_engine_that_comes_to_busy_ones_does_not_get_everything() -> None:
    """Three are asked for 900 tokens a second each. The new one has its share at once, and no more."""
    cluster = Cluster(A, B, C)
    for i in range(300):
        cluster.serve(tokens(i, 900), name=f"r{i}", takes_s=0.33)
    cluster.engines[D] = Engine(D)
    cluster.members.set_engines(infos(A, B, C, D))
    cluster.answer_snapshots()
    placed = [cluster.where(tokens(i, 900)) for i in range(300, 312)]
    assert Counter(placed) == {A: 3, B: 3, C: 3, D: 3}
