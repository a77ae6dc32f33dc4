"""Replays side by side as one picture: hits, waits, how evenly work fell, and how it went over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.bench.trace.outcome import Outcome
from shoal.cluster.bench.trace.schedule import Event

COLORS: dict[RoutingPolicyName, str] = {
    "cost": "#2f6fb0",
    "round_robin": "#d9822b",
    "least_loaded": "#3a9464",
    "greedy_prefix": "#c23b3b",
}
PLACES = (("device", 1.0), ("own_store", 0.6), ("other_store", 0.3))
BUCKETS = 60


def draw(outcomes: Sequence[Outcome], title: str, schedule: Sequence[Event], path: Path) -> None:
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (hits, waits), (work, over_time) = figure.subplots(2, 2)
    _hits(hits, outcomes)
    _waits(waits, outcomes)
    _work(work, outcomes)
    _over_time(over_time, outcomes, schedule)
    figure.savefig(path, dpi=110)


def _hits(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Darker is nearer."""
    for number, outcome in enumerate(outcomes):
        left = 0.0
        for place, alpha in PLACES:
            share = getattr(outcome.hits, place) / outcome.num_prompt_tokens
            axes.barh(number, share, left=left, color=COLORS[outcome.policy], alpha=alpha)
            if share > 0.03:
                axes.text(
                    left + share / 2, number, place.replace("_", " "), ha="center", va="center", fontsize=8
                )
            left += share
        axes.text(left, number, f" {outcome.of_ceiling:.1%} of one cache", va="center", fontsize=8)
    ceiling = outcomes[0].ceiling_tokens / outcomes[0].num_prompt_tokens
    axes.axvline(ceiling, color="black", linestyle="--", linewidth=1, label="one cache for all")
    axes.set_yticks(range(len(outcomes)), [outcome.policy for outcome in outcomes])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.45 * ceiling, 0.05))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Prompt tokens that were not computed, by where they were")
    axes.legend(loc="lower right")


def _waits(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        seconds = np.sort([request.first_token_s for request in outcome.served])
        shares = np.arange(1, seconds.size + 1) / max(1, seconds.size)
        label = f"{outcome.policy}: p90 {outcome.first_token_s(90):.1f} s"
        axes.plot(seconds, shares, color=COLORS[outcome.policy], label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("seconds")
    axes.set_title("Requests by their time to first token")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _work(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        rates = sorted(outcome.work_tokens_per_s, reverse=True)
        label = f"{outcome.policy}: max / mean {outcome.work_imbalance:.2f}"
        axes.plot(
            range(1, len(rates) + 1), rates, "o-", markersize=3, color=COLORS[outcome.policy], label=label
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("engines, the busiest first")
    axes.set_ylabel("prompt tokens computed a second")
    axes.set_title("Work by engine")
    axes.grid(alpha=0.3)
    axes.legend()


def _over_time(axes: Axes, outcomes: Sequence[Outcome], schedule: Sequence[Event]) -> None:
    """By arrival; an engine that comes or goes is a line."""
    arrived_s = [request.arrived_s for outcome in outcomes for request in outcome.served]
    last = max(arrived_s, default=0.0)
    edges = np.linspace(0.0, max(last, 1e-3), BUCKETS + 1)
    for outcome in outcomes:
        arrived = np.array([request.arrived_s for request in outcome.served])
        seconds = np.array([request.first_token_s for request in outcome.served])
        bucket = np.clip(np.digitize(arrived, edges) - 1, 0, BUCKETS - 1)
        p90 = [
            float(np.percentile(seconds[bucket == i], 90)) if (bucket == i).any() else np.nan
            for i in range(BUCKETS)
        ]
        axes.plot((edges[:-1] + edges[1:]) / 2, p90, color=COLORS[outcome.policy], label=outcome.policy)
    for event in schedule:
        axes.axvline(event.at_s, color="black", linewidth=0.8, linestyle=":")
        what = f"{event.count} join" if event.change == "join" else f"{event.engine} {event.change}s"
        axes.text(event.at_s, 1.0, f" {what}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("seconds into the trace")
    axes.set_ylabel("seconds")
    axes.set_title("Time to first token over time, p90")
    axes.grid(alpha=0.3)
    axes.legend()
