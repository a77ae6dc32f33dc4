"""What a person sees while a model is fetched: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Step(Protocol):
    """One thing that takes a while. Steps that cannot count bytes never call these."""

    def add_total(self, num_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


class Progress(Protocol):
    def step(self, title: str) -> AbstractContextManager[Step]: ...


def terminal_progress() -> Progress:
    """Bars if a person watches stderr, lines otherwise; stdout is left to the command's own answer."""
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else LineProgress()


class BarProgress:
    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        started = time.monotonic()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=self._console, transient=True) as bars:
            yield _BarStep(bars, title)
        took_s = time.monotonic() - started
        self._console.print(f"{title}: done in {took_s:.1f} s", highlight=False, markup=False)


class _BarStep:
    def __init__(self, bars: Bars, title: str) -> None:
        self._bars = bars
        self._task = bars.add_task(title, total=None)
        self._total_bytes = 0

    def add_total(self, num_bytes: int) -> None:
        if not self._total_bytes:
            self._bars.columns = (*self._bars.columns, DownloadColumn())
        self._total_bytes += num_bytes
        self._bars.update(self._task, total=self._total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._bars.advance(self._task, num_bytes)


class LineProgress:
    """A line when a step begins, one every ten seconds while bytes arrive, and one when it is done."""

    def __init__(
        self,
        write: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        started = self._clock()
        self._write(f"{title} ...")
        yield _LineStep(self._write, self._clock, title)
        self._write(f"{title}: done in {self._clock() - started:.1f} s")


class _LineStep:
    SILENCE_S = 10.0

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float], title: str) -> None:
        self._write, self._clock, self._title = write, clock, title
        self._num_bytes = self._total_bytes = 0
        self._last_line = clock()

    def add_total(self, num_bytes: int) -> None:
        self._total_bytes += num_bytes

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if (now := self._clock()) - self._last_line >= self.SILENCE_S:
            self._last_line = now
            self._write(f"{self._title}: {self._num_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB")
