"""What a person sees while a batch runs: a bar on a terminal, a line now and then in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.cluster.batch.tally import Tally
from shoal.cluster.console import PLAIN

SILENCE_S = 30.0


class Show(Protocol):
    """How far a tally has come."""

    def __call__(self, tally: Tally, /) -> None: ...


def progress(
    tally: Tally, console: Console, *, clock: Callable[[], float] = time.monotonic
) -> AbstractContextManager[Show]:
    return _bar(tally, console, clock) if console.is_terminal else _lines(console, clock)


@contextmanager
def _bar(tally: Tally, console: Console, clock: Callable[[], float]) -> Iterator[Show]:
    columns = (
        TextColumn("batch"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
    )
    began = clock()
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("batch", total=tally.num_lines, completed=tally.num_before, told="")

        def show(tally: Tally) -> None:
            bars.update(task, completed=tally.done, told=told(tally, clock() - began))

        yield show


@contextmanager
def _lines(console: Console, clock: Callable[[], float]) -> Iterator[Show]:
    began = last = clock()

    def show(tally: Tally) -> None:
        nonlocal last
        if (now := clock()) - last < SILENCE_S:
            return
        last, took_s = now, now - began
        left_s = took_s / tally.num_answered * tally.left
        line = f"{tally.done:,} of {tally.num_lines:,} lines, {told(tally, took_s)}, {left_s:,.0f} s to go"
        console.print(line, **PLAIN)

    yield show


def told(tally: Tally, took_s: float) -> str:
    """Tokens are those of prompts and answers together, whether or not they were hit."""
    speed = tally.tokens / max(took_s, 1e-3)
    hits = tally.cached_tokens
    share = f" ({hits / tally.prompt_tokens:.0%})" if tally.prompt_tokens else ""
    return f"{tally.failed:,} failed, {speed:,.0f} tokens/s, {hits:,} hit{share}"
