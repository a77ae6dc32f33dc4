"""Where the blocks and the state segments of one prompt are, for the time of its placement."""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from shoal.kvstore.block_hash import BlockKey, segment_key
from shoal.kvstore.directory import Directory

H = TypeVar("H", bound=Hashable)


class Whereabouts(Generic[H]):
    """Sets of holders are ints of their bits (`Directory.bit`). True until the directory changes."""

    def __init__(self, directory: Directory[H], keys: Sequence[BlockKey]) -> None:
        self.keys = keys
        self._directory = directory
        self.blocks = directory.holders_of(keys)
        """Who has each."""
        self._segments: dict[int, int] = {}

    def segment(self, index: int) -> int:
        """Who has the segment of this block. It is named when asked for: a name costs more than a look."""
        held = self._segments.get(index)
        if held is None:
            held = self._directory.holders_of_one(segment_key(self.keys[index]))
            self._segments[index] = held
        return held

    def leading(self, holders: int) -> int:
        """How many of the leading blocks are with one or the other of them."""
        return next((i for i, held in enumerate(self.blocks) if not held & holders), len(self.blocks))
