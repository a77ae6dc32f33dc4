"""Which cached pieces are copied to the node's store, and when."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import islice

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.transfers import Piece, StoreView, WritePolicy
from shoal.actors.messages import PrefixSource, StoreId
from shoal.kvstore.block_hash import BlockKey, segment_key

LOOK_AHEAD, LOOK_AHEAD_SHARE = 64, 8
"""Write-back saves what would be evicted next until so many pieces, or this part of the pool, are free."""


class Occasion(Enum):
    """What has happened to blocks and segments."""

    CACHED = auto()
    SEEN_AGAIN = auto()
    """Another request had use for them."""
    TURN_ENDED = auto()
    """Whoever goes on with this conversation needs them."""


_OCCASIONS: dict[WritePolicy, frozenset[Occasion]] = {
    "write_through": frozenset({Occasion.CACHED, Occasion.SEEN_AGAIN}),
    # Seen again: a store that was replaced has to be given once more what is of use.
    "write_through_selective": frozenset({Occasion.SEEN_AGAIN, Occasion.TURN_ENDED}),
    "write_back": frozenset(),
}


class Saves:
    """Pieces that are wanted in the store go out in order; the copy that reads one is an owner of it.

    A piece that is evicted before anybody could take it is lost, and counted.
    """

    def __init__(self, pools: Pools, view: StoreView | None) -> None:
        self._pools = pools
        self._view = view
        self._occasions = _OCCASIONS[view.write_policy] if view else frozenset[Occasion]()
        self._wanted: OrderedDict[BlockKey, BlockKey] = OrderedDict()  # name → key of its block
        self._stored: set[BlockKey] = set()  # names of cached pieces that the store has, or is about to have
        self._own = view.own if view else None
        self.num_lost = 0
        pools.prefix_cache.changes.on_evicted = self._evicted

    @property
    def own(self) -> StoreId | None:
        """The store of the engine's own node."""
        return self._own

    def use_store(self, own: StoreId | None) -> None:
        if own != self._own:
            self._own = own
            self._stored.clear()

    def note(self, occasion: Occasion, blocks: Iterable[BlockKey], segments: Iterable[BlockKey] = ()) -> None:
        """segments: keys of the blocks whose segments are meant."""
        if occasion in self._occasions:
            self._want(blocks, segments)

    def stored(self, names: Iterable[BlockKey]) -> None:
        """The store has these already."""
        for name in names:
            self._wanted.pop(name, None)
            self._stored.add(name)

    def not_stored(self, names: Iterable[BlockKey]) -> None:
        """The store has not got these after all: they are wanted at the next occasion."""
        self._stored.difference_update(names)

    def take(self, max_bytes: int) -> list[Piece]:
        """What to copy now, parents before children; nothing of it is overwritten until `end`."""
        if self._view is None or self._own is None:
            return []
        if self._view.write_policy == "write_back":
            self._look_ahead()
        taken: list[Piece] = []
        while self._wanted:
            name, key = next(iter(self._wanted.items()))
            max_bytes -= self._view.bytes_per_block if name == key else self._view.bytes_per_segment
            if max_bytes < 0:
                break
            del self._wanted[name]
            taken.append(self._start(name, key))
        return taken

    def end(self, pieces: Iterable[Piece]) -> None:
        """They have been copied, or will not be."""
        cache = self._pools.prefix_cache
        for piece in pieces:
            if piece.block != NO_BLOCK:
                cache.end_saving(piece.block)
            else:
                cache.segments.end_saving(piece.segment)

    def forget(self) -> None:
        """The prefix cache has been reset."""
        self._wanted.clear()
        self._stored.clear()

    def source(self, keys: Sequence[BlockKey]) -> tuple[PrefixSource, ...]:
        """What of these blocks, the first of a prompt, the own store has."""
        if self._own is None:
            return ()
        return tuple(
            PrefixSource(
                store_id=self._own,
                first=i,
                end=i + (key in self._stored),
                segments=(i,) if segment_key(key) in self._stored else (),
            )
            for i, key in enumerate(keys)
        )

    def _want(self, blocks: Iterable[BlockKey], segments: Iterable[BlockKey]) -> None:
        cache = self._pools.prefix_cache
        names = [(key, key) for key in blocks if cache.match([key])]
        names += [(name, key) for key in segments for name in cache.segments.names(key)]
        for name, key in names:
            if name not in self._stored:
                self._wanted.setdefault(name, key)

    def _look_ahead(self) -> None:
        cache = self._pools.prefix_cache
        blocks = _next(cache.first_to_go(), self._pools.blocks.num_free, self._pools.blocks.num_usable)
        segments = _next(
            cache.segments.first_to_go(), self._pools.segments.num_free, self._pools.segments.num_usable
        )
        self._want(reversed(blocks), reversed(segments))

    def _start(self, name: BlockKey, key: BlockKey) -> Piece:
        cache = self._pools.prefix_cache
        self._stored.add(name)
        if name == key:
            piece = cache.piece(key)
            assert piece is not None, "what is evicted is no longer wanted"
            cache.start_saving(piece.block)
        else:
            piece = cache.segments.piece(key)
            assert piece is not None, "what is evicted is no longer wanted"
            cache.segments.start_saving(piece.segment)
        return piece

    def _evicted(self, name: BlockKey) -> None:
        was_wanted = self._wanted.pop(name, None) is not None
        if self._view is not None and self._view.write_policy == "write_back":
            was_wanted = name not in self._stored
        self.num_lost += was_wanted and self._own is not None
        self._stored.discard(name)

    def check(self) -> None:
        cached = set(self._pools.prefix_cache.keys())
        assert self._wanted.keys() | self._stored <= cached
        assert not self._wanted.keys() & self._stored


def _next(queue: Iterable[BlockKey], num_free: int, num_usable: int) -> list[BlockKey]:
    """So many from the front of a queue as are to be free and are not."""
    return list(islice(queue, max(0, min(LOOK_AHEAD, num_usable // LOOK_AHEAD_SHARE) - num_free)))
