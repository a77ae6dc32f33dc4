"""What an actor is made with, to come by a model's files on its own node: functions that can be sent there.

They run in the engines' and ingresses' processes, so they import nothing before it is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from platform import node as host

from shoal.kvstore.sizes import format_size

Tell = Callable[[str], None]


def whole(checkpoint: str, tell: Tell) -> str:
    """For an engine. Once a node: those that start at the same time wait for the first one."""
    return _folder(checkpoint, "whole", tell)


def without_weights(checkpoint: str, tell: Tell) -> str:
    """For a front door, which needs configuration and tokenizer."""
    return _folder(checkpoint, "text", tell)


def _folder(checkpoint: str, part: str, tell: Tell) -> str:
    """Raises ValueError for what no retry can mend, OSError for what may be had later; one line each."""
    if Path(checkpoint).is_dir():
        return checkpoint
    if checkpoint.startswith("/") and not checkpoint.rpartition("@")[0].endswith(".gguf"):
        raise ValueError(
            f"on {host()}: {checkpoint} is not there: mount it on every node, or name a hub id or s3://"
        )
    from shoal.cluster.sources import ModelSourceError, ModelUnreachable, Part, fetch_pinned  # noqa: PLC0415

    try:
        return str(fetch_pinned(checkpoint, part=Part(part), progress=ToldProgress(tell)))
    except ModelUnreachable as error:
        raise OSError(f"on {host()}: {'; '.join(error.problems)}") from error
    except ModelSourceError as error:
        raise ValueError(f"on {host()}: {'; '.join(error.problems)}") from error


class ToldProgress:
    """Says what is done and how far it is, each time anew."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextmanager
    def step(self, title: str) -> Iterator["_ToldStep"]:
        self._tell(title)
        yield _ToldStep(self._tell, title)


class _ToldStep:
    def __init__(self, tell: Tell, title: str) -> None:
        self._tell, self._title = tell, title
        self._num_bytes = self._total_bytes = 0

    def add_total(self, num_bytes: int) -> None:
        self._total_bytes += num_bytes

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        of_all = f"{format_size(self._num_bytes)} of {format_size(self._total_bytes)}"
        self._tell(f"{self._title}: {of_all}")
