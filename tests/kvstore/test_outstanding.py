from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.outstanding import Outstanding
from shoal.kvstore.store import KVStore
from tests.kvstore.extents import UNIT, blocks


def test_a_check_that_fails_is_told_by_its_words_or_its_line() -> None:
    def with_words() -> None:
        raise AssertionError("free [1], unowned [1, 2]")

    def without() -> None:
        books = [1]
        assert not books

    assert Outstanding.of({"blocks": 0}, with_words).broken == "free [1], unowned [1, 2]"
    assert "assert" in Outstanding.of({}, without).broken
    assert not Outstanding.of({"blocks": 0}, with_words).is_clean
    assert Outstanding.of({"blocks": 0}, lambda: None).is_clean
    assert not Outstanding.of({"blocks": 1}, lambda: None).is_clean


def test_a_store_counts_leases_until_they_end_and_extents_until_they_came() -> None:
    now = 0.0
    store: KVStore[str] = KVStore(100 * UNIT, lambda: now, lease_s=30.0)
    extent = blocks("a", 0, 2)
    assert store.put_start(extent) == extent
    assert store.outstanding().counts == {"leases": 0, "coming": 1}
    store.put_end(extent.extent_id, "bytes")
    lease = store.read(extent.keys).lease_id
    store.read([BlockKey(b"unknown")])
    assert store.outstanding().counts == {"leases": 2, "coming": 0}
    store.release(lease)
    assert store.outstanding().counts == {"leases": 1, "coming": 0}
    now = 30.0
    assert store.outstanding().is_clean
