"""`shoal config`: looks at a file, starts nothing."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from shoal.cluster.config.load import load_config
from shoal.cluster.config.models import ClusterConfig
from shoal.cluster.config.schema import schema_text
from shoal.cluster.console import PLAIN, one_line_errors

app = typer.Typer(help="Look at a cluster's YAML before anything is started.", no_args_is_help=True)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A cluster's YAML.")]) -> None:
    """Print what a file comes to, defaults included; or everything that is wrong with it, and exit with 1."""
    with one_line_errors():
        config = load_config(file)
    Console().print(as_yaml(config), end="", **PLAIN)


@app.command()
def schema() -> None:
    """Print the JSON schema of such files, for editors."""
    typer.echo(schema_text(), nl=False)


def as_yaml(config: ClusterConfig) -> str:
    """All of it but what is left to be chosen at the start. Secrets are not told."""
    data = config.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
