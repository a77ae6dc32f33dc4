"""What is told to Ray of numbers that are counted elsewhere."""

from typing import Any

import pytest

from shoal.kvstore.families import gauge, gauges, histogram, signs_of_life, total, totals
from shoal.kvstore.histogram import Histogram
from shoal.kvstore.metrics import NO_LABELS, Metrics, name_for_people

Told = list[tuple[str, float, dict[str, str]]]
PROCESS = {"shoal_cluster": "c", "process": "engine-a"}


class FakeMetric:
    told: Told

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self._name, self._tag_keys = name, tag_keys

    def _record(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == set(self._tag_keys)
        self.told.append((self._name, value, tags))

    inc = set = _record


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    FakeMetric.told = []
    fake: Any = FakeMetric
    monkeypatch.setattr("shoal.kvstore.metrics.Counter", fake)
    monkeypatch.setattr("shoal.kvstore.metrics.Gauge", fake)
    return FakeMetric.told


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("engine-a", {"shoal_cluster": "c"})


def test_a_total_is_told_from_nothing_on_by_what_it_grew(told: Told, metrics: Metrics) -> None:
    for value in (0, 5, 5, 7):
        metrics.tell([total("bytes", "of something", value)])
    assert told == [("bytes", 0, PROCESS), ("bytes", 5, PROCESS), ("bytes", 2, PROCESS)]


def test_each_value_of_a_label_has_a_total_of_its_own(told: Told, metrics: Metrics) -> None:
    metrics.tell([totals("lost", "by why", "reason", {"deadline": 1})])
    metrics.tell([totals("lost", "by why", "reason", {"deadline": 1, "checksum": 2})])
    deadline, checksum = PROCESS | {"reason": "deadline"}, PROCESS | {"reason": "checksum"}
    assert told == [
        ("lost", 0, deadline),
        ("lost", 1, deadline),
        ("lost", 0, checksum),
        ("lost", 2, checksum),
    ]


def test_a_gauge_is_told_every_time_or_ray_would_forget_it(told: Told, metrics: Metrics) -> None:
    for _ in range(2):
        metrics.tell([gauge("used", "now", 3), gauges("blocks", "by state", "state", {"free": 1})])
    assert told == [("used", 3, PROCESS), ("blocks", 1, PROCESS | {"state": "free"})] * 2


def test_a_histogram_is_told_as_what_prometheus_makes_of_one(told: Told, metrics: Metrics) -> None:
    values = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        values.observe(value)
    metrics.tell([histogram("seconds", "took", values)])
    assert told == [
        ("seconds_bucket", 1, PROCESS | {"le": "0.1"}),
        ("seconds_bucket", 2, PROCESS | {"le": "1.0"}),
        ("seconds_bucket", 3, PROCESS | {"le": "+Inf"}),
        ("seconds_count", 3, PROCESS),
        ("seconds_sum", 7.6, PROCESS),
    ]


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)


def test_the_dead_are_known_by_their_last_word(told: Told, metrics: Metrics) -> None:
    metrics.tell(signs_of_life("engine", "cpu-avx2", now=1e9))
    (heartbeat, spoke_at, _), (_, one, facts) = told
    assert (heartbeat, spoke_at, one) == ("shoal_heartbeat_timestamp_seconds", 1e9, 1)
    assert facts["role"] == "engine" and facts["backend"] == "cpu-avx2" and facts["version"]


def test_people_see_whose_process_it_is() -> None:
    assert name_for_people("router", {"shoal_cluster": "default"}) == "default/router"
    assert name_for_people("router", NO_LABELS) == "router"
