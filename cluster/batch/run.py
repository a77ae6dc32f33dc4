"""A batch from its input to its output, against a server that runs."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.cluster.batch.index import Index
from shoal.cluster.batch.lines import Line, Problem, Reply
from shoal.cluster.batch.output import Output
from shoal.cluster.batch.progress import Show, progress
from shoal.cluster.batch.room import Room
from shoal.cluster.batch.runner import RetryPolicy, Runner
from shoal.cluster.batch.server import Server, connected
from shoal.cluster.batch.tally import Tally
from shoal.cluster.batch.tasks import all_or_none

SLOTS_S = 5.0
"""How often the server is asked how many requests keep its engines busy: engines come and go."""
SYNC_S = 1.0
STOP_POLL_S = 0.2
UNTOLD_CONCURRENCY = 64
"""Where a server does not tell."""
MOST_CONCURRENCY = 1000
"""An ingress has at most 1,024 requests open; some are for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    input: Path
    output: Path
    concurrency: int | None = None
    """None is what keeps the server's engines full, by its own numbers."""
    timeout_s: float = 3660.0
    """For a whole answer."""
    ordered: bool = False
    retry_failed: bool = False
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        if self.input.resolve() == self.output.resolve():
            raise ValueError(f"OUT is IN ({self.output}): choose another")


class Batch:
    """An input whose lines are known, and an output that is ours."""

    def __init__(self, options: BatchOptions, index: Index, output: Output) -> None:
        self._options = options
        self._index = index
        self._output = output
        self._took_s = 0.0
        index.set_answers(output.recover(with_failed=not options.retry_failed))
        if options.retry_failed:
            output.rewrite(index.answers())
        self.tally = Tally(
            num_lines=index.num_lines, num_before=index.num_answers, num_failed_before=output.num_failed
        )

    @property
    def name(self) -> str:
        """The same for the same work, so that who takes it up again knows what a killed one has left."""
        where = sha256(os.fsencode(self._options.output.resolve())).hexdigest()
        return f"batch-{self._index.digest[:6]}-{where[:6]}"

    @property
    def summary(self) -> dict[str, Any]:
        return self.tally.summary(self._took_s)

    def run(self, url: str, api_key: str | None, stop: threading.Event, console: Console) -> None:
        """Until every line has an answer, or until told to stop. Raises BatchError; what was answered until
        then is kept."""
        began = time.monotonic()
        try:
            with progress(self.tally, console) as show:
                asyncio.run(self._play(url, api_key, stop, show))
            self._output.sync()
        finally:
            self._took_s = time.monotonic() - began

    def finish(self) -> None:
        """Bring the answers into the input's order, if that is wanted and all are there."""
        if self._options.ordered and not self.tally.left and not self._output.is_ordered:
            self._index.set_answers(self._output.recover())
            self._output.rewrite(self._index.answers())

    async def _play(self, url: str, api_key: str | None, stop: threading.Event, show: Show) -> None:
        def write(number: int, custom_id: str | None, outcome: Reply | Problem) -> None:
            self._output.append(number, custom_id, outcome)
            self.tally.count(outcome)
            show(self.tally)

        async with connected(url, api_key=api_key, timeout_s=self._options.timeout_s) as server:
            await server.meet()
            room = Room(self._options.concurrency or concurrency(await server.num_slots()))
            runner = Runner(server.ask, room, read=self._index.read, write=write, policy=self._options.policy)
            with suppress(_Stopped):
                async with all_or_none() as tasks:
                    beside = [tasks.create_task(self._sync_often()), tasks.create_task(_end_when(stop))]
                    if self._options.concurrency is None:
                        beside.append(tasks.create_task(_follow(server, room)))
                    await runner.run(self._index.unanswered())
                    for task in beside:
                        task.cancel()

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._output.sync)


class _Stopped(Exception):
    """We were told to."""


async def _end_when(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_POLL_S)
    raise _Stopped


async def _follow(server: Server, room: Room) -> None:
    """Engines come and go."""
    while True:
        await asyncio.sleep(SLOTS_S)
        if (slots := await server.num_slots()) is not None:
            room.resize(concurrency(slots))


def concurrency(num_slots: int | None) -> int:
    """A quarter more than run at once wait on their engines, so that whoever ends has a successor there."""
    if num_slots is None:
        return UNTOLD_CONCURRENCY
    return min(MOST_CONCURRENCY, num_slots + max(4, num_slots // 4))


@contextmanager
def prepared(options: BatchOptions, console: Console) -> Iterator[Batch]:
    """Reads the input, and takes the output for ours. Raises BatchError."""
    with read(options.input, console) as index, closing(Output(options.output, index.digest)) as output:
        yield Batch(options, index, output)


@contextmanager
def read(
    path: Path, console: Console, on_line: Callable[[int, Line], object] = lambda number, line: None
) -> Iterator[Index]:
    """An input's index, with a bar while it is made."""
    num_bytes = path.stat().st_size if path.is_file() else None
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
    with ExitStack() as stack:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task("reading", total=num_bytes)
            index = stack.enter_context(Index.of(path, advance=partial(bars.advance, task), on_line=on_line))
        yield index
