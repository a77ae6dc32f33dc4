"""The outermost layer of the application: names, counts and bounds what is open, and turns what nobody caught
into a plain 500.

Bare ASGI: it looks at the first message of a response and lets the rest through untouched, so a stream is not
wrapped and its client's disconnect is not hidden.
"""

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.errors import ApiError, internal_error, overloaded, timed_out
from shoal.actors.ingress.metrics import Metrics

REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-shoal-warning"
PLACEMENT_HEADER = "x-shoal-placement"
_SANE_ID = re.compile(r"[ -~]{1,128}")
"""Printable ASCII: it is written into headers and log lines."""
QUIET_S = 1.0
CLIENT_CLOSED_REQUEST = 499
"""Seen in logs and metrics only: whoever would read it is gone."""

LAST_WORDS_S = 10.0
"""For the answer that says that a deadline was missed; who has not read it by then is as good as gone."""

logger = logging.getLogger(__name__)


class Edge:
    """Tells those inside what the request is called and when it arrived; they may leave a warning for it, and
    how its choices were placed."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_open_requests: int, timeout_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._max_open_requests = max_open_requests
        self._limit_s = timeout_s + LAST_WORDS_S
        self._num_open = 0
        self._quiet_until: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = asyncio.get_running_loop().time
        state = scope.setdefault("state", {})
        state |= {
            "request_id": _request_id(scope),
            "arrived": now(),
            "warning": None,
            "placed_by": {},
            "metrics": self._metrics,
            "quiet_until": self._quiet_until,
        }
        status = CLIENT_CLOSED_REQUEST

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = state["request_id"]
                if state["warning"] is not None:
                    headers[WARNING_HEADER] = state["warning"]
                if state["placed_by"]:
                    headers[PLACEMENT_HEADER] = ", ".join(map(_placement, state["placed_by"]))
            await send(message)

        self._num_open += 1
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                await self._bounded(scope, receive, send_named)
        except Exception as error:
            failure = timed_out(self._limit_s) if limit.expired() else error
            report_failure(scope, failure)
            if status == CLIENT_CLOSED_REQUEST:
                answer = failure if isinstance(failure, ApiError) else internal_error()
                await answer.response()(scope, receive, send_named)
        finally:
            self._num_open -= 1
            self._metrics.in_flight.dec()
            self._metrics.count_request(_endpoint(scope), status, now() - state["arrived"])

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Probes and scrapes are let in at any time: they say that there is too much to do."""
        if self._num_open > self._max_open_requests and scope["method"] == "POST":
            error = overloaded()
            report_failure(scope, error)
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def report_failure(scope: Scope, error: Exception) -> None:
    """A failure of the cluster in a line, one of ours with its traceback, a client's mistake not at all.

    Of a cluster that is full or gone each request could tell: one line a second does, metrics count them all.
    """
    request_id = scope["state"]["request_id"]
    if not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
        error = internal_error()
    elif error.status >= 500 and not (error.status == 503 and _is_quiet(scope, str(error.code))):
        logger.warning("request %s: %s %s", request_id, error.status, error.detail or error)
    if error.status >= 500:
        scope["state"]["metrics"].count_error(str(error.code))


def _is_quiet(scope: Scope, code: str) -> bool:
    """Whether this was said less than a second ago; if not, it is said now."""
    now, quiet_until = asyncio.get_running_loop().time(), scope["state"]["quiet_until"]
    if now < quiet_until.get(code, 0.0):
        return True
    quiet_until[code] = now + QUIET_S
    return False


def _placement(by: PlacedBy) -> str:
    return f"blind; reason={by}" if by.is_blind else by


def _endpoint(scope: Scope) -> str:
    """The route, not the path that was asked for: there are only so many."""
    return str(getattr(scope.get("route"), "path", "none"))


def _request_id(scope: Scope) -> str:
    wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return wanted if _SANE_ID.fullmatch(wanted) else f"req-{secrets.token_hex(16)}"
