"""Cached prefixes and their owners: examples, then rules over both kinds of cache."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.actors.engine.block_pool import BlockId, BlockPool
from shoal.actors.engine.prefix_cache import prefix_cache
from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.engine.radix_cache import RadixPrefixCache
from shoal.actors.engine.transfers import Piece
from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key

ROOT = root_key(b"fingerprint", "")


def keys(text: str) -> list[BlockKey]:
    """Of blocks of one token each, named by letters: "abc" is a path of three."""
    return extend_keys(ROOT, [ord(letter) for letter in text], block_size=1)


@dataclass
class Cache:
    """A radix cache over a pool, driven as a scheduler does."""

    num_blocks: int = 9
    pool: BlockPool = field(init=False)
    segments: BlockPool = field(init=False)
    radix: RadixPrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.segments = BlockPool(self.num_blocks)
        self.radix = RadixPrefixCache(self.pool, self.segments)

    def compute(self, text: str) -> list[BlockId]:
        """Compute what is not cached of it, and cache it; returns the table, which is owned."""
        path = keys(text)
        hit = self.radix.match(path)
        self.radix.lock(hit)
        missing = len(path) - len(hit)
        self.radix.evict(max(0, missing - self.pool.num_free))
        own = self.pool.allocate(missing)
        parent = path[len(hit) - 1] if hit else ROOT
        assert self.radix.insert(parent, path[len(hit) :], own) == own
        return [*hit, *own]

    def run(self, *texts: str) -> None:
        for text in texts:
            self.radix.unlock(self.compute(text))
            self.radix.check()

    def has_state(self, text: str) -> bool:
        """Whether the state at its end is cached."""
        return keys(text)[-1] in self.radix.segments

    def cached(self, *texts: str) -> list[int]:
        """How many blocks of each text are cached."""
        return [len(self.radix.match(keys(text))) for text in texts]


def test_a_prefix_is_found_as_far_as_it_is_the_same() -> None:
    cache = Cache()
    cache.run("abcd")
    assert cache.cached("abcd", "abxd", "ab", "xbcd", "abcdef") == [4, 2, 2, 0, 4]
    assert cache.radix.match(keys("abx")) == [1, 2]
    assert cache.radix.num_evictable == 4 and cache.pool.num_free == 4


def test_what_is_in_use_is_not_evicted() -> None:
    cache = Cache()
    table = cache.compute("abcd")
    assert cache.radix.num_evictable == 0
    with pytest.raises(ValueError, match="cannot evict 1 of 0"):
        cache.radix.evict(1)
    other = cache.compute("abx")
    cache.radix.unlock(table)
    assert cache.radix.num_evictable == 2, "c and d; a and b are the other's too"
    cache.radix.evict(2)
    assert cache.cached("abcd") == [2]
    cache.radix.unlock(other)
    cache.radix.check()


def test_tails_go_first_and_of_those_the_least_recently_used() -> None:
    cache = Cache()
    cache.run("abc", "abx", "pq")
    gone: list[BlockKey] = []
    for _ in range(6):
        before = set(cache.radix.keys())
        cache.radix.evict(1)
        cache.radix.check()
        gone += before - set(cache.radix.keys())
    assert gone == [keys("abc")[2], keys("abx")[2], keys("ab")[1], keys("a")[0], *reversed(keys("pq"))]


def test_use_makes_a_prefix_young_again() -> None:
    cache = Cache()
    cache.run("abc", "pq", "abc")
    cache.radix.evict(2)
    assert cache.cached("abc", "pq") == [3, 0]


def test_the_first_block_of_a_content_is_kept_and_the_second_is_the_callers_to_release() -> None:
    cache = Cache()
    first = cache.compute("ab")
    own = cache.pool.allocate(3)
    assert cache.radix.insert(ROOT, keys("abc"), own) == [*first, own[2]]
    cache.pool.release(own[:2])
    cache.radix.unlock([*first, own[2]])
    assert cache.radix.num_evictable == 1, "a and b are owned by the first"
    cache.radix.unlock(first)
    cache.radix.check()
    assert cache.radix.num_evictable == 3


def with_segments(cache: Cache, text: str, kept: str = "") -> None:
    """Compute a text, and capture the state at the end of each block of it that has none."""
    table = cache.compute(text)
    for letter, key in zip(text, keys(text), strict=True):
        if key not in cache.radix.segments:
            segments = cache.segments.allocate(1)
            cache.radix.segments.attach(key, segments[0], kept=letter in kept)
            cache.radix.segments.unlock(segments)
    cache.radix.unlock(table)


def test_segments_that_no_kept_boundary_needs_go_first_then_the_least_recently_used_tails_first() -> None:
    cache = Cache()
    with_segments(cache, "abc", kept="b")
    with_segments(cache, "pqr", kept="r")
    gone = []
    for _ in range(6):
        before = {text for text in ("a", "ab", "abc", "p", "pq", "pqr") if cache.has_state(text)}
        cache.radix.segments.evict(1)
        cache.radix.check()
        gone += [text for text in before if not cache.has_state(text)]
    assert gone == ["abc", "a", "pq", "p", "ab", "pqr"]


def test_a_segment_is_used_with_its_block_and_kept_for_whoever_comes_back() -> None:
    cache = Cache()
    with_segments(cache, "ab")
    with_segments(cache, "pq")
    cache.run("a")
    cache.radix.segments.keep(keys("pq")[1])
    cache.radix.segments.evict(3)
    assert [cache.has_state(text) for text in ("ab", "p", "a", "pq")] == [False, False, False, True]


def test_a_block_that_is_being_saved_is_evicted_in_its_turn_and_free_when_the_copy_ends() -> None:
    cache = Cache()
    cache.run("ab", "pq")
    piece = cache.radix.piece(keys("ab")[1])
    assert piece is not None and piece.parent == keys("a")[0]
    cache.radix.start_saving(piece.block)
    assert cache.radix.num_evictable == 3
    cache.radix.check()
    cache.radix.evict(1)
    assert cache.cached("ab", "pq") == [0, 2], "a goes, but first what lies behind it"
    assert cache.pool.num_free == 8 - 2 - 1
    cache.radix.end_saving(piece.block)
    assert cache.pool.num_free == 8 - 2


def test_reset_forgets_everything_and_leaves_what_is_in_use_with_its_user() -> None:
    cache = Cache()
    cache.run("xy")
    table = cache.compute("ab")
    cache.radix.reset()
    cache.radix.check()
    assert cache.cached("xy", "ab") == [0, 0]
    assert cache.pool.num_free == 8 - 2
    cache.radix.unlock(table)
    assert cache.pool.num_free == 8


def test_changes_are_net_and_parents_come_first() -> None:
    cache = Cache()
    cache.run("abc")
    assert cache.radix.changes.take() == PrefixChanges(stored=tuple(keys("abc")))
    cache.radix.evict(2)
    cache.run("abc", "xy")
    cache.radix.evict(1)  # x and y are younger
    assert cache.radix.changes.take() == PrefixChanges(stored=tuple(keys("xy")), removed=(keys("abc")[2],))
    cache.run("pq")
    cache.radix.reset()
    changes = cache.radix.changes.take()
    assert changes.stored == () and set(changes.removed) == {*keys("ab"), *keys("xy")}
    assert cache.radix.changes.take() == PrefixChanges()


def test_the_naive_cache_keeps_nothing() -> None:
    pool = BlockPool(4)
    naive = prefix_cache("naive", pool, BlockPool(1))
    table = pool.allocate(2)
    assert naive.insert(ROOT, keys("ab"), table) == table
    assert naive.match(keys("ab")) == []
    naive.unlock(table)
    naive.evict(0)
    with pytest.raises(ValueError, match="cannot evict 1 of 0"):
        naive.evict(1)
    naive.reset()
    naive.check()
    assert (
        pool.num_free == 3
        and len(naive.segments) == 0
        and naive.keys() == ()
        and naive.changes.take() == PrefixChanges()
    )


class PrefixCacheModel(RuleBasedStateMachine):
    """Against the obvious model: a set of cached texts. Few letters, so that paths meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.segments = BlockPool(6)
        self.radix = RadixPrefixCache(self.pool, self.segments)
        self.restoring: list[list[BlockId]] = []
        self.saving: list[Piece] = []
        self.users: list[tuple[str, list[BlockId]]] = []
        self.reported: set[BlockKey] = set()

    def _missing(self, text: str) -> int:
        return len(text) - len(self.radix.match(keys(text)))

    @rule(text=st.text(alphabet="ab", min_size=1, max_size=4))
    def match_and_lock(self, text: str) -> None:
        hit = self.radix.match(keys(text))
        self.radix.lock(hit)
        self.users.append((text[: len(hit)], hit))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), more=st.text(alphabet="ab", min_size=1, max_size=3))
    def compute_on(self, data: st.DataObject, more: str) -> None:
        """Go on from a prefix that a user has, as if nothing after it were cached: it may be by now."""
        index = data.draw(st.integers(0, len(self.users) - 1))
        text, table = self.users[index]
        if len(more) > self.pool.num_free + self.radix.num_evictable:
            return
        self.radix.evict(max(0, len(more) - self.pool.num_free))
        own = self.pool.allocate(len(more))
        path = keys(text + more)
        kept = self.radix.insert(path[len(text) - 1] if text else ROOT, path[len(text) :], own)
        assert kept == self.radix.match(path)[len(text) :]
        self.pool.release([block for block, other in zip(own, kept, strict=True) if block != other])
        self.users[index] = (text + more, [*table, *kept])

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.users) - 1))
        self.radix.unlock(self.users.pop(index)[1])

    @precondition(lambda self: self.radix.num_evictable)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(1, self.radix.num_evictable))
        free = self.pool.num_free
        self.radix.evict(num_blocks)
        assert self.pool.num_free == free + num_blocks

    @precondition(lambda self: any(table for _, table in self.users))
    @rule(data=st.data(), kept=st.booleans())
    def capture(self, data: st.DataObject, kept: bool) -> None:
        """The segment of a block that somebody uses, if one is to be had."""
        text, table = data.draw(st.sampled_from([user for user in self.users if user[1]]))
        key = keys(text)[data.draw(st.integers(0, len(table) - 1))]
        cached = self.radix.segments
        if not self.segments.num_free:
            if not cached.num_evictable:
                return
            free = self.segments.num_free
            cached.evict(1)
            assert self.segments.num_free == free + 1
        segments, had_one = self.segments.allocate(1), key in cached
        assert cached.attach(key, segments[0], kept=kept) is not had_one
        cached.unlock(segments)
        assert key in cached

    @precondition(lambda self: len(self.radix.segments) > 0)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        cached = self.radix.keys()
        key = data.draw(st.sampled_from([key for key in cached if key in self.radix.segments]))
        self.radix.segments.keep(key)
        self.restoring.append(self.radix.segments.lock([key]))

    @precondition(lambda self: self.restoring)
    @rule()
    def restored(self) -> None:
        self.radix.segments.unlock(self.restoring.pop(0))

    @precondition(lambda self: self.radix.keys())
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """Of what is cached, used or not. What can be freed becomes less only if it was unused."""
        key = data.draw(st.sampled_from(self.radix.keys()))
        if (piece := self.radix.piece(key)) is not None:
            self.radix.start_saving(piece.block)
            self.saving.append(piece)
            segment = self.radix.segments.piece(key)
            if segment is not None:
                self.radix.segments.start_saving(segment.segment)
                self.saving.append(segment)

    @precondition(lambda self: self.saving)
    @rule(data=st.data())
    def saved(self, data: st.DataObject) -> None:
        piece = self.saving.pop(data.draw(st.integers(0, len(self.saving) - 1)))
        if piece.block:
            self.radix.end_saving(piece.block)
        else:
            self.radix.segments.end_saving(piece.segment)

    @rule()
    def report(self) -> None:
        changes = self.radix.changes.take()
        assert not set(changes.stored) & set(changes.removed)
        assert self.reported.isdisjoint(changes.stored) and self.reported.issuperset(changes.removed)
        self.reported = (self.reported - set(changes.removed)) | set(changes.stored)
        assert self.reported == set(self.radix.keys())

    @invariant()
    def owners_are_the_users_the_cache_and_the_copies(self) -> None:
        self.radix.check()
        segments = [segment for held in self.restoring for segment in held]
        self.segments.check([*segments, *self.radix.segments.owned()])
        owned = [*self.radix.owned(), *self.radix.segments.owned()]
        saving = [piece.block or piece.segment for piece in self.saving]
        num_cached = len(self.radix.keys())
        assert len(owned) == num_cached + len(saving)
        self.pool.check([block for _, table in self.users for block in table] + self.radix.owned())

    @invariant()
    def what_is_in_use_is_still_found(self) -> None:
        for text, table in self.users:
            assert self.radix.match(keys(text)) == table


TestPrefixCacheModel = PrefixCacheModel.TestCase
