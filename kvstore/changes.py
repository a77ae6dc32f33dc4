"""Which keys came and went, gathered between two reports."""

from collections.abc import Iterable

from shoal.kvstore.block_hash import BlockKey


class Changes:
    """Says of each key how it was left, even if that is how it was before.

    So what is taken is true on top of any snapshot made since it was last taken.
    """

    def __init__(self) -> None:
        self._is_stored: dict[BlockKey, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._is_stored)

    def note(self, keys: Iterable[BlockKey], *, stored: bool) -> None:
        for key in keys:
            self._is_stored.pop(key, None)  # so that parents stay before their children
            self._is_stored[key] = stored

    def take(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """(stored, removed), each in the order in which it was noted; no key is in both."""
        is_stored, self._is_stored = self._is_stored, {}
        return (
            tuple(key for key, stored in is_stored.items() if stored),
            tuple(key for key, stored in is_stored.items() if not stored),
        )
