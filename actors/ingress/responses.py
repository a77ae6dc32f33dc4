"""Work that ends with its client: a connection that closes cancels what was being computed for it."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.actors.ingress.edge import report_failure
from shoal.actors.ingress.errors import ApiError, internal_error
from shoal.actors.ingress.events import MEDIA_TYPE

_T = TypeVar("_T")


class ClientGone(Exception):
    """Nobody is left to read the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The work's result. If the client goes first the work is cancelled, and has unwound when this raises."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, begun when the first item arrives: what fails before that is an HTTP status.

    An item holds any number of events, also none. Not a `StreamingResponse`: that has sent its status by
    then, and when the client goes it leaves a generator that it was not waiting for to the garbage collector.
    """

    media_type = MEDIA_TYPE

    def __init__(self, items: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._items) as items:
            first = await anext(items)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_events(send, first)
            try:
                async for item in items:
                    await _send_events(send, item)
            except Exception as error:
                report_failure(scope, error)
                failure = error if isinstance(error, ApiError) else internal_error()
                await _send_events(send, failure.event())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
