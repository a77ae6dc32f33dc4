"""Who holds which prefix block, and which state segment. Plain state: no process, no clock, no bytes."""

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import compress, count, islice
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey

H = TypeVar("H", bound=Hashable)

MAX_ENTRIES = 16 << 20
"""(holder, key) pairs: some 2.5 GiB. A thousand engines of 2,000 blocks beside stores of 30,000 on 125 nodes
have 6 million."""

TOGETHER = 16
"""So many keys of a path are looked for at once."""

BYTES_A_KEY, BYTES_AN_ENTRY = 135, 100
"""What a key takes, and what it takes once more for each of its holders: 4 million keys and 7 million entries
took 1,181 MiB (`tests.bench.index`)."""

_FLAGS = bytes.maketrans(b"01", bytes((0, 1)))


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

    Each key has a place, and keys that are told one behind the other have places one behind the other. So a
    path is compared with the names that stand there, a few at a time: to find each key by its hash takes
    some cache misses. Places that become free are taken again, the last first, for tails of paths go before
    heads. Wherever keys come to stand, it costs time and nothing else. Place 0 is nobody's.

    Bounded: beyond `max_entries` whoever has most loses what it said last, the ends of paths whose heads
    stay. So shares even out, and what is known remains true: a hit may be overlooked, and none is made up.
    `take_cut` names those that can be known in full again.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._num_dropped = 0
        self._place: dict[BlockKey, int] = {}
        self._names: list[BlockKey | None] = [None]
        """By place; None where it is free."""
        self._holders: list[int] = [0]
        """By place. Neighbours that have the same holders share an int, as far as that costs nothing."""
        self._free: list[int] = []
        self._keys: dict[H, dict[BlockKey, None]] = {}
        """Sets that know in which order they grew; a dict takes no more than a set does."""
        self._bit: dict[H, int] = {}
        self._by_bit: list[H | None] = []
        """By the number of the bit; None where it is free."""
        self._cut: set[H] = set()

    def __len__(self) -> int:
        """Different keys that somebody holds."""
        return len(self._place)

    @property
    def size(self) -> DirectorySize:
        return DirectorySize(
            num_holders=len(self._keys),
            num_keys=len(self._place),
            num_entries=self._num_entries,
            num_dropped=self._num_dropped,
        )

    @property
    def holders(self) -> Set[H]:
        return self._keys.keys()

    def keys_of(self, holder: H) -> frozenset[BlockKey]:
        return frozenset(self._keys.get(holder, ()))

    def holds(self, holder: H, key: BlockKey) -> bool:
        return bool(self.holders_of_one(key) & self._bit.get(holder, 0))

    def add(self, holder: H, keys: Iterable[BlockKey]) -> None:
        """The holder has these too, parents first. Saying it twice changes nothing."""
        held = self._keys.get(holder, {})
        new = dict.fromkeys(keys)
        if not held.keys().isdisjoint(new):
            new = dict.fromkeys(key for key in new if key not in held)
        if not new:
            return
        bit = self._bit.get(holder) or self._take_bit(holder)
        held = self._keys.setdefault(holder, held)
        held |= new
        self._num_entries += len(new)
        places = list(map(self._place.get, new))
        num_new = places.count(None)
        if num_new == len(places):
            self._settle(bit, list(new))
        else:
            self._join(bit, [place for place in places if place is not None])
            if num_new:
                self._settle(bit, [key for key, place in zip(new, places, strict=True) if place is None])
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
            self._drop(holder, reversed(self._keys[holder]))
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
        left = last = holders[0] if holders else 0
        for length, held in enumerate(holders):
            if held is last:
                continue
            last = held
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

    def holders_of_one(self, key: BlockKey) -> int:
        """The bits of its holders."""
        return self._holders[self._place.get(key, 0)]

    def holders_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """The same of each key."""
        names, holders, place_of = self._names, self._holders, self._place.get
        found: list[int] = []
        place = place_of(keys[0], 0) if keys else 0
        for first in range(0, len(keys), TOGETHER):
            some = list(keys[first : first + TOGETHER])
            end = place + len(some)
            if names[place:end] == some:
                found += holders[place:end]
                place = end
            else:
                places = [place_of(key, 0) for key in some]
                found += [holders[place] for place in places]
                place = places[-1] + 1
        return found

    def check(self) -> None:
        """Raise AssertionError if the sides disagree."""
        assert self._keys.keys() == self._bit.keys()
        assert all(self._keys.values()), "a holder without keys"
        bits = {1 << i: holder for i, holder in enumerate(self._by_bit) if holder is not None}
        assert {bit: holder for holder, bit in self._bit.items()} == bits, "two holders share a bit"
        holders: dict[BlockKey | None, int] = {}
        for holder, keys in self._keys.items():
            for key in keys:
                holders[key] = holders.get(key, 0) | self._bit[holder]
        assert holders == {key: self._holders[place] for key, place in self._place.items()}
        taken = {place: key for place, key in enumerate(self._names) if key is not None}
        assert taken == {place: key for key, place in self._place.items()}
        assert len(self._holders) == len(self._names)
        assert sorted([0, *self._free, *taken]) == list(range(len(self._names)))
        assert not any(self._holders[place] for place in (0, *self._free))
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
        digits = f"{bits:b}"[::-1].encode().translate(_FLAGS)
        return compress(self._by_bit, digits)  # type: ignore[arg-type]  # a bit that is set is somebody's

    def _take_bit(self, holder: H) -> int:
        if None not in self._by_bit:
            self._by_bit.append(None)
        i = self._by_bit.index(None)
        self._by_bit[i] = holder
        self._bit[holder] = 1 << i
        return 1 << i

    def _release_bit(self, holder: H) -> None:
        del self._keys[holder]
        self._by_bit[self._bit.pop(holder).bit_length() - 1] = None

    def _join(self, bit: int, places: Iterable[int]) -> None:
        """One more holder of the keys that stand there."""
        holders = self._holders
        others = together = 0
        for place in places:
            if holders[place] is not others:
                others = holders[place]
                together = others | bit
            holders[place] = together

    def _settle(self, bit: int, keys: Sequence[BlockKey]) -> None:
        """Places for new keys, which have this holder alone."""
        again = [self._free.pop() for _ in range(min(len(self._free), len(keys)))]
        for key, place in zip(keys, again, strict=False):
            self._place[key] = place
            self._names[place] = key
            self._holders[place] = bit
        rest = keys[len(again) :]
        self._place.update(zip(rest, count(len(self._names)), strict=False))
        self._names += rest
        self._holders += [bit] * len(rest)

    def _drop(self, holder: H, keys: Iterable[BlockKey]) -> None:
        holders, bit = self._holders, self._bit[holder]
        before = left = 0
        for key in keys:
            self._num_entries -= 1
            place = self._place[key]
            if holders[place] is not before:
                before = holders[place]
                left = before & ~bit
            holders[place] = left
            if not left:
                del self._place[key]
                self._names[place] = None
                self._free.append(place)
