"""The output of a batch: one answer a line, appended whole, by one process at a time.

It is all that is known of how far a batch has come. Each answer's id says of which line of which input it is,
so whatever was written when a process was killed is what the next one builds upon: whole lines count, and
what stands behind the last line break is cut off.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from pydantic_core import from_json

from shoal.cluster.batch.index import Answer, BatchError
from shoal.cluster.batch.lines import Problem, Reply, answer_line, is_good

ID = "batch_req_"


class Output:
    """The file, while it is ours: a lock that the kernel drops with the process keeps others out."""

    def __init__(self, path: Path, digest: str) -> None:
        """digest: of the input. Raises BatchError if the file cannot be written, or another process does."""
        self._path = path
        self._prefix = f"{ID}{digest[:16]}_"
        try:
            self._fd = _locked(path, path)
        except OSError as error:
            raise BatchError(f"cannot write {path}: {error.strerror}") from error
        self.num_failed = 0
        """Of all answers in it, those that are no 200."""
        self.is_ordered = True
        """They stand in the order of the input."""
        self._last = 0

    def close(self) -> None:
        os.close(self._fd)

    def recover(self, *, with_failed: bool = True) -> Iterator[Answer]:
        """What was answered before. Then cuts off what is not a whole line; raises BatchError, and changes
        nothing, if the file is of another input or of no batch at all."""
        self.num_failed, self.is_ordered, self._last = 0, True, 0
        start = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self._check_torn(line, start)
                    os.ftruncate(self._fd, start)
                    break
                number, good = self._read(line, start)
                if good or with_failed:
                    self._note(number, good)
                    yield Answer(number=number, start=start, size=len(line))
                start += len(line)

    def append(self, number: int, custom_id: str | None, outcome: Reply | Problem) -> None:
        """Raises BatchError when the disk is full, or what it is that keeps it from being written."""
        line = memoryview(answer_line(f"{self._prefix}{number}", custom_id, outcome))
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise BatchError(f"cannot write {self._path}: {error.strerror}") from error
        self._note(number, is_good(outcome))

    def sync(self) -> None:
        """What was appended outlives the machine's loss of power; to outlive the process it needs nothing.
        Raises BatchError."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise BatchError(f"cannot write {self._path}: {error.strerror}") from error

    def rewrite(self, answers: Iterable[Answer]) -> None:
        """Exactly these, in this order; all at once, whenever the process is killed."""
        beside = self._path.with_name(f".{self._path.name}.new")
        with ExitStack() as failed:
            try:
                new = _locked(beside, self._path)
                failed.callback(os.close, new)
                os.ftruncate(new, 0)  # what is left of one that was killed
                for answer in answers:
                    _copy(self._fd, new, answer)
                os.fsync(new)
                beside.replace(self._path)
                _sync_folder(self._path.parent)
            except OSError as error:
                raise BatchError(f"cannot write {beside}: {error.strerror}") from error
            failed.pop_all()
        os.close(self._fd)
        self._fd = new

    def _read(self, line: bytes, start: int) -> tuple[int, bool]:
        """(the input's line that it answers, whether that is a 200)"""
        try:
            answer = from_json(line)
            said, error, response = str(answer["id"]), answer["error"], answer["response"]
            good = error is None and response["status_code"] == 200
        except (ValueError, KeyError, TypeError):
            raise self._foreign(f"has other things in it than answers of a batch (at byte {start})") from None
        number = said.removeprefix(self._prefix)
        if not said.startswith(ID):
            raise self._foreign(f"has other things in it than answers of a batch (at byte {start})")
        if not said.startswith(self._prefix) or not number.isdecimal():
            raise self._foreign("answers another input, or this one before it was changed")
        return int(number), good

    def _foreign(self, reason: str) -> BatchError:
        return BatchError(f"{self._path} {reason}: choose another OUT, or remove it")

    def _check_torn(self, tail: bytes, start: int) -> None:
        """Behind whole answers it is what was being written. If there are none it must look like that."""
        begin = f'{{"id":"{self._prefix}'.encode()
        if not start and not begin.startswith(tail[: len(begin)]):
            raise self._foreign("has other things in it than answers of a batch (at byte 0)")

    def _note(self, number: int, good: bool) -> None:
        self.num_failed += not good
        self.is_ordered &= number > self._last
        self._last = number


def _locked(path: Path, named: Path) -> int:
    """A descriptor of the file, to append to. `named` is what a person calls it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise BatchError(f"another process writes {named}: wait for it, or choose another OUT") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever held the lock put another file in its place


def _copy(source: int, to: int, answer: Answer) -> None:
    data = memoryview(os.pread(source, answer.size, answer.start))
    while data:
        data = data[os.write(to, data) :]


def _sync_folder(folder: Path) -> None:
    """So that the new name, too, outlives a loss of power; not all file systems know how."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
