"""An engine without a model: all of its dealings with stores, over memory that is only bytes."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.offers import Offers
from shoal.actors.engine.rates import Rates
from shoal.actors.engine.store_link import StoreLink
from shoal.actors.engine.transfers import Fallback, Fetch, FetchId, Piece, StoreRead
from shoal.actors.messages import EngineId, StoreId
from shoal.cluster.bench import tcp_copy
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.checksum import checksum
from shoal.kvstore.messages import Extent
from shoal.kvstore.object_store import ObjectStore, RemoteStore


class _Device:
    """memory: uint8 [blocks, bytes of each]"""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        random = np.random.default_rng()
        self.memory = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)

    def copy_out(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        rows = out.reshape(len(pieces), -1)
        for piece, row in zip(pieces, rows, strict=True):
            row[:] = self.memory[piece.block]

    def copy_in(self, pieces: Sequence[Piece], data: np.ndarray) -> None:
        rows = data.reshape(len(pieces), -1)
        for piece, row in zip(pieces, rows, strict=True):
            self.memory[piece.block] = row


class _Wishes:
    """In the scheduler's place: wants what it is told to, and knows where each key's bytes are."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.block_of: dict[BlockKey, BlockId] = {}
        self.parent_of: dict[BlockKey, BlockKey] = {}
        self.to_save: list[Piece] = []
        self.to_fetch: list[Fetch] = []
        self.fetched: dict[FetchId, asyncio.Future[Fallback | None]] = {}

    def name(self, keys: Sequence[BlockKey]) -> None:
        """Blocks 1, 2, ... are those of this path now."""
        parents = [BlockKey(b"root of " + keys[0]), *keys]
        self.parent_of = dict(zip(keys, parents, strict=False))
        self.block_of = {key: BlockId(i + 1) for i, key in enumerate(keys)}

    def use_store(self, own: StoreId | None) -> None:
        """It saves when it is told to."""

    def take_saves(self, max_bytes: int) -> list[Piece]:
        num = max_bytes // self._block_bytes
        taken, self.to_save = self.to_save[:num], self.to_save[num:]
        return taken

    def saved(self, pieces: Sequence[Piece]) -> None:
        """They stay where they are."""

    def not_saved(self, names: Sequence[BlockKey]) -> None:
        """The saver counts them."""

    def take_fetches(self) -> list[Fetch]:
        taken, self.to_fetch = self.to_fetch, []
        return taken

    def land(self, fetch_id: FetchId, keys: Sequence[BlockKey]) -> list[Piece]:
        return self.pieces(keys)

    def landed(self, fetch_id: FetchId) -> None:
        self.fetched[fetch_id].set_result(None)

    def fetch_failed(self, fetch_id: FetchId, reason: Fallback) -> None:
        self.fetched[fetch_id].set_result(reason)

    def pieces(self, keys: Sequence[BlockKey]) -> list[Piece]:
        return [Piece(key=key, parent=self.parent_of[key], block=self.block_of[key]) for key in keys]


class BytesEngine:
    """An actor. Its event loop is also what an engine's loop thread is to the link."""

    def __init__(self, engine_id: EngineId, *, num_blocks: int, block_bytes: int) -> None:
        """num_blocks: of the longest path that is saved or fetched."""
        self._engine_id = engine_id
        self._block_bytes = block_bytes
        self._device = _Device(num_blocks + 1, block_bytes)
        self._wishes = _Wishes(block_bytes)
        self._num_fetches = 0
        self._answers: asyncio.Queue[bool] = asyncio.Queue()

    async def start(self) -> str:
        """The node it is on."""
        context = ray.get_runtime_context()
        events = asyncio.get_running_loop()
        self._offers = Offers(context.current_actor, self._answered)
        self._link = StoreLink(
            self._engine_id,
            self._wishes,
            self._device,
            ObjectStore(),
            Rates(lambda: 0.0, time.monotonic),
            bytes_per_block=self._block_bytes,
            bytes_per_segment=0,
            post=lambda work: _ignore(events.call_soon_threadsafe(work)),
            offer=self._offers.begin,
            clock=time.monotonic,
        )
        node: str = context.get_node_id()
        return node

    async def use_stores(self, stores: Mapping[StoreId, Any], own: StoreId | None) -> None:
        self._offers.store = stores.get(own) if own else None
        self._link.use_stores({store_id: RemoteStore(actor) for store_id, actor in stores.items()}, own)

    async def export(self, extent_id: str, keys: Sequence[BlockKey]) -> np.ndarray:
        return self._link.staging.export(extent_id, keys)

    async def save(self, keys: Sequence[BlockKey]) -> float:
        """Seconds until the own store has the device's first blocks, under these names, or has lost them."""
        self._wishes.name(keys)
        self._wishes.to_save = self._wishes.pieces(keys)
        wanted = self._num_answered + len(keys) * self._block_bytes
        started = time.perf_counter()
        while self._num_answered < wanted:
            self._link.begin_saves()
            with suppress(TimeoutError):  # the saver may rest for a while
                await asyncio.wait_for(self._answers.get(), timeout=0.5)
        return time.perf_counter() - started

    @property
    def _num_answered(self) -> int:
        saver = self._link.saver
        return saver.saved_bytes + sum(saver.lost_bytes.values())

    async def fetch(self, store_id: StoreId, keys: Sequence[BlockKey]) -> tuple[float, Fallback | None]:
        """Seconds until the device has them, and why it has not, if so."""
        self._wishes.name(keys)
        self._num_fetches += 1
        fetch_id = FetchId(self._num_fetches)
        read = StoreRead(store_id=store_id, keys=tuple(keys), num_bytes=len(keys) * self._block_bytes)
        self._wishes.to_fetch.append(Fetch(fetch_id=fetch_id, reads=(read,)))
        ended = self._wishes.fetched[fetch_id] = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._link.begin_fetches()
        reason = await ended
        return time.perf_counter() - started, reason

    async def checksums(self, num_blocks: int) -> list[int]:
        """Of the device's first blocks."""
        return [checksum(row) for row in self._device.memory[1 : num_blocks + 1]]

    async def counts(self) -> tuple[int, dict[str, int]]:
        """Bytes saved, and bytes lost by reason."""
        return self._link.saver.saved_bytes, dict(self._link.saver.lost_bytes)

    async def staged_bytes(self) -> int:
        return self._link.staging.used_bytes

    async def memcpy(self, num_blocks: int) -> float:
        """Seconds that copying so many blocks within this process takes."""
        memory = self._device.memory[1 : num_blocks + 1]
        copy = np.empty_like(memory)
        copy[:] = 0  # so that no page is touched for the first time
        started = time.perf_counter()
        copy[:] = memory
        return time.perf_counter() - started

    async def serve_tcp(self) -> int:
        return tcp_copy.serve(self._device.memory)

    async def receive_tcp(self, port: int, num_blocks: int) -> float:
        return await asyncio.to_thread(tcp_copy.receive, port, num_blocks * self._block_bytes)

    def _answered(self, extents: Sequence[Extent], taken: bool) -> None:
        self._link.saver.offered(extents, taken=taken)
        self._answers.put_nowait(taken)


def _ignore(_: object) -> None: ...
