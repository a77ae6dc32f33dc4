"""Replays side by side: as a person reads them, and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cluster.bench.trace.config import TraceConfig
from shoal.cluster.bench.trace.outcome import Outcome
from shoal.cluster.console import PLAIN

PERCENTS = (50, 90, 99)


def show(outcomes: Sequence[Outcome], config: TraceConfig, console: Console) -> None:
    console.print(_hits(outcomes), _waits(outcomes))
    for note in notes(outcomes, config):
        console.print(note, **PLAIN)


def notes(outcomes: Sequence[Outcome], config: TraceConfig) -> Iterator[str]:
    first = outcomes[0]
    ceiling = first.ceiling_tokens / first.num_prompt_tokens
    yield f"one cache for all would hit {ceiling:.1%} of all prompt tokens"
    yield (
        f"break-even link speed {config.break_even_bytes_per_s / 1e9:.2f} GB/s: a token of "
        f"{config.bytes_per_token:,} bytes is computed in {1e6 / config.speed.prefill_tokens_per_s:.0f} µs; "
        "over a slower link, fetching it loses"
    )
    if config.has_stores:
        yield _verdict("its own node's store", config.own_link.bytes_per_s, config)
        yield _verdict("another node's store", config.other_link.bytes_per_s, config)
    for outcome in outcomes:
        if outcome.num_replaced:
            yield f"{outcome.policy}: requests that outlived their engine: {outcome.num_replaced:,}"
        if outcome.num_unserved:
            yield f"{outcome.policy}: requests that found no engine: {outcome.num_unserved:,}"


def _verdict(place: str, bytes_per_s: float, config: TraceConfig) -> str:
    times = config.break_even_bytes_per_s / bytes_per_s
    verdict = "so it is computed instead" if times >= 1 else "so it is fetched"
    return f"from {place} at {bytes_per_s / 1e9:.2f} GB/s a token takes {times:.2f} times that: {verdict}"


def _hits(outcomes: Sequence[Outcome]) -> Table:
    table = Table("hits", "of all", "of one cache's", "device", "own store", "other store", "evicted")
    table.columns[0].no_wrap = True
    table.caption = "of all prompt tokens, by where they were; what stores evicted"
    for outcome in outcomes:
        hits, total = outcome.hits, outcome.num_prompt_tokens
        table.add_row(
            outcome.policy,
            f"{outcome.hit_share:.1%}",
            f"{outcome.of_ceiling:.1%}",
            *(f"{tokens / total:.1%}" for tokens in (hits.device, hits.own_store, hits.other_store)),
            f"{outcome.evicted_store_bytes / 1e9:,.0f} GB",
        )
    return table


def _waits(outcomes: Sequence[Outcome]) -> Table:
    table = Table("first token", "mean", "p50", "p90", "p99", "work", "requests", "speed")
    table.columns[0].no_wrap = True
    table.caption = "seconds; of the busiest engine by the mean; requests simulated a second"
    for outcome in outcomes:
        table.add_row(
            outcome.policy,
            f"{outcome.mean_first_token_s:.2f}",
            *(f"{outcome.first_token_s(percent):.2f}" for percent in PERCENTS),
            f"{outcome.work_imbalance:.2f}",
            f"{outcome.request_imbalance:.2f}",
            f"{len(outcome.served) / max(outcome.wall_s, 1e-9):,.0f}",
        )
    return table


def as_json(outcomes: Sequence[Outcome], config: TraceConfig, trace: str) -> str:
    document = {
        "trace": trace,
        "config": {key: value for key, value in asdict(config).items() if key != "policy"},
        "break_even_bytes_per_s": config.break_even_bytes_per_s,
        "num_prompt_tokens": outcomes[0].num_prompt_tokens,
        "one_cache_hit_tokens": outcomes[0].ceiling_tokens,
        "policies": {outcome.policy: _document(outcome) for outcome in outcomes},
    }
    return json.dumps(document, indent=2) + "\n"


def _document(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": len(outcome.served),
        "unserved": outcome.num_unserved,
        "placed_anew": outcome.num_replaced,
        "hit_tokens": asdict(outcome.hits),
        "hit_share": round(outcome.hit_share, 6),
        "of_one_cache": round(outcome.of_ceiling, 6),
        "ttft_s": {"mean": round(outcome.mean_first_token_s, 6)}
        | {f"p{percent}": round(outcome.first_token_s(percent), 6) for percent in PERCENTS},
        "e2e_s": {f"p{percent}": round(outcome.end_s(percent), 6) for percent in PERCENTS},
        "work_max_by_mean": round(outcome.work_imbalance, 6),
        "requests_max_by_mean": round(outcome.request_imbalance, 6),
        "evicted_store_bytes": outcome.evicted_store_bytes,
        "simulated_s": round(outcome.simulated_s, 3),
        "wall_s": round(outcome.wall_s, 3),
        "engines": [asdict(engine) for engine in outcome.engines],
    }
