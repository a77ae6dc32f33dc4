"""Copies what is to be saved off the device, and offers it to the node's store."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.staging import Staging
from shoal.actors.engine.transfers import Piece
from shoal.actors.messages import EngineId
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.checksum import checksum
from shoal.kvstore.messages import Extent, StoredEntry

logger = logging.getLogger(__name__)

EXTENT_BYTES = 8 << 20
"""At most, unless one piece alone is larger."""

EXTENT_PIECES = 256
"""At most: blocks of a model without paged layers have no bytes."""

BATCH_BYTES = 2 * EXTENT_BYTES
"""Copied, and not to be given to anybody else, at a time; or one piece, if that is larger."""

LOSSES = STORE_LOST, COPY_FAILED = "store_lost", "copy_failed"
"""Why something was copied in vain."""

PAUSE_S = 1.0
"""A store that does not answer is left alone for so long. What would be saved stays cached meanwhile."""


class SavesWhat(Protocol):
    """The scheduler, which owns the device's blocks and segments."""

    def take_saves(self, max_bytes: int) -> list[Piece]:
        """Of paths, parents first. They stay as they are until `saved` is called with them."""
        ...

    def saved(self, pieces: Sequence[Piece]) -> None: ...

    def not_saved(self, names: Sequence[BlockKey]) -> None:
        """No store has these after all."""
        ...


class CopiesOut(Protocol):
    """The device's memory, on a thread of the copies' own, while steps run."""

    def copy_out(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        """Their bytes, one piece behind the other, to out: uint8."""
        ...


Staged = tuple[Extent, np.ndarray]


class Saver:
    """One batch is copied at a time, and never more than staging has room for; nobody waits for either.

        scheduler ──take_saves──▶ copy ──saved──▶ staged ──offer──▶ the store exports it ──offered──▶ dropped

    Every method but the copy is called on the engine's loop thread.
    """

    def __init__(
        self,
        engine_id: EngineId,
        scheduler: SavesWhat,
        device: CopiesOut,
        staging: Staging,
        *,
        bytes_per_block: int,
        bytes_per_segment: int,
        copies: Executor,
        post: Callable[[Callable[[], None]], None],
        offer: Callable[[Sequence[Extent]], None],
        clock: Callable[[], float],
    ) -> None:
        """post: do something on the loop's thread. offer: tell the store, whose answer is `offered`."""
        self._engine_id = engine_id
        self._scheduler = scheduler
        self._device = device
        self._staging = staging
        self._bytes_per_block = bytes_per_block
        self._bytes_per_segment = bytes_per_segment
        self._copies = copies
        self._post = post
        self._offer = offer
        self._clock = clock
        self._extent_ids = (f"{engine_id}/{number}" for number in count(1))
        self.is_copying = False
        """Off the device, on the copies' thread."""
        self._is_copy_void = False
        self._paused_until = 0.0
        self.has_store = False
        """Without one nothing is taken."""
        self.saved_bytes = 0
        """That the store took, or had."""
        self.lost_bytes: Counter[str] = Counter()
        """By why they were not saved."""

    def advance(self) -> None:
        """Begin to copy if there is something to save and room for it."""
        if self.is_copying or not self.has_store or self._clock() < self._paused_until:
            return
        batch_bytes = max(BATCH_BYTES, self._bytes_per_block, self._bytes_per_segment)
        pieces = self._scheduler.take_saves(min(batch_bytes, self._staging.room_bytes))
        if pieces:
            self.is_copying = True
            copying = self._copies.submit(self._copy, pieces)
            copying.add_done_callback(lambda done: self._post(partial(self._copied, pieces, done)))

    def offered(self, extents: Sequence[Extent], *, taken: bool) -> None:
        """The store has answered, or will not: nothing of these needs to be staged any more."""
        self._staging.drop(extent.extent_id for extent in extents)
        num_bytes = sum(extent.num_bytes for extent in extents)
        if taken:
            self.saved_bytes += num_bytes
        else:
            self._lose(STORE_LOST, num_bytes, [key for extent in extents for key in extent.keys])
        self.advance()

    def forget(self) -> None:
        """The prefix cache has been reset: what no store has by now is not offered to any."""
        self._staging.clear()
        self._is_copy_void = self.is_copying

    def _copied(self, pieces: Sequence[Piece], copying: Future[list[Staged]]) -> None:
        self.is_copying = False
        is_void, self._is_copy_void = self._is_copy_void, False
        self._scheduler.saved(pieces)
        if (error := copying.exception()) is not None:
            logger.error("a copy off the device failed", exc_info=error)
            self._lose(COPY_FAILED, sum(map(self._size, pieces)), [piece.key for piece in pieces])
            return
        if not is_void:
            for extent, data in copying.result():
                self._staging.hold(extent, data)
            self._offer([extent for extent, _ in copying.result()])
        self.advance()

    def _lose(self, reason: str, num_bytes: int, names: Sequence[BlockKey]) -> None:
        self.lost_bytes[reason] += num_bytes
        self._scheduler.not_saved(names)
        self._paused_until = self._clock() + PAUSE_S

    def _copy(self, pieces: Sequence[Piece]) -> list[Staged]:
        """On the copies' thread."""
        return [self._staged(extent_pieces) for extent_pieces in self._extents(pieces)]

    def _staged(self, pieces: Sequence[Piece]) -> Staged:
        data = np.empty(sum(map(self._size, pieces)), dtype=np.uint8)
        self._device.copy_out(pieces, data)
        entries: list[StoredEntry] = []
        offset = 0
        for piece in pieces:
            size = self._size(piece)
            part = checksum(data[offset : offset + size])
            entries.append(
                StoredEntry(key=piece.key, parent=piece.parent, offset=offset, size=size, checksum=part)
            )
            offset += size
        extent = Extent(
            extent_id=next(self._extent_ids),
            entries=tuple(entries),
            num_bytes=offset,
            kept=pieces[0].kept,
        )
        return extent, data

    def _extents(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Neighbours of one path together. Of segments, tails come first within an extent."""
        before = {piece.key: piece.parent for piece in pieces if piece.block != NO_BLOCK}
        blocks = [piece for piece in pieces if piece.block != NO_BLOCK]
        segments = [piece for piece in pieces if piece.block == NO_BLOCK]
        return [
            *self._runs(blocks, lambda last, piece: piece.parent == last.key),
            *(
                run[::-1]
                for run in self._runs(segments, lambda last, piece: _neighbours(last, piece, before))
            ),
        ]

    def _runs(self, pieces: Sequence[Piece], follows: Callable[[Piece, Piece], bool]) -> list[list[Piece]]:
        runs: list[list[Piece]] = []
        num_bytes = 0
        for piece in pieces:
            size = self._size(piece)
            fits = num_bytes + size <= EXTENT_BYTES and runs and len(runs[-1]) < EXTENT_PIECES
            if not fits or not follows(runs[-1][-1], piece) or piece.kept != runs[-1][-1].kept:
                runs.append([])
                num_bytes = 0
            runs[-1].append(piece)
            num_bytes += size
        return runs

    def _size(self, piece: Piece) -> int:
        return self._bytes_per_segment if piece.block == NO_BLOCK else self._bytes_per_block


def _neighbours(last: Piece, piece: Piece, before: dict[BlockKey, BlockKey]) -> bool:
    """Is one the segment of the block before the other's? Known if that block is among those to be saved."""
    return before.get(piece.parent) == last.parent
