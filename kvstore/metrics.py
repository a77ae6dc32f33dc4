"""A process's own numbers as Ray metrics, which Ray's metrics endpoint of each node shows as `ray_<name>`."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import Metric
from ray.util.metrics import Counter, Gauge

METRICS_INTERVAL_S = 5.0
"""Ray passes them on every 10 s, and forgets a gauge that was not set again within 20."""

Labels = Mapping[str, str]
"""Of everything that a process tells: `shoal_cluster`, and `model_name` where it has one. Not `cluster`: so
platforms call the Kubernetes cluster, which they add to every series."""

NO_LABELS: Labels = MappingProxyType({})


def name_for_people(process: str, labels: Labels) -> str:
    """As Ray's dashboard and logs show an actor, which several clusters may share: `default/router`."""
    return "/".join(filter(None, (labels.get("shoal_cluster"), process)))


class Metrics:
    """Tells Ray. Every series has the process's name and labels."""

    def __init__(self, process: str, labels: Labels) -> None:
        self._tags = {**labels, "process": process}
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def tell(self, families: Iterable[Metric]) -> None:
        """Where everything stands.

        A histogram is told as what it consists of, `_bucket`, `_count` and `_sum`, each a gauge: to Ray's own
        every single value would have to be told, and it would remember each as the middle of its bucket.
        """
        for family in families:
            for sample in family.samples:
                if family.type == "counter":
                    self._tell_total(family, sample.labels, sample.value)
                else:
                    gauge = self._metric(Gauge, sample.name, family.documentation, sample.labels)
                    gauge.set(sample.value, tags={**self._tags, **sample.labels})

    def _tell_total(self, family: Metric, labels: Labels, value: float) -> None:
        """Of a counter Ray wants to hear how much it grew, and itself adds `_total` to its name."""
        counter = self._metric(Counter, family.name, family.documentation, labels)
        key = (family.name, tuple(labels.values()))
        if key not in self._told:
            # From 0 on, or a rate would miss what it grew to before it was first seen. `inc` refuses a 0.
            counter._record(0.0, tags={**self._tags, **labels})
        grown = value - self._told.get(key, 0.0)
        if grown > 0:
            counter.inc(grown, tags={**self._tags, **labels})
        self._told[key] = value

    def _metric(self, kind: type, name: str, description: str, labels: Labels) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description, tag_keys=(*self._tags, *labels))
        return self._metrics[name]
