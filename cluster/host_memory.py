"""How much of a node's host memory its KV store may take: a share of Ray's object store, where its bytes lie.

Ray counts the object store out of the memory that it gives to engines, so the two together fit the machine.
"""

from shoal.kvstore.sizes import format_size

DEFAULT_SHARE = 0.3
LARGEST_PERCENT = 60
"""The rest is for what passes through: blocks on their way to the store, and copies that other nodes' engines
fetch. An object store that overflows writes to disk."""

LEAST_OBJECT_STORE_BYTES = 256 << 20
"""Of a Ray of our own, whatever the KV store needs."""


def store_budget(wanted_bytes: int | None, object_store_bytes: int) -> int:
    """Of one node; None is "choose for me"."""
    return int(DEFAULT_SHARE * object_store_bytes) if wanted_bytes is None else wanted_bytes


def check_store_budget(wanted_bytes: int, object_store_bytes: int) -> None:
    """Raises ValueError, with the numbers, if no node's object store is large enough: this is the largest."""
    if 100 * wanted_bytes > LARGEST_PERCENT * object_store_bytes:
        raise ValueError(
            f"--kv-store-memory {format_size(wanted_bytes)} is more than {LARGEST_PERCENT}% of the largest "
            f"node's object store of {format_size(object_store_bytes)}: lower it, or start Ray with an "
            "--object-store-memory of at least "
            f"{format_size(needed_object_store_bytes(wanted_bytes), up=True)}"
        )


def needed_object_store_bytes(budget_bytes: int) -> int:
    return max(LEAST_OBJECT_STORE_BYTES, -(-100 * budget_bytes // LARGEST_PERCENT))


def check_shared_memory(budget_bytes: int, shared_memory_bytes: int) -> None:
    """Raises ValueError if the object store that a Ray of our own would need does not fit /dev/shm."""
    needed = needed_object_store_bytes(budget_bytes)
    if needed > shared_memory_bytes:
        raise ValueError(
            f"--kv-store-memory {format_size(budget_bytes)} needs an object store of {format_size(needed)}; "
            f"/dev/shm has {format_size(shared_memory_bytes)}: lower it, or enlarge /dev/shm"
        )
