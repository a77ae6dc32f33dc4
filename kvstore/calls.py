"""Calls of actors, awaited."""

import asyncio
from typing import Any


async def within(deadline_s: float, ref: Any) -> Any:
    """The result of a remote call. Raises what it raised, or TimeoutError: the call itself may go on."""
    return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout=deadline_s)
