"""The outermost layer of the application: names each request, and turns what nobody caught into a plain 500.

Bare ASGI: it looks at the first message of a response and lets the rest through untouched, so a stream is not
wrapped and its client's disconnect is not hidden.
"""

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.actors.ingress.errors import ApiError, internal_error

REQUEST_ID_HEADER = "x-request-id"
_SANE_ID = re.compile(r"[ -~]{1,128}")
"""Printable ASCII: it is written into headers and log lines."""

logger = logging.getLogger(__name__)


class Edge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = _request_id(scope)
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            log_failure(scope, error)
            if not started:
                await internal_error().response()(scope, receive, send_named)


def log_failure(scope: Scope, error: Exception) -> None:
    """A failure of the cluster in a line, one of ours with its traceback, a client's mistake not at all."""
    request_id = scope["state"]["request_id"]
    if not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
    elif error.status >= 500:
        logger.warning("request %s: %s %s", request_id, error.status, error.detail or error)


def _request_id(scope: Scope) -> str:
    wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return wanted if _SANE_ID.fullmatch(wanted) else f"req-{secrets.token_hex(16)}"
