"""When those that are refused are told to come again."""

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from shoal.actors.ingress.pace import LONGEST_S, Pace


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def after(clock: Clock, *, seconds: float, num_ended: int) -> Pace:
    pace = Pace(clock)
    for _ in range(num_ended):
        clock.now += seconds / num_ended
        pace.ended()
    if not num_ended:
        clock.now += seconds
    return pace


def test_those_refused_together_come_back_as_fast_as_requests_end() -> None:
    pace = after(Clock(), seconds=5, num_ended=9)  # two a second, with the one that is about to end
    assert [pace.retry_after_s() for _ in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_line_moves_on() -> None:
    clock = Clock()
    pace = after(clock, seconds=5, num_ended=4)
    assert [pace.retry_after_s() for _ in range(4)] == [1, 2, 3, 4]
    clock.now += 3
    assert pace.retry_after_s() == 3, "behind the fourth, whose turn is in a second; it has become slower"


def test_where_nothing_ends_it_takes_long() -> None:
    clock = Clock()
    pace = after(clock, seconds=12, num_ended=0)
    assert pace.retry_after_s() == 10, "a bit less: the window fades"
    clock.now += 1000
    assert pace.retry_after_s() == LONGEST_S


def test_a_door_that_has_just_been_opened_has_no_reason_to_put_anybody_off() -> None:
    assert Pace(Clock()).retry_after_s() == 1


def test_an_idle_hour_does_not_count_as_slow() -> None:
    clock = Clock()
    pace = after(clock, seconds=3600, num_ended=0)
    pace.restart()
    assert pace.retry_after_s() == 1


@example(events=[(12.0, "refused"), (1.6931471820000001, "refused"), (1e-05, "refused")])
@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["ended", "refused", "restart"]))))
def test_it_is_always_a_time_that_a_client_can_wait(events: list[tuple[float, str]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    for pause_s, event in events:
        clock.now += pause_s
        match event:
            case "ended":
                pace.ended()
            case "restart":
                pace.restart()
            case _:
                assert 1 <= pace.retry_after_s() <= LONGEST_S
