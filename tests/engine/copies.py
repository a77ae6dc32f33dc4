"""A device whose pieces are bytes, threads that run when told to, and a loop that is turned by hand."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.transfers import Piece
from shoal.kvstore.block_hash import BlockKey
from tests.kvstore.extents import block, segment

BLOCK_BYTES, SEGMENT_BYTES = 6, 4


def content(key: BlockKey, size: int) -> np.ndarray:
    """What the bytes of a key are, wherever they are."""
    return np.resize(np.frombuffer(key + b".", dtype=np.uint8), size)


def a_block(path: str, index: int) -> Piece:
    return Piece(key=block(path, index), parent=block(path, index - 1), block=BlockId(index + 1))


def a_segment(path: str, index: int, *, kept: bool = True) -> Piece:
    return Piece(key=segment(path, index), parent=block(path, index), segment=BlockId(index + 1), kept=kept)


def size_of(piece: Piece) -> int:
    return SEGMENT_BYTES if piece.block == NO_BLOCK else BLOCK_BYTES


class FakeCopies:
    """Copies out what each key's bytes are; remembers what was copied in."""

    def __init__(self) -> None:
        self.failures = 0
        self.device: dict[BlockKey, bytes] = {}

    def copy_out(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        self._fail()
        out[:] = np.concatenate([content(piece.key, size_of(piece)) for piece in pieces])

    def copy_in(self, pieces: Sequence[Piece], data: np.ndarray) -> None:
        self._fail()
        parts = np.split(data, np.cumsum([size_of(piece) for piece in pieces])[:-1])
        for piece, part in zip(pieces, parts, strict=True):
            self.device[piece.key] = part.tobytes()

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a copy failed")


class Thread(Executor):
    """Does what it was given when `run` is called, in order."""

    def __init__(self) -> None:
        self._work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, run: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((future, lambda: run(*args, **more)))
        return future

    @property
    def num_waiting(self) -> int:
        return len(self._work)

    def run(self) -> None:
        """Its oldest work."""
        future, work = self._work.pop(0)
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


class Loop:
    """What was posted to it is done when it is turned."""

    def __init__(self) -> None:
        self._posted: list[Callable[[], None]] = []

    def post(self, work: Callable[[], None]) -> None:
        self._posted.append(work)

    def turn(self) -> None:
        posted, self._posted = self._posted, []
        for work in posted:
            work()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
