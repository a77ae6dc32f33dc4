"""As test_machine, with stores that lose, delay, truncate and repeat."""

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from shoal.actors.engine.transfers import Fallback, WritePolicy
from shoal.kvstore.block_hash import segment_key
from tests.engine.bench import Bench
from tests.engine.test_machine import STEMS, EngineMachine
from tests.fake_store import OTHER, OWN, Bytes, view


@cache
def stored_stems(window: int | None, num_dropped: int) -> tuple[Bytes, Bytes]:
    """The heads of all prompts in the own node's store, and all of them in another."""
    bench = Bench(block_size=3, num_blocks=60, window=window, num_dropped=num_dropped, view=view())
    heads = {key for stem in STEMS for key in bench.keys(stem[:6])}
    for salt in ("", "salt"):
        for i, stem in enumerate(STEMS):
            bench.serve(f"{salt}{i}", stem, cache_salt=salt)
    everything = bench.stores.has[OWN]
    names = heads | set(map(segment_key, heads))
    return {key: rows for key, rows in everything.items() if key in names}, everything


class StoreMachine(EngineMachine):
    """All that an engine does, and copies of what it has that begin and end at any time."""

    policy: WritePolicy = "write_through"

    def __init__(self) -> None:
        super().__init__()
        self.view = view(self.policy, worth=lambda tokens, own, other: other < 6)

    def fill_stores(self) -> None:
        has = self.bench.stores.has
        has[OWN], has[OTHER] = map(dict, stored_stems(self.bench.window, self.bench.num_dropped))
        for salt in ("", "salt"):
            self.watched.salt_of |= dict.fromkeys(
                [key for stem in STEMS for key in self.bench.keys(stem, salt)], salt
            )

    @rule(max_bytes=st.sampled_from([1, 100]))
    def take(self, max_bytes: int) -> None:
        self.bench.carrier.take(max_bytes)

    @precondition(lambda self: self.bench.carrier.saving)
    @rule(data=st.data(), lose=st.sampled_from([False, False, True]))
    def save(self, data: st.DataObject, lose: bool) -> None:
        self.bench.carrier.save(data.draw(st.integers(0, len(self.bench.carrier.saving) - 1)), lose=lose)

    @precondition(lambda self: self.bench.carrier.fetching)
    @rule(data=st.data(), all_there=st.booleans())
    def land(self, data: st.DataObject, all_there: bool) -> None:
        fetching = self.bench.carrier.fetching
        index = data.draw(st.integers(0, len(fetching) - 1))
        keys = [key for read in fetching[index].reads for key in read.keys]
        lost = set() if all_there else data.draw(st.sets(st.sampled_from(keys), max_size=2))
        self.bench.carrier.land(index, without=lost)

    @precondition(lambda self: self.bench.carrier.fetching)
    @rule(reason=st.sampled_from([Fallback.DEADLINE, Fallback.STORE_LOST]))
    def fetch_fails(self, reason: Fallback) -> None:
        self.bench.carrier.fail(reason=reason)

    @precondition(lambda self: self.bench.carrier.landing)
    @rule(fails=st.sampled_from([False, False, True]))
    def copy(self, fails: bool) -> None:
        self.watched.copy(fails=fails)

    @precondition(lambda self: self.bench.stores.has[OWN])
    @rule(data=st.data())
    def stored_pieces_go(self, data: st.DataObject) -> None:
        """Evicted, or to be had on another node only."""
        has = self.bench.stores.has
        for key in data.draw(st.sets(st.sampled_from(sorted(has[OWN])), max_size=3)):
            has[OTHER][key] = has[OWN].pop(key)

    @rule(there=st.booleans())
    def own_store_is_replaced(self, there: bool) -> None:
        self.bench.scheduler.use_store(OWN if there else None)


class WriteBackMachine(StoreMachine):
    policy = "write_back"


class SelectiveMachine(StoreMachine):
    policy = "write_through_selective"


_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None)

TestStoreMachine = StoreMachine.TestCase
TestWriteBackMachine = WriteBackMachine.TestCase
TestSelectiveMachine = SelectiveMachine.TestCase
TestStoreMachine.settings = _SETTINGS
TestWriteBackMachine.settings = TestSelectiveMachine.settings = settings(_SETTINGS, max_examples=20)
