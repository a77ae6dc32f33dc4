"""A process's own numbers as Ray metrics, which Ray's metrics endpoint of each node shows as `ray_<name>`."""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

METRICS_INTERVAL_S = 2.0
"""Ray itself gathers them about as often."""


class Metrics:
    """Counted in plain classes; here only told. Not more than a few tags: each makes a series."""

    def __init__(self, process: str) -> None:
        self._tags = {"process": process}
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, str], float] = {}

    def gauge(self, name: str, description: str, value: float) -> None:
        """What it is now."""
        if name not in self._metrics:
            self._metrics[name] = Gauge(name, description, tag_keys=("process",))
        self._metrics[name].set(value, tags=self._tags)

    def total(self, name: str, description: str, value: float) -> None:
        """What it has grown to."""
        self.totals(name, description, "", {"": value})

    def totals(self, name: str, description: str, tag: str, values: Mapping[str, float]) -> None:
        """The same for each value of a tag."""
        keys = ("process", tag) if tag else ("process",)
        if name not in self._metrics:
            self._metrics[name] = Counter(name, description, tag_keys=keys)
        for label, value in values.items():
            grown = value - self._told.get((name, label), 0.0)
            if grown > 0:
                self._metrics[name].inc(grown, tags={**self._tags, **({tag: label} if tag else {})})
                self._told[name, label] = value
