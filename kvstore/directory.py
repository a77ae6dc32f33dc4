"""Who holds which prefix block, and which state segment. Plain state: no process, no clock, no bytes."""

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey

H = TypeVar("H", bound=Hashable)

MAX_ENTRIES = 16 << 20
"""(holder, key) pairs: some 2.5 GiB. A thousand engines of 2,000 blocks beside stores of 30,000 on 125 nodes
have 6 million."""

BYTES_A_KEY, BYTES_AN_ENTRY = 100, 100
"""What a key takes, and what it takes once more for each of its holders: 4 million keys and 7 million entries
took 1,026 MiB (`tests.bench.index`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySize:
    num_holders: int
    num_keys: int
    """Different ones."""
    num_entries: int
    """(holder, key) pairs."""
    num_dropped: int
    """Pairs that were left out for want of room, since the beginning."""

    @property
    def num_bytes(self) -> int:
        """As measured, not counted: Python does not say."""
        return BYTES_A_KEY * self.num_keys + BYTES_AN_ENTRY * self.num_entries


class Directory(Generic[H]):
    """Key → holders. A holder is whatever has blocks and segments: an engine's device, a node's store.

    The holders of a key are the bits of one int, so a prefix is matched against all holders at once. Each
    holder's keys are known too, so that forgetting one costs its own keys and not everybody's. Nothing is
    kept of a key without holders, nor of a holder without keys.

    Bounded: beyond `max_entries` whoever has most loses what it said last, the ends of paths whose heads
    stay. So shares even out, and what is known remains true: a hit may be overlooked, and none is made up.
    `take_cut` names those that can be known in full again.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._num_dropped = 0
        self._holders: dict[BlockKey, int] = {}
        self._keys: dict[H, dict[BlockKey, None]] = {}
        """Sets that know in which order they grew; a dict takes no more than a set does."""
        self._bit: dict[H, int] = {}
        self._holder: dict[int, H] = {}
        """By its bit."""
        self._cut: set[H] = set()

    def __len__(self) -> int:
        """Different keys that somebody holds."""
        return len(self._holders)

    @property
    def size(self) -> DirectorySize:
        return DirectorySize(
            num_holders=len(self._keys),
            num_keys=len(self._holders),
            num_entries=self._num_entries,
            num_dropped=self._num_dropped,
        )

    @property
    def holders(self) -> Set[H]:
        return self._keys.keys()

    def keys_of(self, holder: H) -> frozenset[BlockKey]:
        return frozenset(self._keys.get(holder, ()))

    def holds(self, holder: H, key: BlockKey) -> bool:
        return bool(self._holders.get(key, 0) & self._bit.get(holder, 0))

    def add(self, holder: H, keys: Iterable[BlockKey]) -> None:
        """The holder has these too, parents first. Saying it twice changes nothing."""
        held = self._keys.get(holder, {})
        new = dict.fromkeys(key for key in keys if key not in held)
        if not new:
            return
        bit = self._bit.get(holder) or self._take_bit(holder)
        held = self._keys.setdefault(holder, held)
        held |= new
        self._num_entries += len(new)
        holders = self._holders
        for key in new:
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit  # alone, it costs no int of its own
        if self._num_entries > self._max_entries:
            self._make_room()

    def discard(self, holder: H, keys: Iterable[BlockKey]) -> None:
        """The holder has these no longer. Those that it never had are passed over; the others still go."""
        held = self._keys.get(holder)
        if held is None:
            return
        gone = [key for key in dict.fromkeys(keys) if key in held]
        for key in gone:
            del held[key]
        self._drop(holder, gone)
        if not held:
            self._release_bit(holder)

    def forget(self, holder: H) -> None:
        """The holder is gone, and with it all that it had."""
        self._cut.discard(holder)
        if holder in self._keys:
            self._drop(holder, self._keys[holder])
            self._release_bit(holder)

    @property
    def cut(self) -> Set[H]:
        """Of whom keys are left out now."""
        return self._cut

    def take_cut(self) -> set[H]:
        """Of whom keys were left out, now that there is room again, for an eighth of all. Named once."""
        if 8 * self._num_entries > 7 * self._max_entries:
            return set()
        cut, self._cut = self._cut, set()
        return cut

    def match(self, keys: Sequence[BlockKey]) -> dict[H, int]:
        """How many of the leading keys each holder has without a gap; those that have none are left out."""
        return self.leading(self.holders_of(keys))

    def leading(self, holders: Sequence[int]) -> dict[H, int]:
        """The same by what `holders_of` said of the keys."""
        matched: dict[H, int] = {}
        left = holders[0] if holders else 0
        for length, held in enumerate(holders):
            if left & ~held:
                matched |= dict.fromkeys(self._of_bits(left & ~held), length)
                left &= held
                if not left:
                    break
        matched |= dict.fromkeys(self._of_bits(left), len(holders))
        return matched

    def bit(self, holder: H) -> int:
        """Stands for the holder in `holders_of` until the directory changes; 0 if it has nothing."""
        return self._bit.get(holder, 0)

    def holders_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """Of each key, the bits of its holders."""
        return list(map(self._holders.get, keys, repeat(0)))

    def check(self) -> None:
        """Raise AssertionError if the sides disagree."""
        assert self._keys.keys() == self._bit.keys()
        assert all(self._keys.values()), "a holder without keys"
        assert {bit: holder for holder, bit in self._bit.items()} == self._holder, "two holders share a bit"
        holders: dict[BlockKey, int] = {}
        for holder, keys in self._keys.items():
            for key in keys:
                holders[key] = holders.get(key, 0) | self._bit[holder]
        assert holders == self._holders
        assert self._num_entries == sum(map(len, self._keys.values())) <= self._max_entries

    def _make_room(self) -> None:
        """A little more than is needed, so that not every report has to."""
        excess = self._num_entries - self._max_entries + self._max_entries // 1024
        while excess > 0:
            largest = max(self._keys, key=lambda holder: len(self._keys[holder]))
            last = list(islice(reversed(self._keys[largest]), excess))
            self._cut.add(largest)
            self._num_dropped += len(last)
            self.discard(largest, last)
            excess -= len(last)

    def _of_bits(self, bits: int) -> Iterator[H]:
        while bits:
            lowest = bits & -bits
            yield self._holder[lowest]
            bits ^= lowest

    def _take_bit(self, holder: H) -> int:
        taken = sum(self._holder)
        bit = ~taken & (taken + 1)  # the lowest that is free
        self._bit[holder], self._holder[bit] = bit, holder
        return bit

    def _release_bit(self, holder: H) -> None:
        del self._keys[holder]
        del self._holder[self._bit.pop(holder)]

    def _drop(self, holder: H, keys: Iterable[BlockKey]) -> None:
        bit = self._bit[holder]
        for key in keys:
            self._num_entries -= 1
            left = self._holders[key] & ~bit
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
