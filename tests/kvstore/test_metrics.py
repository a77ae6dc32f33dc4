"""What is told to Ray of numbers that are counted elsewhere."""

from typing import Any

import pytest

from shoal.kvstore.metrics import Metrics

Told = list[tuple[str, float, dict[str, str]]]


class FakeMetric:
    told: Told

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._tag_keys = name, tag_keys

    def _tell(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == set(self._tag_keys)
        self.told.append((self._name, value, tags))

    inc = set = _tell


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    FakeMetric.told = []
    fake: Any = FakeMetric
    monkeypatch.setattr("shoal.kvstore.metrics.Counter", fake)
    monkeypatch.setattr("shoal.kvstore.metrics.Gauge", fake)
    return FakeMetric.told


def test_a_total_is_told_by_what_it_grew(told: Told) -> None:
    metrics = Metrics("engine-a")
    for total in (0, 5, 5, 7):
        metrics.total("bytes", "", total)
    assert told == [("bytes", 5, {"process": "engine-a"}), ("bytes", 2, {"process": "engine-a"})]


def test_each_value_of_a_tag_has_a_total_of_its_own(told: Told) -> None:
    metrics = Metrics("engine-a")
    metrics.totals("lost", "", "reason", {"deadline": 1})
    metrics.totals("lost", "", "reason", {"deadline": 1, "checksum": 2})
    metrics.gauge("used", "", 3)
    assert told == [
        ("lost", 1, {"process": "engine-a", "reason": "deadline"}),
        ("lost", 2, {"process": "engine-a", "reason": "checksum"}),
        ("used", 3, {"process": "engine-a"}),
    ]
