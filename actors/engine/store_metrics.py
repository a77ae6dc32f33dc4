"""An engine's dealings with the stores, as metrics."""

from shoal.actors.engine.store_link import StoreLink
from shoal.actors.engine.transfers import TransferCounts
from shoal.kvstore.metrics import Metrics


def publish(metrics: Metrics, link: StoreLink, counts: TransferCounts) -> None:
    """Reads numbers that another thread lets grow: each is true, or was a moment ago."""
    saver, fetcher = link.saver, link.fetcher
    metrics.total("shoal_kv_saved_bytes", "Copied off the device and given to a store.", saver.saved_bytes)
    metrics.totals(
        "shoal_kv_unsaved_bytes", "Copied off the device in vain.", "reason", dict(saver.lost_bytes)
    )
    metrics.total("shoal_kv_unsaved_pieces", "Evicted before they could be copied.", counts.num_unsaved)
    for name, description, by_place in (
        ("shoal_kv_fetched_bytes", "From the own node's store and from others.", fetcher.fetched_bytes),
        ("shoal_kv_fetched_tokens", "That were not computed for it.", counts.fetched_tokens),
        ("shoal_kv_fetch_seconds", "Reading, verifying and copying, each fetch's added.", fetcher.seconds),
    ):
        metrics.totals(name, description, "place", {str(place): n for place, n in by_place.items()})
    for name, description, by_reason in (
        ("shoal_kv_fallbacks", "Prefixes computed although a store was said to have them.", counts.fallbacks),
        ("shoal_kv_failed_reads", "Reads that did not bring all they should.", fetcher.failures),
    ):
        metrics.totals(name, description, "reason", {reason.value: n for reason, n in by_reason.items()})
