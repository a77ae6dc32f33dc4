"""Who holds which prefix block, and which state segment. Plain state: no process, no clock, no bytes."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey

H = TypeVar("H", bound=Hashable)


class Directory(Generic[H]):
    """Key → holders. A holder is whatever has blocks and segments: an engine's device, a node's store.

    The holders of a key are the bits of one int, so a prefix is matched against all holders at once, and a
    key costs two entries of hash tables however many have it. Each holder's keys are known too, so that
    forgetting one costs its own keys and not everybody's. Nothing is kept of a key without holders, nor of a
    holder without keys.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._keys: dict[H, set[BlockKey]] = {}
        self._bit: dict[H, int] = {}

    def __len__(self) -> int:
        """Different keys that somebody holds."""
        return len(self._holders)

    def keys_of(self, holder: H) -> frozenset[BlockKey]:
        return frozenset(self._keys.get(holder, ()))

    def holds(self, holder: H, key: BlockKey) -> bool:
        return bool(self._holders.get(key, 0) & self._bit.get(holder, 0))

    def add(self, holder: H, keys: Iterable[BlockKey]) -> None:
        """The holder has these too. Saying it twice changes nothing."""
        new = set(keys).difference(self._keys.get(holder, ()))
        if not new:
            return
        if holder not in self._bit:
            taken = sum(self._bit.values())
            self._bit[holder] = ~taken & (taken + 1)  # the lowest that is free
            self._keys[holder] = set()
        self._keys[holder] |= new
        for key in new:
            self._holders[key] = self._holders.get(key, 0) | self._bit[holder]

    def discard(self, holder: H, keys: Iterable[BlockKey]) -> None:
        """The holder has these no longer. Those that it never had are passed over; the others still go."""
        held = self._keys.get(holder, set())
        gone = held.intersection(keys)
        held -= gone
        self._drop(holder, gone)
        if not held:
            self.forget(holder)

    def forget(self, holder: H) -> None:
        """The holder is gone, and with it all that it had."""
        self._drop(holder, self._keys.pop(holder, set()))
        self._bit.pop(holder, None)

    def match(self, keys: Sequence[BlockKey]) -> dict[H, int]:
        """How many of the leading keys each holder has without a gap; one that has none may be left out."""
        matched = dict.fromkeys(self._bit, len(keys))
        left = sum(self._bit.values())
        for length, key in enumerate(keys):
            lost = left & ~self._holders.get(key, 0)
            if lost:
                matched.update((holder, length) for holder, bit in self._bit.items() if bit & lost)
                left -= lost
            if not left:
                break
        return matched

    def bit(self, holder: H) -> int:
        """Stands for the holder in `holders_of` until the directory changes; 0 if it has nothing."""
        return self._bit.get(holder, 0)

    def holders_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """Of each key, the bits of its holders."""
        return [self._holders.get(key, 0) for key in keys]

    def check(self) -> None:
        """Raise AssertionError if the two sides disagree."""
        assert self._keys.keys() == self._bit.keys()
        assert all(self._keys.values()), "a holder without keys"
        assert len(set(self._bit.values())) == len(self._bit), "two holders share a bit"
        holders: dict[BlockKey, int] = {}
        for holder, keys in self._keys.items():
            for key in keys:
                holders[key] = holders.get(key, 0) | self._bit[holder]
        assert holders == self._holders

    def _drop(self, holder: H, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            left = self._holders[key] & ~self._bit[holder]
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
