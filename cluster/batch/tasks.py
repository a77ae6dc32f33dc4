"""Tasks that end together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def all_or_none() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first failure itself: whoever catches it knows what it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
