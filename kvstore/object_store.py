"""Bytes in Ray's object store.

An object's owner is whoever called the method that returned it. So the store calls the engine's `export`: the
bytes are copied once, into the object store of the engine's node, and the store owns them from then on. The
tickets are the references; whoever has one borrows the object, which stays as long as it is borrowed.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.calls import within
from shoal.kvstore.messages import Extent, Reading
from shoal.kvstore.transfer import BytesLost

# Ray warns of every ray.get in an async actor's process, on any thread. Ours wait on threads of their own,
# see `_get`; and unlike a future that is given up, a ray.get that times out ends its transfer.
os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")


class ObjectStore:
    """Implements Transfer."""

    async def take_over(self, engine: Any, extent: Extent, timeout_s: float) -> ray.ObjectRef[np.ndarray]:
        reference: ray.ObjectRef[np.ndarray] = engine.export.remote(extent.extent_id, extent.keys)
        try:
            data: np.ndarray = await within(timeout_s, reference)  # no copy: both are on one node
        except RayError as error:
            raise BytesLost(type(error).__name__) from error
        if data.nbytes != extent.num_bytes:
            raise BytesLost(f"{data.nbytes} bytes of {extent.num_bytes}")
        return reference

    def fetch(self, tickets: Sequence[ray.ObjectRef[np.ndarray]], timeout_s: float) -> list[np.ndarray]:
        data: list[np.ndarray] = _get(list(tickets), timeout_s)
        return data


def copied(extent: Extent, wanted: Extent, ticket: ray.ObjectRef[np.ndarray], timeout_s: float) -> Any:
    """A ticket for what is `wanted` of another store's extent, on this node and owned by this process. Waits.
    BytesLost, TimeoutError."""
    (data,) = ObjectStore().fetch([ticket], timeout_s)
    if wanted.num_bytes != extent.num_bytes:
        keys = set(wanted.keys)
        parts = [data[e.offset : e.offset + e.size] for e in extent.entries if e.key in keys]
        data = np.concatenate(parts)
    return ray.put(data)


class RemoteStore:
    """Implements Store over a StoreActor's handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def read(self, keys: Sequence[BlockKey], timeout_s: float) -> Reading:
        reading: Reading = _get(self._actor.read.remote(tuple(keys)), timeout_s)
        return reading

    def release(self, lease_id: int) -> None:
        self._actor.release.remote(lease_id)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        self._actor.discard.remote(tuple(keys))


def _get(references: Any, timeout_s: float) -> Any:
    """Waits. Raises RuntimeError on an event loop's thread, where it would hold up everybody else."""
    if _is_event_loop_thread():
        raise RuntimeError("an event loop would wait: read stores on another thread")
    try:
        return ray.get(references, timeout=max(0.0, timeout_s))
    except GetTimeoutError as error:
        raise TimeoutError(f"not within {timeout_s:.1f} s") from error
    except RayError as error:
        raise BytesLost(type(error).__name__) from error


def _is_event_loop_thread() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
