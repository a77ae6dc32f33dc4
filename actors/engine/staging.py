"""Where what is to be saved lies until a store has it."""

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent


class Staging:
    """Extents that were copied off the device, each a copy of its own, within a budget of bytes.

    Filled by the engine's loop, read and emptied by the actor's calls: each method takes the lock.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._extents: dict[str, tuple[Extent, np.ndarray]] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(extent.num_bytes for extent, _ in self._extents.values())

    @property
    def room_bytes(self) -> int:
        return self._budget_bytes - self.used_bytes

    def hold(self, extent: Extent, data: np.ndarray) -> None:
        """data: uint8 [num_bytes], which nobody changes any more. It had been asked whether there is room."""
        with self._lock:
            self._extents[extent.extent_id] = (extent, data)

    def export(self, extent_id: str, keys: Sequence[BlockKey]) -> np.ndarray:
        """The bytes of these of an extent's entries, one behind the other. KeyError if it is not staged."""
        with self._lock:
            extent, data = self._extents[extent_id]
        wanted = set(keys)
        parts = [data[e.offset : e.offset + e.size] for e in extent.entries if e.key in wanted]
        return data if len(parts) == len(extent.entries) else np.concatenate(parts)

    def clear(self) -> None:
        with self._lock:
            self._extents.clear()

    def drop(self, extent_ids: Iterable[str]) -> None:
        with self._lock:
            for extent_id in extent_ids:
                self._extents.pop(extent_id, None)
