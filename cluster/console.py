"""What every command says in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
"""For a line that may hold what people and servers wrote."""


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """What the operator can mend, these and ValueError, is a line on stderr and status 1; anything else is a
    bug and its trace."""
    mendable: tuple[type[Exception], ...] = (*kinds, ValueError)
    try:
        yield
    except mendable as error:
        Console(stderr=True).print(f"error: {error}", style="red", **PLAIN)
        raise typer.Exit(1) from error


def write(path: Path, text: str, console: Console) -> None:
    path.write_text(text)
    console.print(f"written to {path}", **PLAIN)
