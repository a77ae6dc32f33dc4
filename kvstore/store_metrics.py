"""What a node's store tells of itself."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric

from shoal.kvstore.families import gauge, signs_of_life, total, totals
from shoal.kvstore.store import KVStore


def store_metrics(store: KVStore[Any]) -> Iterator[Metric]:
    yield from signs_of_life("store")
    counts = store.counts
    yield gauge("shoal_kv_store_entries", "Blocks and state segments that can be found.", len(store))
    yield gauge("shoal_kv_store_used_bytes", "Of the budget, what is coming included.", store.used_bytes)
    yield gauge("shoal_kv_store_budget_bytes", "--kv-store-memory.", store.budget_bytes)
    yield total("shoal_kv_store_reads", "Readings by engines that found something.", counts.reads)
    yield total("shoal_kv_store_evicted_bytes", "Evicted to make room.", counts.evicted_bytes)
    yield totals(
        "shoal_kv_store_extents",
        "Extents (up to 8 MiB of neighbouring entries) that engines offered, by what became of them.",
        "outcome",
        {
            "stored": counts.stored_extents,
            "duplicate": counts.duplicate_extents,
            "no_room": counts.refused_extents,
            "did_not_come": counts.failed_extents,
        },
    )
    yield total("shoal_kv_store_evicted_extents", "Evicted to make room.", counts.evicted_extents)
