"""A bar on stderr while a run goes on; stdout is left to its results."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from shoal.cluster.bench.serve.client import Failure
from shoal.cluster.bench.serve.load import Record
from shoal.cluster.bench.serve.run import Run, ServeBenchConfig, run_bench


def watched(config: ServeBenchConfig, console: Console) -> Run:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[failed]} failed", markup=False),
        TimeElapsedColumn(),
    )
    num_failed = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=config.planned, failed=0)

        def on_record(record: Record) -> None:
            nonlocal num_failed
            num_failed += isinstance(record.outcome, Failure)
            bars.update(task, advance=1, failed=num_failed)

        return run_bench(
            config, on_stage=lambda stage: bars.update(task, description=stage), on_record=on_record
        )
