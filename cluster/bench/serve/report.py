"""A run as a person reads it, and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cluster.bench.serve.client import Reply
from shoal.cluster.bench.serve.load import Record
from shoal.cluster.bench.serve.run import Run
from shoal.cluster.bench.serve.summary import Distribution, Summary, completed, summarize
from shoal.cluster.console import PLAIN

BUSY_CLIENT = 0.8
LATE_S = 0.01
CACHED_BY_CHANCE = 0.05


def summary_of(run: Run) -> Summary:
    return summarize(
        run.load.records,
        started_at=run.started_at,
        num_sent=run.load.num_sent,
        planned=run.config.planned,
        num_clients=run.config.num_clients,
    )


def notes(run: Run, summary: Summary) -> Iterator[str]:
    """What a reader must know before comparing these numbers with others."""
    done = completed(run.load.records)
    short = sum(
        reply.usage is not None and reply.usage.output_tokens < record.output_len for record, reply in done
    )
    if run.interrupted:
        yield f"interrupted: {summary.unfinished} requests were running and are not counted"
    if run.config.ignore_eos and not run.server.ignores_eos:
        yield "the server refuses ignore_eos"
    if short:
        yield f"{short} of {len(done)} replies ended before the length that was asked for"
    if summary.tokens_counted_by != "usage" and done:
        yield "without usage in every reply, an event that carries text counts as one token"
    elif summary.tokens_per_event is not None and abs(summary.tokens_per_event - 1) > 0.1:
        yield (
            f"an event carries {summary.tokens_per_event:.2f} tokens: inter-token latency is between events, "
            "time per output token is by usage"
        )
    if (
        run.config.workload.name == "random"
        and summary.cached_tokens is not None
        and summary.input_tokens
        and summary.cached_tokens > CACHED_BY_CHANCE * summary.input_tokens
    ):
        yield "the server had seen prompts of this --seed before: choose another for a cold run"
    if summary.late_s is not None and summary.late_s.p99 > LATE_S:
        yield f"requests left up to {summary.late_s.max:.3f} s after they were due; latencies include that"
    if run.cpu_share > BUSY_CLIENT:
        yield f"this client used {run.cpu_share:.0%} of a core: it may be what limits the rates"


def show(run: Run, summary: Summary, console: Console) -> None:
    console.print(_rates(summary))
    if summary.completed:
        console.print(_latencies(summary))
    for kind, failure in summary.failures.items():
        console.print(f"{failure.count} x {kind}: {failure.example}", style="red", **PLAIN)
    for note in notes(run, summary):
        console.print(f"note: {note}", style="yellow", **PLAIN)


def _rates(summary: Summary) -> Table:
    table = Table("requests", "failed", "requests/s", "output tokens/s", "total tokens/s", "cached")
    cached = "-"
    if summary.cached_tokens is not None and summary.input_tokens:
        cached = f"{summary.cached_tokens / summary.input_tokens:.1%}"
    table.add_row(
        f"{summary.completed:,}",
        f"{summary.failed:,}",
        f"{summary.requests_per_s:,.2f}",
        f"{summary.output_tokens_per_s:,.1f}",
        "-" if summary.total_tokens_per_s is None else f"{summary.total_tokens_per_s:,.1f}",
        cached,
    )
    table.caption = f"in {summary.duration_s:.1f} s"
    if (full := summary.full_load) is not None:
        table.caption += (
            f"; at full load {full.output_tokens_per_s:,.1f} output tokens/s over {full.duration_s:.1f} s"
        )
    return table


def _latencies(summary: Summary) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", "max")
    _add_row(table, "time to first token, ms", summary.ttft_s, scale=1e3)
    _add_row(table, "inter-token latency, ms", summary.itl_s, scale=1e3)
    _add_row(table, "time per output token, ms", summary.tpot_s, scale=1e3)
    _add_row(table, "end to end, ms", summary.e2e_s, scale=1e3)
    _add_row(table, "input tokens", summary.input_tokens_per_request)
    _add_row(table, "cached tokens", summary.cached_tokens_per_request)
    _add_row(table, "output tokens", summary.output_tokens_per_request)
    return table


def _add_row(table: Table, title: str, values: Distribution | None, scale: float = 1.0) -> None:
    if values is None:
        table.add_row(title, *["-"] * 5)
        return
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    table.add_row(title, *(f"{number * scale:,.1f}" for number in numbers))


def as_json(run: Run, summary: Summary, *, with_requests: bool) -> str:
    config = run.config
    workload = config.workload
    document: dict[str, Any] = {
        "started": datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds"),
        "interrupted": run.interrupted,
        "config": {
            "url": config.base_url,
            "endpoint": config.spoken_endpoint,
            "workload": workload.name,
            "prompt_format": workload.prompt_format,
            "input_len": str(workload.input_len),
            "output_len": str(workload.output_len),
            "groups": workload.knob("groups"),
            "prefix_len": workload.knob("prefix_len"),
            "turns": workload.knob("turns"),
            "seed": workload.seed,
            "concurrency": config.num_clients,
            "rate": config.rate,
            "arrivals": None if config.rate is None else config.arrivals,
            "num_requests": config.planned,
            "duration_s": config.duration_s,
            "warmup": config.warmup,
            "timeout_s": config.timeout_s,
        },
        "server": {"model": run.server.model, "request_fields": run.server.fields},
        "summary": asdict(summary),
        "client_cpu_share": run.cpu_share,
        "notes": list(notes(run, summary)),
    }
    if with_requests:
        document["requests"] = [_row(record, run.started_at) for record in run.load.records]
    return json.dumps(_rounded(document), indent=2) + "\n"


def _row(record: Record, started_at: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "session": record.session,
        "turn": record.turn,
        "group": record.group,
        "client": record.client,
        "due_s": record.due_at - started_at,
        "sent_s": record.sent_at - started_at,
        "end_s": record.outcome.ended_at - started_at,
    }
    match record.outcome:
        case Reply(text_at=text_at, usage=usage):
            row |= {
                "first_text_s": text_at[0] - started_at if text_at else None,
                "last_text_s": text_at[-1] - started_at if text_at else None,
                "events": len(text_at),
                "usage": None if usage is None else asdict(usage),
            }
        case failure:
            row |= {"failure": failure.kind, "message": failure.message}
    return row


def _rounded(value: Any) -> Any:
    """To microseconds: what lies behind is noise that makes files hard to read and compare."""
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_rounded(entry) for entry in value]
        case _:
            return value
