"""`shoal bench engine` as one picture: tokens/s of all who took part, over batch and over prompt length."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from shoal.cluster.bench.contender import Phase
from shoal.cluster.bench.engine import Row

COLORS = {"shoal": "#2f6fb0", "transformers": "#d9822b", "llama.cpp": "#3a9464", "vllm": "#8a5ba8"}

Line = dict[int, float]
"""Tokens/s by batch or prompt length."""


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    decode, prefill = figure.subplots(1, 2)
    _panel(decode, lines_of(rows, "decode"), "Decode", "sequences in the batch")
    _panel(prefill, lines_of(rows, "prefill"), "Prefill", "tokens in the prompt")
    figure.savefig(path, dpi=110)


def lines_of(rows: Sequence[Row], phase: Phase) -> dict[str, Line]:
    lines: dict[str, Line] = {"shoal": {}}
    for row in rows:
        if row.phase == phase:
            x = row.batch if phase == "decode" else row.context
            lines["shoal"][x] = row.tokens_per_s
            lines.setdefault(f"{row.peer} ({row.peer_dtype})", {})[x] = row.baseline_tokens_per_s
    return lines


def _panel(axes: Axes, lines: dict[str, Line], title: str, x_label: str) -> None:
    for name, line in lines.items():
        axes.plot(list(line), list(line.values()), "o-", label=name, color=COLORS[name.split(" ")[0]])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lines["shoal"])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend()
