"""A node's store by examples: who is found, who is evicted, what a death leaves behind."""

from dataclasses import replace

import pytest

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent, Found, StoredEntry
from shoal.kvstore.store import ENTRY_BYTES, KVStore
from tests.kvstore.extents import UNIT, block, blocks, segment, segments


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_store(num_entries: int, clock: Clock | None = None) -> KVStore[str]:
    return KVStore(num_entries * UNIT, clock or Clock(), lease_s=30)


def put(store: KVStore[str], extent: Extent) -> bool:
    """Whether anything of the extent was wanted."""
    wanted = store.put_start(extent)
    if wanted is not None:
        store.put_end(wanted.extent_id, f"bytes of {wanted.extent_id}")
    store.check()
    return wanted is not None


def use(store: KVStore[str], path: str, num_blocks: int) -> None:
    store.release(store.read([block(path, i) for i in range(num_blocks)]).lease_id)


def test_an_extent_is_found_when_it_is_whole_and_not_before() -> None:
    store = a_store(8)
    wanted = store.put_start(blocks("a", 0, 3))
    assert wanted is not None and store.read([block("a", 0)]).extents == ()
    assert store.find([block("a", 0)]) == Found(blocks=(), segments=())
    store.put_end(wanted.extent_id, "bytes")
    (found,) = store.read([block("a", 1), block("a", 2), block("a", 7)]).extents
    assert found.ticket == "bytes"
    assert [(entry.key, entry.offset) for entry in found.entries] == [
        (block("a", 1), UNIT - ENTRY_BYTES),
        (block("a", 2), 2 * (UNIT - ENTRY_BYTES)),
    ]
    store.check()


def test_to_be_asked_what_is_here_is_no_use_of_it() -> None:
    store, asked = a_store(3), [block("a", 0), block("a", 1), block("c", 0)]
    for extent in (blocks("a", 0, 1), segments("a", [0]), blocks("c", 0, 1)):
        put(store, extent)
    assert store.find(asked) == Found(blocks=(0, 2), segments=(0,))
    put(store, blocks("d", 0, 2))
    assert store.find(asked) == Found(blocks=(2,), segments=()), "the least recently used went all the same"


def test_only_what_is_not_here_is_wanted_and_it_closes_up() -> None:
    store = a_store(8)
    put(store, blocks("a", 0, 2))
    wanted = store.put_start(blocks("a", 0, 4, by="other"))
    assert wanted is not None
    assert [(entry.key, entry.offset) for entry in wanted.entries] == [
        (block("a", 2), 0),
        (block("a", 3), UNIT - ENTRY_BYTES),
    ]
    assert wanted.parent == block("a", 1)
    store.put_abort(wanted.extent_id)
    assert not put(store, blocks("a", 0, 2, by="other"))
    assert store.counts.duplicate_extents == 1


def test_of_two_that_put_the_same_at_the_same_time_the_first_one_whole_is_found() -> None:
    store = a_store(8)
    for writer in ("one", "two"):
        assert store.put_start(blocks("a", 0, 2, by=writer))
    store.put_end("two/a0-2", "two's")
    store.put_end("one/a0-2", "one's")
    store.check()
    assert [extent.ticket for extent in store.read([block("a", 0)]).extents] == ["two's"]
    assert store.used_bytes == 2 * UNIT, "the other's bytes are not kept"


def test_31_a_writer_that_dies_before_its_bytes_came_leaves_nothing_and_blocks_nobody() -> None:
    store = a_store(4)
    store.put_start(blocks("a", 0, 2, by="dead"))
    assert put(store, blocks("a", 0, 2, by="other")), "nobody waits for the dead"
    store.put_abort("dead/a0-2")
    store.check()
    assert store.used_bytes == 2 * UNIT
    with pytest.raises(KeyError):
        store.put_end("dead/a0-2", "what came too late")


def test_32_what_was_looked_up_and_not_read_can_be_evicted_when_its_lease_has_ended() -> None:
    clock = Clock()
    store = a_store(4, clock)
    put(store, blocks("a", 0, 4))
    store.read([block("a", 0)])
    clock.now = 29.9
    assert not put(store, blocks("b", 0, 1))
    clock.now = 30.0
    assert put(store, blocks("b", 0, 2))


