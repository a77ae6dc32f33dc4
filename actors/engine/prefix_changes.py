"""What came into a prefix cache and what left it, by name, gathered between two reports."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.kvstore.block_hash import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChanges:
    """What a cache holds and did not when it was last asked, and the other way round. No key is in both.

    Blocks go by their keys, state segments by the `segment_key` of their block's.
    """

    stored: tuple[BlockKey, ...] = ()
    """Parents first."""
    removed: tuple[BlockKey, ...] = ()


class ChangeLog:
    """Says what a change is on the whole: what was undone before anybody asked has not changed."""

    def __init__(self) -> None:
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self.on_evicted: Callable[[BlockKey], None] | None = None

    def stored(self, key: BlockKey) -> None:
        _note(key, self._stored, undoes=self._removed)

    def removed(self, key: BlockKey) -> None:
        _note(key, self._removed, undoes=self._stored)

    def evicted(self, key: BlockKey) -> None:
        """Removed because its memory was needed; whoever wants to be told is told."""
        self.removed(key)
        if self.on_evicted is not None:
            self.on_evicted(key)

    def take(self) -> PrefixChanges:
        changes = PrefixChanges(stored=tuple(self._stored), removed=tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes

    def check(self, held: set[BlockKey]) -> None:
        assert self._stored.keys() <= held
        assert not self._removed.keys() & held


def _note(key: BlockKey, where: dict[BlockKey, None], *, undoes: dict[BlockKey, None]) -> None:
    if key in undoes:
        del undoes[key]
    else:
        where[key] = None
