"""How the bytes of an extent get from the engine that made them to one that wants them.

    engine ──offer──▶ its node's store ──take_over──▶ a ticket for the bytes, which outlive the engine
                             │
    another engine ◀──read── the ticket ──fetch──▶ the bytes

Who may read what is said in calls between actors; only bytes move through this interface. Today they lie in
Ray's object store (`object_store.py`); device-direct transports can stand behind the same two operations.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import Extent, Reading

Ticket = Any
"""Leads to the bytes of one extent. Opaque; may be sent to any process, and whoever has one can read."""


class BytesLost(Exception):
    """A process or a node that has them is gone. Where nobody knows yet, it is a TimeoutError."""


class Transfer(Protocol):
    async def take_over(self, engine: Any, extent: Extent, timeout_s: float) -> Ticket:
        """The store's side: make the engine's staged bytes of an extent its own. BytesLost, TimeoutError."""
        ...

    def fetch(self, tickets: Sequence[Ticket], timeout_s: float) -> list[np.ndarray]:
        """The reader's side: uint8, read-only, of each extent. Waits. BytesLost, TimeoutError."""
        ...


class Store(Protocol):
    """A store, here or on another node, as an engine's fetches see it."""

    def read(self, keys: Sequence[BlockKey], timeout_s: float) -> Reading:
        """Waits. BytesLost, TimeoutError."""
        ...

    def release(self, lease_id: int) -> None:
        """Waits for nothing."""
        ...

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """What was read of these is not what was saved. Waits for nothing."""
        ...
