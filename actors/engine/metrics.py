"""What an engine tells of itself.

Other threads let these numbers grow: each is true, or was a moment ago.
"""

from collections.abc import Iterator

from prometheus_client import Metric

from shoal.actors.engine.engine import Engine
from shoal.actors.engine.fetcher import Fetcher
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.saver import LOSSES, Saver
from shoal.actors.engine.scheduler import Scheduler
from shoal.actors.engine.timed_runner import TimedRunner
from shoal.actors.engine.transfers import PLACES, Fallback
from shoal.actors.messages import DraftCounts
from shoal.kvstore.families import gauges, histogram, signs_of_life, total, totals


def engine_metrics(
    *,
    backend: str,
    engine: Engine,
    scheduler: Scheduler,
    runner: TimedRunner,
    saver: Saver,
    fetcher: Fetcher,
) -> Iterator[Metric]:
    yield from signs_of_life("engine", backend)
    yield from _of_requests(scheduler)
    yield from _of_memory(scheduler.pools)
    yield from _of_steps(engine, runner, scheduler.draft_counts())
    yield from _of_saves(scheduler, saver)
    yield from _of_fetches(scheduler, fetcher)


def _of_requests(scheduler: Scheduler) -> Iterator[Metric]:
    load = scheduler.load()
    yield gauges(
        "shoal_engine_requests",
        "Requests by what they do: wait for room, wait for a fetch, run.",
        "state",
        {"waiting": load.num_waiting, "fetching": load.num_fetching, "running": load.num_running},
    )
    yield histogram(
        "shoal_engine_queue_seconds",
        "From a request's arrival at the engine to its first admission, a fetch included.",
        scheduler.queue_seconds,
    )
    yield total(
        "shoal_engine_forked_sequences",
        "Sequences that began with what another choice of their prompt had computed.",
        scheduler.num_forked,
    )
    yield total(
        "shoal_engine_preemptions",
        "Sequences that gave way and were computed again.",
        scheduler.num_preemptions,
    )


def _of_memory(pools: Pools) -> Iterator[Metric]:
    usage = pools.usage()
    yield gauges("shoal_engine_kv_blocks", "Blocks of the device's memory by state.", "state", usage.blocks)
    yield gauges(
        "shoal_engine_state_segments",
        "State segments by state; none where no layer has state of a fixed size.",
        "state",
        usage.segments,
    )
    yield total(
        "shoal_engine_evicted_blocks", "Cached blocks that had to make room.", pools.num_evicted_blocks
    )


def _of_steps(engine: Engine, runner: TimedRunner, drafts: DraftCounts) -> Iterator[Metric]:
    yield histogram(
        "shoal_engine_step_seconds", "How long steps took; the sum is time at work.", runner.step_seconds
    )
    yield total(
        "shoal_engine_computed_tokens",
        "Rows computed, of prompts and of answers; what was preempted or continued, again.",
        runner.num_computed_tokens,
    )
    yield total("shoal_engine_drawn_tokens", "Tokens drawn.", runner.num_drawn_tokens)
    yield total(
        "shoal_engine_drafted_tokens",
        "Next tokens that were guessed and verified.",
        drafts.num_tokens,
    )
    yield total(
        "shoal_engine_accepted_tokens",
        "Those that were right and used.",
        drafts.num_accepted,
    )
    yield total(
        "shoal_engine_failed_steps", "Steps that raised; their requests failed.", engine.num_failed_steps
    )


def _of_saves(scheduler: Scheduler, saver: Saver) -> Iterator[Metric]:
    yield total("shoal_kv_saved_bytes", "Copied off the device and given to a store.", saver.saved_bytes)
    yield totals(
        "shoal_kv_unsaved_bytes",
        "Copied off the device in vain.",
        "reason",
        {reason: saver.lost_bytes[reason] for reason in LOSSES},
    )
    yield total(
        "shoal_kv_unsaved_pieces",
        "Blocks and segments evicted before they could be copied.",
        scheduler.transfers.num_unsaved,
    )


def _of_fetches(scheduler: Scheduler, fetcher: Fetcher) -> Iterator[Metric]:
    counts = scheduler.transfers
    yield total("shoal_kv_fetches", "Fetches that brought something.", fetcher.num_landed)
    for name, description, by_place in (
        ("shoal_kv_fetched_bytes", "Read from the own node's store and from others.", fetcher.fetched_bytes),
        ("shoal_kv_fetched_tokens", "Tokens that were fetched and not computed.", counts.fetched_tokens),
        ("shoal_kv_fetch_seconds", "Reading, verifying and copying, each fetch's added.", fetcher.seconds),
    ):
        yield totals(name, description, "place", {place: by_place.get(place, 0) for place in PLACES})
    for name, description, by_reason in (
        (
            "shoal_kv_fallbacks",
            "Prefixes computed although a store was said to have them, by why.",
            counts.fallbacks,
        ),
        ("shoal_kv_failed_reads", "Reads of a store that did not bring all they should.", fetcher.failures),
    ):
        yield totals(
            name, description, "reason", {reason.value: by_reason.get(reason, 0) for reason in Fallback}
        )
