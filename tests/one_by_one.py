"""A dispatcher that answers each of a prompt's choices by itself."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.messages import EngineRequest, TokenChunk
from shoal.kvstore.block_hash import BlockKey


class OneByOne(ABC):
    def open(
        self,
        requests: Sequence[EngineRequest],
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> list[AbstractAsyncContextManager[AsyncIterator[TokenChunk]]]:
        return [self._open(request, block_keys, placed, has_begun) for request in requests]

    @abstractmethod
    def _open(
        self,
        request: EngineRequest,
        block_keys: tuple[BlockKey, ...],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
    ) -> AbstractAsyncContextManager[AsyncIterator[TokenChunk]]: ...
