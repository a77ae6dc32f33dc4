"""Everything that the product tells of itself, by what it is made of; no process is needed."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric

from shoal.actors.engine.fetcher import Fetcher
from shoal.actors.engine.metrics import engine_metrics
from shoal.actors.engine.rates import Rates
from shoal.actors.engine.saver import Saver
from shoal.actors.engine.staging import Staging
from shoal.actors.engine.timed_runner import TimedRunner
from shoal.actors.ingress.metrics import Metrics as IngressMetrics
from shoal.actors.ingress.vllm_names import VllmNames
from shoal.actors.messages import DraftCounts, EngineId, EngineLoad
from shoal.actors.router.members import Members
from shoal.actors.router.metrics import router_metrics
from shoal.cluster.supervisor_metrics import supervisor_metrics
from shoal.kvstore.store import KVStore
from shoal.kvstore.store_metrics import store_metrics
from tests.cluster_unit.test_supervisor import Cluster
from tests.engine.bench import Bench


def _clock() -> float:
    return 0.0


@dataclass(frozen=True)
class Described:
    """As the table of all metrics has it."""

    name: str
    """A counter's with `_total`."""
    kind: str
    labels: frozenset[str]
    """Beside those of the whole process."""

    @property
    def series(self) -> frozenset[str]:
        """The names that its series have."""
        if self.kind != "histogram":
            return frozenset((self.name,))
        return frozenset(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))

    @classmethod
    def of(cls, family: Metric) -> "Described":
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        return cls(name, family.type, labels)


def of_each_role() -> dict[str, list[Metric]]:
    """What Ray is told."""
    return {
        "ingress": list(_ingress().families()),
        "engine": list(_engine()),
        "router": list(router_metrics(Members(_clock))),
        "store": list(store_metrics(KVStore(1 << 20, _clock))),
        "supervisor": list(supervisor_metrics(Cluster(num_engines=1, with_stores=True).supervisor)),
    }


def by_vllms_names() -> list[Metric]:
    """What an ingress's own `/metrics` has beside its own names."""
    drafts = DraftCounts(num_drafts=1, num_tokens=5, num_accepted=3)
    load = EngineLoad(num_running=1, num_waiting=1, kv_usage=0.5, drafts=drafts)
    return list(VllmNames(_ingress().families(), {"model": {EngineId("engine-0"): load}}).collect())


def told_to_ray(*, but_by: str = "") -> frozenset[str]:
    """Names of series as Ray's endpoint shows them. but_by: a role that is not there."""
    told = [families for role, families in of_each_role().items() if role != but_by]
    return frozenset(f"ray_{name}" for families in told for name in _series(families))


def _series(families: Iterable[Metric]) -> set[str]:
    return {name for family in families for name in Described.of(family).series}


def _ingress() -> IngressMetrics:
    metrics = IngressMetrics()
    metrics.of("model")
    metrics.count_request("/v1/completions", 200, 1.0)  # labels that are not known before
    return metrics


def _engine() -> Iterable[Metric]:
    bench, unused = Bench(), ThreadPoolExecutor(1)
    anything: Any = None
    saver = Saver(
        EngineId("engine-0"),
        bench.scheduler,
        anything,
        Staging(1 << 20),
        bytes_per_block=1,
        bytes_per_segment=1,
        copies=unused,
        post=anything,
        offer=anything,
        clock=_clock,
    )
    fetcher = Fetcher(
        bench.scheduler,
        anything,
        anything,
        Rates(lambda: 0.0, _clock),
        reads=unused,
        copies=unused,
        post=anything,
        clock=_clock,
    )
    return engine_metrics(
        backend="cpu",
        engine=bench.engine,
        scheduler=bench.scheduler,
        runner=TimedRunner(bench.runner),
        saver=saver,
        fetcher=fetcher,
    )
