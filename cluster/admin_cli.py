"""`shoal status|scale|drain|stop`: what an operator says to a cluster that runs."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from shoal.cluster.admin import AdminClient, AdminError
from shoal.cluster.console import PLAIN, one_line_errors

Url = Annotated[str, typer.Option(help="Of an ingress of the cluster.")]
Key = Annotated[
    str | None, typer.Option(envvar="SHOAL_ADMIN_KEY", help="What the cluster asks of its operators.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LOCAL = "http://127.0.0.1:8000"

app = typer.Typer()


@app.command()
def status(
    url: Url = LOCAL,
    admin_key: Key = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, every second, until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a cluster consists of, and what is amiss. Exit status 2 if it is not ready."""
    from shoal.cluster.status import shown  # noqa: PLC0415

    console = Console()
    with _client(url, admin_key) as client:
        said = client.status()
        if as_json:
            typer.echo(json.dumps(said, indent=2))
        elif not watch:
            console.print(shown(said))
        else:
            with Live(shown(said), console=console) as live:
                while True:
                    time.sleep(1.0)
                    said = client.status()
                    live.update(shown(said))
    if not said["ready"]:
        raise typer.Exit(2)


@app.command()
def scale(
    engines: Annotated[int, typer.Argument(min=0, help="How many there are to be.")],
    model: Annotated[str | None, typer.Option(help="Of which model, if there are several.")] = None,
    url: Url = LOCAL,
    admin_key: Key = None,
) -> None:
    """Change how many engines a model has. Those that go finish what they have."""
    with _client(url, admin_key) as client:
        client.scale(engines, model)


@app.command()
def drain(
    node: Annotated[str | None, typer.Option(help="A node's id, or a part of it.")] = None,
    engine: Annotated[str | None, typer.Option(help="An engine's id; another comes in its place.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    url: Url = LOCAL,
    admin_key: Key = None,
) -> None:
    """Let a node, or an engine, finish what it has and go."""
    with _client(url, admin_key) as client:
        if (node is None) == (engine is None):
            raise ValueError("give either --node or --engine")
        if engine is not None:
            if undo:
                raise ValueError("--undo is for --node: an engine that drains cannot be called back")
            client.drain_engine(engine)
        elif node is not None:
            client.drain_node(node, undo=undo)


@app.command()
def stop(
    url: Url = LOCAL,
    admin_key: Key = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has ended.")] = 180.0,
) -> None:
    """End a cluster: streams may go on for its grace, then nothing of it is left."""
    with _client(url, admin_key) as client:
        client.stop()
        deadline = time.monotonic() + timeout
        while client.answers():
            if time.monotonic() > deadline:
                raise ValueError(f"it still answers after {timeout:g} s: see the log of its supervisor")
            time.sleep(0.2)
    Console().print("stopped", **PLAIN)


@contextmanager
def _client(url: str, admin_key: str | None) -> Iterator[AdminClient]:
    with one_line_errors(AdminError):
        client = AdminClient(url, admin_key)
        try:
            yield client
        finally:
            client.close()
