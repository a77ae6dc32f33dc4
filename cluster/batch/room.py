"""How many requests are open at once."""

import asyncio

MAX_BYTES = 128 << 20
"""Of the lines that are asked together: half of what Shoal's own door lets in."""


class Room:
    """Counts who is inside and the bytes that they brought; how many may be may change meanwhile.

    One that comes alone is let in, however large.
    """

    def __init__(self, size: int, max_bytes: int = MAX_BYTES) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_inside = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        return self._size

    def resize(self, size: int) -> None:
        """Who is inside stays, even if they are now more than that."""
        self._size = size
        self._changed.set()

    async def enter(self, num_bytes: int) -> None:
        """For one who waits at a time. Whoever is inside leaves at its deadline, so this ends too."""
        while self._num_inside and not self._has_room(num_bytes):
            self._changed.clear()
            await self._changed.wait()
        self._num_inside += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._num_inside -= 1
        self._num_bytes -= num_bytes
        self._changed.set()

    def _has_room(self, num_bytes: int) -> bool:
        return self._num_inside < self._size and self._num_bytes + num_bytes <= self._max_bytes
