"""`shoal batch`: it parses and reports; the work is elsewhere, imported when it is needed."""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shoal.actors.messages import HttpConfig
from shoal.cluster.batch.lines import Problem
from shoal.cluster.batch.tally import in_a_line
from shoal.cluster.console import PLAIN, one_line_errors
from shoal.cluster.signals import stop_signal

if TYPE_CHECKING:
    from shoal.cluster.batch.run import Batch

MOST_TOLD = 20
"""Problems of an input that are told line by line."""


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Lines of OpenAI's batch form.")],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="OUT.jsonl", help="Answers, a line each; one that is there is gone on with."),
    ] = None,
    *,
    url: Annotated[
        str | None, typer.Option(help="A server that runs. Default: a cluster of our own, for this batch.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SHOAL_API_KEY", help="Sent to --url as a bearer token.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that are open at once. Default: what keeps all engines full."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for a whole answer. Shoal itself says so after 3,600.")
    ] = 3660.0,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="At the end, put the answers into the order of the input.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask those lines again that failed before.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only say what is wrong with IN.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as a line of JSON.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Of our own cluster, as for `shoal serve`; so are all that follow.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What the lines call the model.")] = None,
    engines: Annotated[
        int | None, typer.Option("--engines", "--data-parallel-size", min=1, help="Engine actors to run.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of one engine.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one engine, such as 4GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that an engine runs at once.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
    kv_store_memory: Annotated[
        str | None, typer.Option(help="Host memory of each node for prefixes; 0 is none.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join. Default: RAY_ADDRESS, else a private local Ray."),
    ] = None,
) -> None:
    """Answer every line of IN in OUT, lines that share prefixes together. Run again, it goes on."""
    own = {
        "model": model,
        "revision": revision,
        "served_model_name": served_model_name,
        "engines": engines,
        "threads": threads,
        "memory": memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
        "kv_store_memory": kv_store_memory,
        "address": address,
    }
    own = {name: value for name, value in own.items() if value is not None}
    console = Console(stderr=True)
    if check:
        _check(source, console, as_json=as_json)
        return
    # What takes long to import is imported when it is clear that it is needed.
    from shoal.cluster.batch.index import BatchError  # noqa: PLC0415
    from shoal.cluster.batch.run import BatchOptions, prepared  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError  # noqa: PLC0415

    with one_line_errors(BatchError, ModelSourceError):
        if target is None:
            raise ValueError("OUT.jsonl is missing: name a file for the answers, or --check IN.jsonl alone")
        if url is not None and own:
            flag = f"--{next(iter(own)).replace('_', '-')}"
            raise ValueError(f"{flag} is of a cluster of our own, --url of one that runs: choose one")
        options = BatchOptions(
            input=source,
            output=target,
            concurrency=concurrency,
            timeout_s=timeout,
            ordered=ordered,
            retry_failed=retry_failed,
        )
        with prepared(options, console) as batch:
            try:
                if batch.tally.left and url is not None:
                    with stop_signal() as stop:
                        batch.run(url, api_key, stop, console)
                elif batch.tally.left:
                    _in_a_cluster_of_our_own(batch, own, console)
                batch.finish()
            except BaseException:
                if batch.tally.num_answered:  # else the error says it all
                    _report(batch, console, as_json=as_json)
                raise
            _report(batch, console, as_json=as_json)
    if batch.tally.failed or batch.tally.left:
        raise typer.Exit(1)


def _in_a_cluster_of_our_own(batch: "Batch", own: Mapping[str, Any], console: Console) -> None:
    from shoal.cluster.lifecycle import ServeError  # noqa: PLC0415
    from shoal.cluster.options import ModelOptions, ServeOptions  # noqa: PLC0415
    from shoal.cluster.serve import serve  # noqa: PLC0415
    from shoal.kvstore.sizes import parse_size  # noqa: PLC0415

    of_model, store = dict(own), own.get("kv_store_memory")
    if (memory := of_model.pop("memory", None)) is not None:
        of_model["memory_bytes"] = parse_size(memory)
    address = of_model.pop("address", None)
    of_model.pop("kv_store_memory", None)
    options = ServeOptions(
        models=(ModelOptions(**of_model),),
        kv_store_bytes=None if store is None else parse_size(store, or_none=True),
        http=HttpConfig(port=0),
        address=address,
        name=batch.name,
    )

    def work(url: str, stop: threading.Event) -> None:
        batch.run(url, None, stop, console)

    with one_line_errors(ServeError):
        serve(options, console, work)


def _report(batch: "Batch", console: Console, *, as_json: bool) -> None:
    summary = batch.summary
    if as_json:
        typer.echo(json.dumps(summary))
    console.print(in_a_line(batch.tally, summary["seconds"]), **PLAIN)


def _check(source: Path, console: Console, *, as_json: bool) -> None:
    from shoal.cluster.batch.check import check  # noqa: PLC0415
    from shoal.cluster.batch.index import BatchError  # noqa: PLC0415

    codes: Counter[str] = Counter()

    def found(number: int, problem: Problem) -> None:
        codes[problem.code] += 1
        if codes.total() <= MOST_TOLD:
            console.print(f"line {number}: {problem.message}", **PLAIN)

    with one_line_errors(BatchError):
        num_lines = check(source, console, found)
    if codes.total() > MOST_TOLD:
        console.print(f"and {codes.total() - MOST_TOLD:,} more", **PLAIN)
    if as_json:
        typer.echo(json.dumps({"lines": num_lines, "problems": codes.total(), "codes": codes}))
    else:
        console.print(f"{num_lines:,} lines, {codes.total():,} problems", **PLAIN)
    if codes:
        raise typer.Exit(1)
