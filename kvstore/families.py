"""Numbers as families of prometheus_client: described once, for whoever tells them.

That is what an ingress's own `/metrics` shows, what Ray is told (`metrics.py`), and what the table of all
metrics is checked against.
"""

import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from shoal.kvstore.histogram import Histogram

Role = Literal["supervisor", "router", "ingress", "engine", "store"]


def gauge(name: str, description: str, value: float) -> Metric:
    """What it is now."""
    return GaugeMetricFamily(name, description, value=value)


def gauges(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """The same for each value of a label."""
    family = GaugeMetricFamily(name, description, labels=[label])
    for labelled, value in values.items():
        family.add_metric([labelled], value)
    return family


def total(name: str, description: str, value: float) -> Metric:
    """What it has grown to. `_total` is added to the name."""
    return CounterMetricFamily(name, description, value=value)


def totals(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, description, labels=[label])
    for labelled, value in values.items():
        family.add_metric([labelled], value)
    return family


def histogram(name: str, description: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, description, buckets=values.buckets(), sum_value=values.sum)


def signs_of_life(role: Role, backend: str = "", now: float | None = None) -> Iterator[Metric]:
    """What each process tells. The series of one that is dead linger, so the last time that it spoke is told:
    whose is more than half a minute old is gone, or hangs."""
    yield gauge(
        "shoal_heartbeat_timestamp_seconds",
        "When the process last told its metrics, in Unix time.",
        time.time() if now is None else now,
    )
    yield build_info(role, backend)


def build_info(role: Role, backend: str = "") -> Metric:
    family = GaugeMetricFamily(
        "shoal_build_info", "1; what runs here.", labels=["version", "role", "backend"]
    )
    family.add_metric([shoal_version(), role, backend], 1)
    return family


@cache
def shoal_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:  # run from a working directory
        return "uninstalled"
