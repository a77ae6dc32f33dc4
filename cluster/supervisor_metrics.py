"""What the supervisor tells of the cluster."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from shoal.cluster.supervisor import Supervisor
from shoal.kvstore.families import signs_of_life, total, totals


def supervisor_metrics(supervisor: Supervisor) -> Iterator[Metric]:
    yield from signs_of_life("supervisor")
    counts = supervisor.counts()
    processes = GaugeMetricFamily(
        "shoal_processes",
        "Processes by role that the cluster is to have, and of these the ones that are ready.",
        labels=["role", "state"],
    )
    for role, count in counts.items():
        processes.add_metric([role, "wanted"], count.wanted)
        processes.add_metric([role, "ready"], count.ready)
    yield processes
    yield totals(
        "shoal_restarts",
        "Processes that died, hung or did not start, and were or will be replaced.",
        "role",
        {role: count.failures for role, count in counts.items()},
    )
    yield total(
        "shoal_supervisor_mishaps",
        "Calls to Ray that raised while it kept the cluster, and were or will be tried again.",
        supervisor.num_mishaps,
    )
