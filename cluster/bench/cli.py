"""`shoal bench`: speed, always beside a peer in the same run."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

app = typer.Typer(help="Measure speed beside a peer, in the same run.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Keeps `engine` a sub-command even while it is the only one."""


@app.command()
def engine(
    model: Annotated[str | None, typer.Argument(help="As for `shoal serve`.")] = None,
    *,
    vs: Annotated[Literal["transformers"], typer.Option(help="The peer.")] = "transformers",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of both sides.")] = None,
) -> None:
    """Decode at batch 1, 8 and 32 and prefill of 1,024 tokens, in one process."""
    from shoal.actors.engine.config import EngineConfig  # noqa: PLC0415  (torch takes seconds)
    from shoal.cluster.bench.engine import bench_engine, report  # noqa: PLC0415
    from shoal.cluster.bench.transformers_peer import TransformersPeer  # noqa: PLC0415
    from shoal.cluster.sources import resolve_model  # noqa: PLC0415

    console = Console()
    checkpoint = resolve_model(model).directory
    threads = threads or len(os.sched_getaffinity(0))
    config = EngineConfig(
        checkpoint=str(checkpoint),
        max_model_len=2048,
        memory_bytes=4 << 30,
        threads=threads,
        prefix_cache="naive",  # the same prompt is measured again and again
    )
    rows = bench_engine(config, TransformersPeer(checkpoint, threads), console)
    report(rows, vs, json_file, console)
