"""Checkpoints that we made ourselves, each made once and visible only when whole."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from glob import escape
from pathlib import Path
from secrets import token_hex

from shoal.cluster.sources.checkpoint import ModelSourceError, Part, find_problems

RECIPE_FILE = "shoal_recipe.txt"


def cache_root() -> Path:
    """Where this user's machine keeps what we made."""
    if ours := os.environ.get("SHOAL_CACHE"):
        return Path(ours).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"


class CheckpointCache:
    """Folders under one root: `NAME` is a whole checkpoint, `.NAME.*` is work in progress or a lock.

    A checkpoint carries its recipe: what it was made from, and by which version of which conversion. One
    with another recipe, or with a damaged file, counts as absent and is replaced. Work happens in a folder of
    its own and is renamed into place at the end, under a file lock that the kernel drops with its process; so
    a start that is killed leaves nothing that another would read, and what it leaves is removed by the next.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def from_environment(cls) -> "CheckpointCache":
        return cls(cache_root() / "models")

    def find(self, name: str, *, recipe: str, part: Part = Part.WHOLE) -> Path | None:
        directory = self.root / name
        try:
            made_by = (directory / RECIPE_FILE).read_text(encoding="utf-8")
        except OSError:
            return None
        return directory if made_by == recipe and not find_problems(directory, part) else None

    def find_or_build(
        self,
        name: str,
        *,
        recipe: str,
        build: Callable[[Path], Path],
        waiting: Callable[[], AbstractContextManager[object]],
        part: Part = Part.WHOLE,
    ) -> Path:
        """The checkpoint of that name, or a part of one; `build` makes it in a scratch folder and says where.

        `waiting` is entered while another process holds the lock, which may be for as long as a build takes.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(name, waiting):
                found = self.find(name, recipe=recipe, part=part)
                return found or self._build(name, recipe, build, part)
        except OSError as error:
            raise ModelSourceError(
                f"cannot write a checkpoint to {self.root} ({error.strerror or error}):"
                " free some space, or set SHOAL_CACHE to another directory"
            ) from error

    def _build(self, name: str, recipe: str, build: Callable[[Path], Path], part: Part) -> Path:
        for left_behind in self.root.glob(f".{escape(name)}.scratch-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        # A fresh name each time: the child of a killed start may still be writing into the old one.
        scratch = self.root / f".{name}.scratch-{token_hex(4)}"
        scratch.mkdir()
        try:
            finished = build(scratch)
            if problems := find_problems(finished, part):
                raise ModelSourceError(*problems)
            (finished / RECIPE_FILE).write_text(recipe, encoding="utf-8")
            directory = self.root / name
            if directory.exists():
                directory.rename(scratch / "replaced")
            finished.rename(directory)
            return directory
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _locked(self, name: str, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        # The lock file stays: removing it would let two processes lock two files of the same name.
        with (self.root / f".{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with waiting():
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield
