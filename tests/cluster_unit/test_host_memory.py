"""What of a node's memory is for prefixes: worked examples."""

import re

import pytest

from shoal.cluster.host_memory import (
    LEAST_OBJECT_STORE_BYTES,
    check_shared_memory,
    check_store_budget,
    needed_object_store_bytes,
    store_budget,
)

GIB = 1 << 30


def test_a_store_has_what_was_asked_for_or_a_share_of_the_objects() -> None:
    assert store_budget(None, 10 * GIB) == 3 * GIB
    assert store_budget(2 * GIB, 10 * GIB) == 2 * GIB


def test_a_ray_of_our_own_is_as_large_as_the_store_needs() -> None:
    assert needed_object_store_bytes(6 * GIB) == 10 * GIB
    assert needed_object_store_bytes(0) == LEAST_OBJECT_STORE_BYTES
    for budget in range(200 * 1024**2, 200 * 1024**2 + 10):
        check_store_budget(budget, needed_object_store_bytes(budget))


def test_82_what_does_not_fit_is_said_with_the_numbers() -> None:
    check_store_budget(6 * GIB, 10 * GIB)
    too_much = (
        "--kv-store-memory 7GiB is more than 60% of the largest node's object store of 10GiB: lower it, or "
        "start Ray with an --object-store-memory of at least 11.7GiB"
    )
    with pytest.raises(ValueError, match=re.escape(too_much)):
        check_store_budget(7 * GIB, 10 * GIB)
    no_room = "--kv-store-memory 6GiB needs an object store of 10GiB; /dev/shm has 8GiB: lower it, or enlarge"
    with pytest.raises(ValueError, match=re.escape(no_room)):
        check_shared_memory(6 * GIB, 8 * GIB)
