"""What a store evicts, beside a model that moves the whole path of each use to the end of one list."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.store import KVStore
from tests.kvstore.extents import UNIT, block, blocks

BUDGET = 12


class PlainOrder:
    """Single blocks, used longest ago first; of one use, the tail first."""

    def __init__(self) -> None:
        self.parents: dict[BlockKey, BlockKey] = {}

    def use(self, key: BlockKey) -> None:
        step: BlockKey | None = key
        while step in self.parents:
            self.parents[step] = self.parents.pop(step)
            step = self.parents[step]

    def put(self, key: BlockKey, parent: BlockKey) -> list[BlockKey]:
        """What had to go."""
        gone = []
        if len(self.parents) == BUDGET:
            gone = [victim for victim in self.parents if self._can_go(victim, parent)][:1]
            if not gone:
                return []
            del self.parents[gone[0]]
        self.parents[key] = parent
        self.use(key)
        return gone

    def _can_go(self, key: BlockKey, parent: BlockKey) -> bool:
        return key != parent and key not in self.parents.values()


PATHS = st.sampled_from(["a", "a:b", "c", "d"])
USES = st.lists(st.tuples(st.sampled_from(["put", "put", "read"]), PATHS, st.integers(0, 9)), max_size=150)


@settings(deadline=None, max_examples=300)
@given(USES)
def test_whatever_is_put_and_read_the_same_goes_as_if_each_use_moved_its_path(
    uses: list[tuple[str, str, int]],
) -> None:
    store: KVStore[None] = KVStore(BUDGET * UNIT, lambda: 0.0)
    plain = PlainOrder()
    for number, (what, path, index) in enumerate(uses):
        key = block(path, index)
        if what == "read":
            store.release(store.read([key]).lease_id)
            plain.use(key)
        elif key not in store:
            wanted = store.put_start(blocks(path, index, index + 1, by=str(number)))
            if wanted is not None:
                store.put_end(wanted.extent_id, None)
            _, removed = store.changes.take()
            assert list(removed) == plain.put(key, block(path, index - 1))
            assert set(store.keys()) == plain.parents.keys()
        store.check()


def num_calls(num_blocks: int) -> int:
    """Of Python functions, to put two paths block by block; the second drives out half of the first."""
    store: KVStore[None] = KVStore(num_blocks * UNIT, lambda: 0.0)
    extents = [blocks(path, i, i + 1) for path in ("a", "b") for i in range(num_blocks * 3 // 4)]
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        for extent in extents:
            assert store.put_start(extent) is not None
            store.put_end(extent.extent_id, None)
    finally:
        sys.setprofile(None)
    return count


def test_what_a_put_costs_does_not_grow_with_its_path() -> None:
    assert num_calls(4000) < 11 * num_calls(400)
