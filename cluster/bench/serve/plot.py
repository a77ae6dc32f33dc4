"""A run as one picture: what it did over time, and how its latencies spread."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shoal.cluster.bench.serve.client import Failure
from shoal.cluster.bench.serve.load import Record
from shoal.cluster.bench.serve.run import Run
from shoal.cluster.bench.serve.summary import Completed, Summary, completed, inter_token_s, token_times

BUCKETS = 60
BLUE, ORANGE, GREEN, RED = "#2f6fb0", "#d9822b", "#3a9464", "#c23b3b"


def draw(run: Run, summary: Summary, path: Path) -> None:
    records, done = run.load.records, completed(run.load.records)
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(run, summary))
    (over_time, first_tokens), (waits, gaps) = figure.subplots(2, 2)
    first_tokens.sharex(over_time)
    _over_time(over_time, records, done, run.started_at, summary.duration_s)
    _first_tokens(first_tokens, records, done, run.started_at)
    ttft_s = [reply.text_at[0] - record.due_at for record, reply in done if reply.text_at]
    e2e_s = [reply.ended_at - record.due_at for record, reply in done]
    _spread(waits, {"time to first token": (ttft_s, BLUE), "end to end": (e2e_s, ORANGE)})
    _spread(gaps, {"inter-token latency": (inter_token_s(reply for _, reply in done), GREEN)})
    waits.set_title("Waiting for a reply")
    gaps.set_title("Waiting for the next token")
    figure.savefig(path, dpi=110)


def _title(run: Run, summary: Summary) -> str:
    config, workload = run.config, run.config.workload
    load = (
        f"{config.num_clients} clients"
        if config.rate is None
        else f"{config.rate:g} requests/s ({config.arrivals})"
    )
    return (
        f"{run.server.model}: {workload.name}, {workload.input_len} in, {workload.output_len} out, {load}\n"
        f"{summary.completed:,} requests, {summary.failed:,} failed, "
        f"{summary.requests_per_s:,.2f} requests/s, {summary.output_tokens_per_s:,.1f} output tokens/s"
    )


def _over_time(
    axes: Axes, records: list[Record], done: list[Completed], started_at: float, duration_s: float
) -> None:
    edges = np.linspace(0.0, max(duration_s, 1e-3), BUCKETS + 1)
    events = [(at - started_at, share) for _, reply in done for at, share in token_times(reply)]
    at, tokens = zip(*events, strict=True) if events else ((), ())
    rate = np.histogram(at, edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(rate, edges, color=BLUE, fill=True, alpha=0.6)
    axes.set_title("Throughput and requests running")
    axes.set_xlabel("seconds")
    axes.set_ylabel("output tokens/s", color=BLUE)
    sent = np.sort([record.sent_at - started_at for record in records])
    ended = np.sort([record.outcome.ended_at - started_at for record in records])
    when = np.concatenate(([0.0], np.sort(np.concatenate((sent, ended)))))
    running = np.searchsorted(sent, when, side="right") - np.searchsorted(ended, when, side="right")
    right = axes.twinx()
    right.step(when, running, where="post", color=ORANGE)
    right.set_ylabel("requests running", color=ORANGE)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))


def _first_tokens(axes: Axes, records: list[Record], done: list[Completed], started_at: float) -> None:
    """Coloured by the cached share of the prompt, where the server tells it; failures are red lines."""
    spoken = [(record, reply) for record, reply in done if reply.text_at]
    due_s = [record.due_at - started_at for record, _ in spoken]
    ttft_ms = [1e3 * (reply.text_at[0] - record.due_at) for record, reply in spoken]
    shares = [
        reply.usage.cached_tokens / max(1, reply.usage.input_tokens)
        for _, reply in spoken
        if reply.usage and reply.usage.cached_tokens is not None
    ]
    if shares and len(shares) == len(spoken):
        points = axes.scatter(due_s, ttft_ms, c=shares, cmap="viridis", vmin=0.0, vmax=1.0, s=14)
        axes.figure.colorbar(points, ax=axes, label="share of the prompt that was cached")
    else:
        axes.scatter(due_s, ttft_ms, color=BLUE, s=14)
    for record in records:
        if isinstance(record.outcome, Failure):
            axes.axvline(record.due_at - started_at, color=RED, alpha=0.3, linewidth=1)
    axes.set_title("Time to first token, by when a request was due")
    axes.set_xlabel("seconds")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)


def _spread(axes: Axes, spreads: Mapping[str, tuple[Iterable[float], str]]) -> None:
    """The share of values that are at most x, with the percentiles of the table marked."""
    right = 0.0
    for name, (seconds, color) in spreads.items():
        values = np.sort(1e3 * np.fromiter(seconds, float))
        if not values.size:
            continue
        axes.plot(values, np.linspace(0, 1, values.size), color=color, label=name)
        for percent in (50, 90, 99):
            value = float(np.percentile(values, percent))
            axes.plot(value, percent / 100, "o", color=color, markersize=4)
            axes.annotate(f" p{percent} {value:,.1f}", (value, percent / 100), fontsize=8, va="top")
        right = max(right, 1.3 * value)
        axes.legend(loc="lower right")
    axes.set_xlim(0, right or None)  # one value far behind p99 would press all others to the left
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of values")
    axes.grid(alpha=0.3)
