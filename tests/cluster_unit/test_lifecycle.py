"""The end of a cluster whose supervisor does not help, over a Ray that is a dictionary."""

import pytest

from shoal.cluster import lifecycle, supervisor_actor


def test_what_a_supervisor_was_told_is_forgotten_with_it_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {b"shoal-test/12ab/wish": b"", b"shoal-test-2/34cd/wish": b""}

    def delete(prefix: bytes, *, del_by_prefix: bool, namespace: bytes) -> None:
        assert del_by_prefix and namespace == b"shoal"
        for key in [key for key in kept if key.startswith(prefix)]:
            del kept[key]

    monkeypatch.setattr(supervisor_actor, "_internal_kv_del", delete)
    monkeypatch.setattr(lifecycle, "_named_actors", lambda namespace: [])
    monkeypatch.setattr(lifecycle, "groups_of", lambda namespace: {})
    lifecycle._end_all("shoal-test")
    assert list(kept) == [b"shoal-test-2/34cd/wish"]
