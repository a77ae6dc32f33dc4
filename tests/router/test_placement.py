"""Least loaded, with our own recent placements counted."""

from collections import Counter
from dataclasses import dataclass

from shoal.actors.messages import EngineId, EngineLoad, RequestId
from shoal.actors.router.placement import NOTE_LIFETIME_S, LeastLoaded

A, B = EngineId("engine-a"), EngineId("engine-b")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def a_placement(*engines: EngineId) -> tuple[LeastLoaded, Clock]:
    clock = Clock()
    placement = LeastLoaded(clock)
    placement.set_engines(engines)
    return placement, clock


def load(engine: EngineId, sequence: int, num_requests: int, *received: str) -> EngineLoad:
    pairs = tuple((RequestId(name), 1) for name in received)
    return EngineLoad(engine_id=engine, sequence=sequence, num_requests=num_requests, received=pairs)


def place(placement: LeastLoaded, *names: str) -> list[EngineId | None]:
    return [placement.place(RequestId(name), 1) for name in names]


def test_without_engines_there_is_no_place() -> None:
    placement, _ = a_placement()
    assert place(placement, "r") == [None]


def test_a_burst_spreads_before_any_engine_has_reported() -> None:
    placement, _ = a_placement(A, B)
    assert Counter(place(placement, *"abcdef")) == {A: 3, B: 3}


def test_one_request_at_a_time_spreads_too() -> None:
    """Load is zero each time; the one placed on longest ago takes the next."""
    placement, _ = a_placement(A, B)
    counts: Counter[EngineId | None] = Counter()
    for sequence in range(1, 101):
        (engine,) = place(placement, f"r{sequence}")
        assert engine is not None
        counts[engine] += 1
        placement.report(load(engine, sequence, 0, f"r{sequence}"))
    assert counts == {A: 50, B: 50}


def test_the_engines_own_account_replaces_our_notes() -> None:
    placement, _ = a_placement(A, B)
    assert place(placement, "r1", "r2") == [A, B]
    placement.report(load(A, 1, 1, "r1"))
    assert placement.loads() == {A: 1, B: 1}, "r1 is counted once, by its engine"
    placement.report(load(A, 2, 0))
    assert placement.loads() == {A: 0, B: 1}
    assert place(placement, "r3") == [A]


def test_a_late_report_is_no_news_but_what_it_received_is() -> None:
    placement, _ = a_placement(A)
    place(placement, "r1")
    placement.report(load(A, 2, 0))
    placement.report(load(A, 1, 7, "r1"))
    assert placement.loads() == {A: 0}


def test_a_request_that_never_arrives_is_not_counted_for_ever() -> None:
    placement, clock = a_placement(A)
    place(placement, "left before it was sent")
    clock.now = NOTE_LIFETIME_S - 0.1
    assert placement.loads() == {A: 1}
    clock.now = NOTE_LIFETIME_S
    assert placement.loads() == {A: 0}


def test_an_engine_that_the_ingress_cannot_reach_is_passed_over() -> None:
    placement, _ = a_placement(A, B)
    assert [placement.place(RequestId(f"r{i}"), 1, frozenset({A})) for i in range(3)] == [B, B, B]
    assert placement.place(RequestId("r"), 1, frozenset({A, B})) is None


def test_an_engine_that_is_gone_is_never_chosen_and_leaves_nothing() -> None:
    placement, _ = a_placement(A, B)
    placement.report(load(B, 1, 50))
    placement.set_engines([B])
    assert place(placement, "r1", "r2") == [B, B]
    placement.report(load(A, 9, 1))
    assert placement.loads() == {B: 52}, "one that stays keeps what is known of it"
