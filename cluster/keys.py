"""`shoal keys`: makes API keys, and looks over the file that has their hashes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.cluster.console import PLAIN, one_line_errors

app = typer.Typer(help="Make and check API keys.", no_args_is_help=True)


@app.command()
def new(
    *,
    name: Annotated[str, typer.Option(help="Whose key it is, in messages and lists.")],
    tenant: Annotated[
        str | None, typer.Option(help="Keys of one tenant share cached prefixes. Default: the name.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="At most.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="At most, of prompts and answers together.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests open at once.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Add its hash to this file. Default: show what to add.")
    ] = None,
) -> None:
    """Make a key. It is shown this once: what is kept is its hash."""
    from shoal.actors.ingress.keys import KeyEntry, hash_of, in_one_line, new_key  # noqa: PLC0415
    from shoal.cluster.key_file import add_key, as_yaml  # noqa: PLC0415

    key = new_key()
    fields = {
        "name": name,
        "hash": hash_of(key),
        "tenant": tenant,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    with one_line_errors():
        with in_one_line():
            entry = KeyEntry.model_validate(fields)
        if file is not None:
            add_key(file, entry)
    typer.echo(key)  # alone on stdout, for scripts
    told = f"its hash is in {file}" if file is not None else f"add below `keys:`\n{as_yaml(entry).rstrip()}"
    Console(stderr=True).print(told, **PLAIN)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="What `shoal serve --api-keys` would be given.")],
) -> None:
    """Say who may come in, or what is wrong with the file."""
    from shoal.actors.ingress.keys import read_keys  # noqa: PLC0415

    with one_line_errors():
        entries = read_keys(file)
    tenants = {entry.whose for entry in entries}
    typer.echo(f"{len(entries)} key(s) of {len(tenants)} tenant(s)")
    for entry in entries:
        limits = entry.model_dump(exclude={"name", "hash", "tenant"}, exclude_none=True)
        told = ", ".join(f"{limit} {value:,}" for limit, value in limits.items())
        typer.echo(f"{entry.name}: tenant {entry.whose}; {told or 'no limits'}")
