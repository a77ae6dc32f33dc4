"""Fetch or compute: by what was measured."""

import pytest

from shoal.actors.engine.rates import FIRST_BYTES_PER_S, FIXED_S, MEMORY_BYTES, SLOW_S, Rates

MIB = 1 << 20


def test_what_is_sooner_is_worth_it() -> None:
    rates = Rates(lambda: 500.0, lambda: 0.0)
    own_s = FIXED_S["own_store"] + 64 * MIB / FIRST_BYTES_PER_S["own_store"]
    other_s = FIXED_S["other_store"] + 64 * MIB / FIRST_BYTES_PER_S["other_store"]
    for tokens, own, other, seconds in (
        (100, 64 * MIB, 0, own_s),
        (100, 0, 64 * MIB, other_s),
        (100, 64 * MIB, 64 * MIB, own_s + other_s),
    ):
        enough = int(500 * seconds) + 1
        assert rates.worth(enough, own, other) and not rates.worth(enough - 1, own, other)
        assert rates.worth(tokens, 0, 0)


def test_before_any_prompt_was_computed_a_fetch_is_worth_it() -> None:
    assert Rates(lambda: 0.0, lambda: 0.0).worth(1, 0, 1 << 40)


def test_a_measurement_outweighs_what_was_believed_and_fades() -> None:
    rates = Rates(lambda: 500.0, lambda: 0.0)
    rates.measure("other_store", 16 * MIB, FIXED_S["other_store"] + 16 * MIB / 50e6)
    assert rates.bytes_per_s("other_store") == pytest.approx(50e6)
    for _ in range(5):
        rates.measure("other_store", MEMORY_BYTES, FIXED_S["other_store"] + MEMORY_BYTES / 200e6)
    assert rates.bytes_per_s("other_store") == pytest.approx(200e6, rel=0.01)
    assert rates.bytes_per_s("own_store") == pytest.approx(FIRST_BYTES_PER_S["own_store"])


def test_a_fetch_sooner_than_its_fixed_time_is_not_infinitely_fast() -> None:
    rates = Rates(lambda: 500.0, lambda: 0.0)
    rates.measure("own_store", MIB, 0.001)
    assert rates.bytes_per_s("own_store") == pytest.approx(MIB / 0.0005, rel=0.01)
    rates.measure("own_store", 0, 1.0)
    assert rates.bytes_per_s("own_store") == pytest.approx(MIB / 0.0005, rel=0.01)


def test_a_link_that_was_slow_once_is_tried_again() -> None:
    now = 0.0
    rates = Rates(lambda: 500.0, lambda: now)
    rates.measure("other_store", 16 * MIB, 10.0)
    rates.measure("own_store", 160 * MIB, FIXED_S["own_store"] + 160 * MIB / 12e9)
    assert not rates.worth(512, 0, 16 * MIB)
    now += SLOW_S
    assert not rates.worth(512, 0, 16 * MIB)
    now += 3 * SLOW_S
    assert rates.worth(512, 0, 16 * MIB)
    assert rates.bytes_per_s("own_store") == pytest.approx(12e9), "what is faster than believed stays"
    rates.measure("other_store", 16 * MIB, 10.0)
    assert not rates.worth(512, 0, 16 * MIB), "and is found slow again"
