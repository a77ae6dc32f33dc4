"""Where the lines of an input are, and in which order they are best asked, for inputs of any size.

It is a SQLite database in a nameless temporary file, which ends with the process: of each line 40 bytes, and
4 for each 64 characters of its prompt, are on disk (in TMPDIR), and none in memory, where SQLite's cache of
64 MiB and the line at hand are. Sorting is SQLite's too: in runs of that cache, merged from disk.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

from shoal.cluster.batch.lines import MAX_LINE_BYTES, Line, Problem, duplicate, read_line
from shoal.cluster.batch.order import leaders_first, prefix_path

CACHE_KIB = 64 << 10
TELL_BYTES = 1 << 20
SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA temp_store = FILE;
PRAGMA cache_size = -{cache_kib};
CREATE TABLE line (
    number INTEGER PRIMARY KEY, start INTEGER NOT NULL, size INTEGER NOT NULL, name BLOB, path BLOB NOT NULL
);
CREATE TABLE duplicate (number INTEGER PRIMARY KEY, first INTEGER NOT NULL);
CREATE TABLE answer (number INTEGER PRIMARY KEY, start INTEGER NOT NULL, size INTEGER NOT NULL);
"""
FIND_DUPLICATES = """
INSERT INTO duplicate SELECT number, first FROM (
    SELECT number, min(number) OVER (PARTITION BY name) AS first FROM line WHERE name IS NOT NULL
) WHERE number > first
"""
UNANSWERED = """
SELECT line.path, line.number, line.start, line.size, duplicate.first
FROM line LEFT JOIN duplicate USING (number) LEFT JOIN answer USING (number)
WHERE answer.number IS NULL ORDER BY line.path, line.number
"""


class BatchError(Exception):
    """The batch cannot run, or go on; one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a line in the input."""

    number: int
    """From 1, empty lines counted."""
    start: int
    size: int
    first: int | None = None
    """The line that has its custom_id already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of a line, in the output."""

    number: int
    start: int
    size: int


class Index:
    """Of one input, which must not change while it is in use."""

    def __init__(self, file: BinaryIO, database: sqlite3.Connection) -> None:
        self._file = file
        self._database = database
        self._seen = _state(file)
        self.digest = ""
        """Of all bytes of the input, in hexadecimal."""
        self.num_lines = 0
        """Those that are not empty."""

    @classmethod
    @contextmanager
    def of(
        cls,
        path: Path,
        *,
        advance: Callable[[int], object] = lambda num_bytes: None,
        on_line: Callable[[int, Line], object] = lambda number, line: None,
    ) -> "Iterator[Index]":
        """Reads the input once; `advance` is told of the bytes and `on_line` of the lines. Raises
        BatchError."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise BatchError(f"cannot read {path}: {error.strerror}") from error
        # Whoever uses it does so one after the other, but not all on one thread.
        with file, closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as database:
            database.executescript(SCHEMA.format(cache_kib=CACHE_KIB))
            index = cls(file, database)
            try:
                index._build(advance, on_line)
            except sqlite3.Error as error:
                raise BatchError(
                    f"cannot index {path} ({error}): set TMPDIR to where there is room"
                ) from error
            yield index

    def _build(self, advance: Callable[[int], object], on_line: Callable[[int, Line], object]) -> None:
        digest = sha256()

        def rows() -> Iterator[tuple[int, int, int, bytes | None, bytes]]:
            told = 0
            for number, start, size, data in _lines(self._file, digest.update):
                if start + size - told > TELL_BYTES:
                    advance(start + size - told)
                    told = start + size
                if not data.strip():
                    continue
                line = read_line(data)
                on_line(number, line)
                self.num_lines += 1
                name = None if line.custom_id is None else blake2b(line.custom_id.encode(), digest_size=16)
                path = b"" if isinstance(line.content, Problem) else prefix_path(line.content)
                yield number, start, size, None if name is None else name.digest(), path

        self._insert("line", 5, rows())
        self._database.execute(FIND_DUPLICATES)
        self.digest = digest.hexdigest()

    def _insert(self, table: str, num_columns: int, rows: Iterable[tuple[object, ...]]) -> None:
        self._database.execute("BEGIN")
        self._database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * num_columns)})", rows)
        self._database.execute("COMMIT")

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """(line, the first that has the same custom_id)."""
        yield from self._database.execute("SELECT number, first FROM duplicate ORDER BY number")

    def set_answers(self, answers: Iterable[Answer]) -> None:
        """These, and no others, are in the output. Raises BatchError."""
        self._database.execute("DELETE FROM answer")
        rows = ((answer.number, answer.start, answer.size) for answer in answers)
        try:
            self._insert("answer", 3, rows)
        except sqlite3.IntegrityError as error:
            raise BatchError("OUT has two answers to one line: choose another, or remove it") from error

    @property
    def num_answers(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM answer").fetchone()[0])

    def unanswered(self) -> Iterator[Place]:
        """In the order in which they are best asked."""
        return leaders_first(
            (path, Place(number=number, start=start, size=size, first=first))
            for path, number, start, size, first in self._database.execute(UNANSWERED)
        )

    def answers(self) -> Iterator[Answer]:
        """In the order of the input."""
        for number, start, size in self._database.execute("SELECT * FROM answer ORDER BY number"):
            yield Answer(number=number, start=start, size=size)

    def read(self, place: Place) -> Line:
        """Raises BatchError if the input is no longer what it was."""
        if _state(self._file) != self._seen:
            raise BatchError(f"{self._file.name} has changed while it was read: begin anew")
        if place.first is not None:
            return duplicate(place.first)
        return read_line(os.pread(self._file.fileno(), min(place.size, MAX_LINE_BYTES + 1), place.start))


def _state(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _lines(file: BinaryIO, update: Callable[[bytes], object]) -> Iterator[tuple[int, int, int, bytes]]:
    """(number, start, size, data); of a line that is too long only as much data as tells that."""
    start, number = 0, 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        update(data)
        size, number, piece = len(data), number + 1, data
        while not piece.endswith(b"\n") and (piece := file.readline(MAX_LINE_BYTES)):
            update(piece)
            size += len(piece)
        yield number, start, size, data
        start += size