def test_a_lease_that_is_handed_back_holds_nothing() -> None:
    store = a_store(4)
    put(store, blocks("a", 0, 4))
    store.release(store.read([block("a", 0)]).lease_id)
    store.release(99)
    assert put(store, blocks("b", 0, 1))


def test_38_no_more_is_evicted_than_is_needed() -> None:
    store = a_store(100)
    for path in range(120):
        assert put(store, blocks(f"{path}-", 0, 1))
        assert min(path + 1, 100) * UNIT == store.used_bytes
    assert store.counts.evicted_extents == 20
    assert block("0-", 0) not in store and block("20-", 0) in store


def test_39_removed_and_put_again_the_new_bytes_are_found() -> None:
    store = a_store(4)
    put(store, blocks("a", 0, 2))
    before = store.read([block("a", 1)])
    store.discard([block("a", 1)])
    assert store.read([block("a", 1)]).extents == ()
    put(store, blocks("a", 1, 2, by="new"))
    assert [e.ticket for e in store.read([block("a", 1)]).extents] == ["bytes of new/a1-2"]
    assert before.extents[0].ticket == "bytes of engine/a0-2", "whoever reads goes on reading the same"


def test_40_sizes_are_numbers_and_what_is_no_extent_is_refused() -> None:
    store = KVStore[str](1 << 40, Clock())
    assert put(store, blocks("a", 0, 3, size=5 << 30))
    assert store.used_bytes == 3 * ((5 << 30) + ENTRY_BYTES)
    assert put(store, blocks("empty", 0, 2, size=0)), "the blocks of a model without paged layers"
    entry = blocks("a", 0, 1).entries[0]
    for entries, num_bytes in (
        ((), 0),
        ((replace(entry, key=BlockKey(b"")),), entry.size),
        ((replace(entry, size=-1),), -1),
        ((replace(entry, offset=1),), entry.size),
        ((entry,), entry.size + 1),
        ((entry, replace(entry, offset=entry.size)), 2 * entry.size),
        ((replace(entry, parent=entry.key),), entry.size),
    ):
        with pytest.raises(ValueError, match="extent 'x'"):
            Extent(extent_id="x", entries=entries, num_bytes=num_bytes)
    with pytest.raises(ValueError, match="offered before"):
        store.put_start(blocks("a", 0, 3, size=1))
    with pytest.raises(ValueError, match="at least one byte"):
        KVStore[str](0, Clock())


def test_an_extent_that_can_never_fit_evicts_nobody() -> None:
    store = a_store(4)
    put(store, blocks("a", 0, 3))
    assert not put(store, blocks("b", 0, 5))
    assert len(store) == 3 and store.counts.refused_extents == 1


def test_entries_without_bytes_take_room_all_the_same() -> None:
    store = KVStore[str](10 * ENTRY_BYTES, Clock())
    for path in range(20):
        assert put(store, blocks(f"{path}-", 0, 1, size=0))
    assert len(store) == 10


def test_83_there_is_one_budget_however_many_engines_write() -> None:
    store = a_store(10)
    for path in range(20):
        put(store, blocks(f"{path}-", 0, 1, by=f"engine {path % 2}"))
    assert store.used_bytes == store.budget_bytes


def test_the_path_used_longest_ago_goes_first_and_its_tail_before_its_head() -> None:
    store = a_store(6)
    for path in ("a", "b"):
        for i in range(3):
            put(store, blocks(path, i, i + 1))
    use(store, "a", 3)
    gone = []
    for new in range(5):
        put(store, blocks(f"new {new} ", 0, 1))
        gone += [key.decode() for key in store.changes.take()[1]]
    assert gone == ["b2", "b1", "b0", "a2", "a1"]


def test_using_a_tail_alone_is_using_its_path() -> None:
    """An engine reads only what it lacks; the head may be on its device."""
    store = a_store(4)
    for path, i in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        put(store, blocks(path, i, i + 1))
    store.release(store.read([block("a", 1)]).lease_id)
    put(store, blocks("c", 0, 2))
    assert [block("a", i) in store for i in range(2)] == [True, True]


