"""What is to be saved goes off the device at once, and to the store when that has time."""

from collections.abc import Sequence

import numpy as np
import pytest

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.saver import PAUSE_S, Saver
from shoal.actors.engine.staging import Staging
from shoal.actors.engine.transfers import Piece
from shoal.actors.messages import EngineId
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.checksum import checksum
from shoal.kvstore.messages import Extent
from tests.engine import copies
from tests.engine.copies import BLOCK_BYTES, SEGMENT_BYTES, Clock, FakeCopies, Loop, Thread, content
from tests.engine.copies import a_block as b
from tests.engine.copies import a_segment as s
from tests.kvstore.extents import segment


class FakeScheduler:
    """Has these to save; knows which are being copied."""

    def __init__(self) -> None:
        self.wanted: list[Piece] = []
        self.pinned: list[Piece] = []
        self.lost: list[BlockKey] = []

    def take_saves(self, max_bytes: int) -> list[Piece]:
        taken: list[Piece] = []
        while self.wanted and (max_bytes := max_bytes - copies.size_of(self.wanted[0])) >= 0:
            taken.append(self.wanted.pop(0))
        self.pinned += taken
        return taken

    def saved(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.pinned.remove(piece)

    def not_saved(self, names: Sequence[BlockKey]) -> None:
        self.lost += names


class Desk:
    """A saver and all that is around it."""

    def __init__(self, staging_bytes: int = 1000) -> None:
        self.scheduler, self.device, self.thread, self.loop = FakeScheduler(), FakeCopies(), Thread(), Loop()
        self.clock = Clock()
        self.staging = Staging(staging_bytes)
        self.offers: list[Sequence[Extent]] = []
        self.saver = Saver(
            EngineId("engine-a"),
            self.scheduler,
            self.device,
            self.staging,
            bytes_per_block=BLOCK_BYTES,
            bytes_per_segment=SEGMENT_BYTES,
            copies=self.thread,
            post=self.loop.post,
            offer=self.offers.append,
            clock=self.clock,
        )
        self.saver.has_store = True

    def save(self, *pieces: Piece) -> None:
        self.scheduler.wanted += pieces
        self.saver.advance()

    def copy(self) -> None:
        self.thread.run()
        self.loop.turn()

    def names(self) -> list[list[str]]:
        names = {segment(path, i): f"segment of {path}{i}" for path in ("a", "c") for i in range(4)}
        return [
            [names.get(key) or key.decode() for key in extent.keys]
            for offer in self.offers
            for extent in offer
        ]


def test_a_piece_is_held_until_it_is_copied_and_staged_until_the_store_has_it() -> None:
    desk = Desk()
    desk.save(b("a", 0), b("a", 1))
    assert len(desk.scheduler.pinned) == 2
    desk.copy()
    assert desk.scheduler.pinned == []
    ((extent,),) = desk.offers
    data = desk.staging.export(extent.extent_id, extent.keys)
    assert data.tobytes() == b"".join(content(key, BLOCK_BYTES).tobytes() for key in extent.keys)
    assert [e.checksum for e in extent.entries] == [checksum(part) for part in np.split(data, 2)]
    assert desk.staging.room_bytes == 1000 - 2 * BLOCK_BYTES
    desk.saver.offered([extent], taken=True)
    assert not desk.scheduler.lost
    assert desk.staging.room_bytes == 1000 and desk.saver.saved_bytes == 2 * BLOCK_BYTES
    with pytest.raises(KeyError):
        desk.staging.export(extent.extent_id, extent.keys)


def test_a_store_that_has_some_of_an_extent_gets_the_others() -> None:
    desk = Desk()
    desk.save(b("a", 0), b("a", 1), b("a", 2))
    desk.copy()
    ((extent,),) = desk.offers
    keys = (extent.keys[0], extent.keys[2])
    data = desk.staging.export(extent.extent_id, keys)
    assert data.tobytes() == b"".join(content(key, BLOCK_BYTES).tobytes() for key in keys)


def test_neighbours_of_one_path_share_an_extent_and_segments_lie_tail_first() -> None:
    desk = Desk()
    desk.save(b("a", 0), b("a", 1), s("a", 0, kept=False), s("a", 1), s("a", 2), b("c", 0), b("a", 2))
    desk.copy()
    assert desk.names() == [
        ["a0", "a1"],
        ["c0"],
        ["a2"],
        ["segment of a0"],
        ["segment of a2", "segment of a1"],
    ]
    assert [extent.kept for extent in desk.offers[0]] == [True, True, True, False, True]


def test_extents_are_bounded_in_bytes_and_in_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.actors.engine.saver.EXTENT_BYTES", 3 * BLOCK_BYTES)
    desk = Desk()
    desk.save(*(b("a", i) for i in range(4)))
    desk.copy()
    assert desk.names() == [["a0", "a1", "a2"], ["a3"]]
    monkeypatch.setattr("shoal.actors.engine.saver.EXTENT_PIECES", 2)
    desk.save(*(b("c", i) for i in range(3)))
    desk.copy()
    assert desk.names()[2:] == [["c0", "c1"], ["c2"]]
    monkeypatch.setattr("shoal.actors.engine.saver.EXTENT_BYTES", 1)
    desk.save(b("d", 0))
    desk.copy()
    assert desk.names()[4:] == [["d0"]], "one piece alone may be larger"


def test_a_block_larger_than_a_batch_is_saved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As are those of large models: 128 tokens of 256 KiB are 32 MiB."""
    monkeypatch.setattr("shoal.actors.engine.saver.BATCH_BYTES", BLOCK_BYTES - 1)
    desk = Desk()
    desk.save(b("a", 0), b("a", 1))
    for _ in range(2):
        desk.copy()
    assert desk.names() == [["a0"], ["a1"]]


def test_full_staging_takes_nothing_and_goes_on_when_there_is_room() -> None:
    desk = Desk(staging_bytes=2 * BLOCK_BYTES)
    desk.save(*(b("a", i) for i in range(3)))
    desk.copy()
    assert len(desk.scheduler.wanted) == 1 and not desk.scheduler.pinned, "the third waits in the cache"
    desk.saver.advance()
    assert desk.thread.num_waiting == 0
    desk.saver.offered(desk.offers[0], taken=True)
    desk.copy()
    assert desk.names() == [["a0", "a1"], ["a2"]]


def test_one_batch_is_copied_at_a_time() -> None:
    desk = Desk()
    desk.save(b("a", 0))
    desk.save(b("a", 1))
    assert desk.thread.num_waiting == 1
    desk.copy()
    desk.copy()
    assert desk.names() == [["a0"], ["a1"]]


def test_a_store_that_does_not_answer_holds_nothing_and_is_left_alone_for_a_while() -> None:
    desk = Desk()
    desk.save(b("a", 0))
    desk.copy()
    desk.saver.offered(desk.offers[0], taken=False)
    assert desk.staging.room_bytes == 1000 and desk.saver.lost_bytes == {"store_lost": BLOCK_BYTES}
    assert desk.scheduler.lost == [b("a", 0).key], "it may be wanted again"
    desk.save(b("a", 1))
    assert desk.thread.num_waiting == 0 and len(desk.scheduler.wanted) == 1
    desk.clock.now = PAUSE_S
    desk.saver.advance()
    desk.copy()
    assert desk.names() == [["a0"], ["a1"]]


def test_without_a_store_nothing_is_taken() -> None:
    desk = Desk()
    desk.saver.has_store = False
    desk.save(b("a", 0))
    assert desk.thread.num_waiting == 0 and len(desk.scheduler.wanted) == 1


def test_a_copy_that_fails_lets_go_of_its_pieces() -> None:
    desk = Desk()
    desk.device.failures = 1
    desk.save(b("a", 0))
    desk.copy()
    assert not desk.scheduler.pinned and not desk.offers
    assert desk.saver.lost_bytes == {"copy_failed": BLOCK_BYTES}
    assert desk.scheduler.lost == [b("a", 0).key]
    desk.clock.now = PAUSE_S
    desk.save(b("a", 1))
    desk.copy()
    assert desk.names() == [["a1"]]


def test_the_fake_pieces_are_one_of_two_kinds() -> None:
    assert b("a", 0).block != NO_BLOCK and s("a", 0).block == NO_BLOCK


def test_a_reset_overtakes_what_is_being_copied_and_what_is_staged() -> None:
    desk = Desk()
    desk.save(b("a", 0))
    desk.copy()
    desk.save(b("a", 1))
    desk.saver.forget()
    desk.copy()
    assert desk.names() == [["a0"]] and desk.staging.used_bytes == 0
    assert desk.scheduler.pinned == []
    desk.save(b("a", 2))
    desk.copy()
    assert desk.names() == [["a0"], ["a2"]], "what comes afterwards is saved again"
