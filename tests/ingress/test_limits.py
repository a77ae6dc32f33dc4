"""What a key may ask for in a minute and at once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.ingress.errors import Limit, RateLimited
from shoal.actors.ingress.limits import Allowance, Bucket, Limits, duration
from tests.ingress.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(ask: Callable[[], object]) -> tuple[Limit, str]:
    """Which limit, and when to come again."""
    with pytest.raises(RateLimited) as refused:
        ask()
    error = refused.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.headers is not None
    return error.limit, error.headers["retry-after"]


def test_a_minutes_worth_at_once_and_then_as_time_brings_it(clock: Clock) -> None:
    bucket = Bucket(6, clock)
    for _ in range(6):
        assert bucket.wait_s(1) == 0
        bucket.take(1)
    assert (bucket.wait_s(1), bucket.wait_s(2), bucket.until_full_s()) == (10, 20, 60)
    clock.now += 10
    assert (bucket.wait_s(1), bucket.level) == (0, 1)
    clock.now += 3600
    assert bucket.level == 6


def test_more_than_a_bucketful_waits_until_it_is_full_and_leaves_a_debt(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(20)
    assert bucket.wait_s(100) == 20
    clock.now += 20
    assert bucket.wait_s(100) == 0
    bucket.take(100)
    assert (bucket.level, bucket.wait_s(1)) == (-40, 41)


def test_under_another_limit_what_is_left_stays_and_no_more_than_that_fits(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(20)
    bucket.change(600)
    assert bucket.level == 40
    clock.now += 1
    assert bucket.level == 50
    bucket.change(6)
    assert bucket.level == 6


amounts = st.tuples(st.integers(0, 30), st.floats(0, 20), st.integers(-10, 10))


@given(per_minute=st.integers(1, 100), asked=st.lists(amounts, max_size=40))
def test_over_any_time_no_more_than_a_bucketful_and_what_time_brought(
    per_minute: int, asked: list[tuple[int, float, int]]
) -> None:
    """Of what is held back at once, and settled a little later for more or less."""
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    began, taken, debt = clock.now, 0.0, 0.0
    for amount, pause_s, surplus in asked:
        if bucket.wait_s(amount) == 0:
            bucket.take(amount)
            bucket.take(max(surplus, -amount))
            taken += amount + max(surplus, -amount)
            debt = max(debt, -bucket.level)
        else:
            clock.now += pause_s
        assert taken <= per_minute + (clock.now - began) * per_minute / 60 + max(debt, 0) + 1e-6
        assert bucket.level <= per_minute


@given(per_minute=st.integers(1, 10_000), spent=st.integers(0, 20_000), amount=st.integers(1, 20_000))
def test_who_comes_when_told_is_let_in(per_minute: int, spent: int, amount: int) -> None:
    clock = Clock()
    allowance = Allowance(Limits(tokens_per_minute=per_minute), clock)
    allowance.hold(0).settle(spent)
    try:
        allowance.hold(amount)
    except RateLimited as refused:
        assert refused.headers is not None
        clock.now += int(refused.headers["retry-after"])
        allowance.hold(amount)


def test_requests_at_once(clock: Clock) -> None:
    allowance = Allowance(Limits(max_concurrent=2), clock)
    with allowance.request(), allowance.request():
        assert allowance.num_open == 2
        assert refusal(lambda: allowance.request().__enter__()) == ("concurrent", "1")
    assert allowance.num_open == 0
    with allowance.request():
        pass


def test_requests_a_minute_and_one_that_is_refused_costs_nothing(clock: Clock) -> None:
    allowance = Allowance(Limits(requests_per_minute=2), clock)
    for _ in range(2):
        with allowance.request():
            pass
    for _ in range(3):
        assert refusal(lambda: allowance.request().__enter__()) == ("requests", "30")
    clock.now += 30
    with allowance.request():
        pass


def test_tokens_are_held_back_and_what_was_not_used_is_there_again(clock: Clock) -> None:
    allowance = Allowance(Limits(tokens_per_minute=600), clock)
    hold = allowance.hold(600)
    assert refusal(lambda: allowance.hold(10)) == ("tokens", "1")
    hold.settle(100)
    assert allowance.headers()["x-ratelimit-remaining-tokens"] == "500"
    allowance.hold(0).settle(1000)
    assert refusal(lambda: allowance.hold(1)) == ("tokens", "51")


def test_the_headers_are_openais(clock: Clock) -> None:
    allowance = Allowance(Limits(requests_per_minute=60, tokens_per_minute=6000), clock)
    with allowance.request():
        allowance.hold(250)
        assert allowance.headers() == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": "5750",
            "x-ratelimit-reset-tokens": "2.5s",
        }
    assert Allowance(Limits(), clock).headers() == {}


def test_what_is_open_when_limits_change_is_settled_with_those_of_then(clock: Clock) -> None:
    allowance = Allowance(Limits(), clock)
    hold = allowance.hold(100)
    allowance.change(Limits(tokens_per_minute=600, max_concurrent=1))
    hold.settle(100)
    assert allowance.headers()["x-ratelimit-remaining-tokens"] == "500"
    with allowance.request():
        assert refusal(lambda: allowance.request().__enter__())[0] == "concurrent"
        allowance.change(Limits())
        with allowance.request():
            pass
    assert allowance.num_open == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.2345, "1m1.235s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