def test_nobody_makes_room_by_evicting_what_it_builds_upon() -> None:
    store = a_store(3)
    for i in range(3):
        put(store, blocks("a", i, i + 1))
    assert not put(store, blocks("a", 3, 4))
    assert [block("a", i) in store for i in range(4)] == [True, True, True, False]


def test_segments_that_nobody_is_likely_to_need_go_first_then_kept_ones_with_their_tail() -> None:
    store = a_store(6)
    put(store, blocks("a", 0, 1))
    put(store, blocks("a", 1, 2))
    put(store, segments("a", [0], kept=False))
    put(store, segments("a", [1]))
    put(store, blocks("b", 0, 2))
    gone: list[BlockKey] = []
    for new in range(4):
        put(store, blocks(f"new {new} ", 0, 1))
        gone += store.changes.take()[1]
    assert gone == [segment("a", 0), segment("a", 1), block("a", 1), block("a", 0)]


def test_a_segment_that_is_needed_after_all_is_kept() -> None:
    store = a_store(3)
    put(store, blocks("a", 0, 1))
    put(store, segments("a", [0], kept=False))
    assert not put(store, replace(segments("a", [0]), extent_id="again"))
    put(store, blocks("b", 0, 1))
    put(store, segments("b", [0], kept=False))
    assert block("a", 0) in store and segment("a", 0) not in store, "by its age alone"
    put(store, blocks("b", 0, 1, by="other"))
    put(store, blocks("c", 0, 1))
    assert segment("b", 0) not in store


def test_after_a_reset_nothing_is_found_but_what_comes_afterwards() -> None:
    store = a_store(8)
    put(store, blocks("a", 0, 2))
    store.put_start(blocks("b", 0, 2))
    lease = store.read([block("a", 0)]).lease_id
    store.reset()
    store.check()
    assert len(store) == 0 and store.used_bytes == 2 * UNIT
    assert store.changes.take() == ((), (block("a", 0), block("a", 1)))
    store.put_end("engine/b0-2", "bytes")
    store.release(lease)
    store.check()
    assert len(store) == 0 and store.used_bytes == 0
    put(store, blocks("b", 0, 2))
    assert block("b", 1) in store


def test_changes_say_how_each_key_was_left() -> None:
    store = a_store(8)
    put(store, blocks("a", 0, 3))
    assert store.changes.take() == (tuple(block("a", i) for i in range(3)), ())
    store.discard([block("a", 0), block("a", 2), block("never", 0)])
    put(store, blocks("a", 0, 1, by="again"))
    put(store, blocks("b", 0, 1))
    store.discard([block("b", 0)])
    assert store.changes.take() == ((block("a", 0),), (block("a", 2), block("b", 0)))
    assert not store.changes


def test_an_entry_names_what_it_builds_upon() -> None:
    entry = StoredEntry(key=block("a", 1), parent=block("a", 0), offset=0, size=3, checksum=7)
    extent = Extent(extent_id="x", entries=(entry,), num_bytes=3)
    assert extent.parent == block("a", 0) and extent.without({block("a", 1)}) is None


def test_what_was_used_last_is_given_away_first_and_behind_what_it_builds_upon() -> None:
    store = a_store(num_entries=8)
    for path in ("a", "b"):
        for i in range(3):
            assert put(store, blocks(path, i, i + 1))
    use(store, "a", 3)
    given = [extent.keys for extent, _ in store.hottest(store.budget_bytes)]
    assert given == [(block(path, i),) for path in ("a", "b") for i in range(3)]
    some = [extent.keys for extent, _ in store.hottest(4 * (UNIT + ENTRY_BYTES))]
    assert some == given[:4]
    assert store.hottest(0) == []


def test_what_became_of_extents_and_readings_is_counted() -> None:
    store = a_store(4)
    put(store, blocks("a", 0, 2))
    put(store, blocks("a", 0, 2, by="other"))
    put(store, blocks("b", 0, 4))
    store.read([block("b", 0)])
    store.read([block("a", 0)])
    counts = store.counts
    assert (counts.stored_extents, counts.duplicate_extents, counts.evicted_extents) == (2, 1, 1)
    assert counts.reads == 1, "a's are gone: nothing was found"
