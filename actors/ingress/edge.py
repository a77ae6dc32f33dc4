"""The outermost layer of the application: names, counts and bounds what is open, and turns what nobody caught
into a plain 500.

Bare ASGI: it looks at the first message of a response and lets the rest through untouched, so a stream is not
wrapped and its client's disconnect is not hidden.
"""

import asyncio
import logging
import re
import secrets
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.errors import (
    ApiError,
    RateLimited,
    head_too_large,
    internal_error,
    stopping,
    timed_out,
)
from shoal.actors.ingress.events import MEDIA_TYPE
from shoal.actors.ingress.gate import Gate
from shoal.actors.ingress.metrics import Metrics, Outcome
from shoal.actors.messages import ErrorKind

REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-shoal-warning"
PLACEMENT_HEADER = "x-shoal-placement"
RETRY_HEADER = "retry-after"
_SANE_ID = re.compile(r"[ -~]{1,128}")
"""Printable ASCII: it is written into headers and log lines."""
QUIET_S = 1.0
CLIENT_CLOSED_REQUEST = 499
"""Seen in logs and metrics only: whoever would read it is gone."""

OPERATORS = "/admin/"
MAX_HEAD_BYTES = 32 * 2**10
"""Of a request's target and headers; tokens of sign-on systems have taken 8 to 16 KiB."""
MAX_TARGET_BYTES = 8 * 2**10
MAX_HEADERS = 100
ANSWERS = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Where a POST asks for an answer. By path: one that is refused at the edge has come to no route."""

LAST_WORDS_S = 10.0
"""For the answer that says that a deadline was missed; who has not read it by then is as good as gone."""
PARTING_S = 0.5
"""The same when the server stops, and does not wait for long."""

logger = logging.getLogger(__name__)


class _Told:
    """What a client has been sent of its answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_stream = False
        self.is_whole = False

    def note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(MEDIA_TYPE)
        elif not message.get("more_body", False):
            self.is_whole = True


class Edge:
    """Tells those inside what the request is called and when it arrived; they may leave a warning for it, how
    its choices were placed, whose it is, and what is to be done when its answer has ended."""

    def __init__(self, app: ASGIApp, *, gate: Gate, metrics: Metrics, timeout_s: float) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._limit_s = timeout_s + LAST_WORDS_S
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
            "client": None,
            "status": None,
            "warning": None,
            "placed_by": {},
            "failed_with": None,
            "metrics": self._metrics,
            "quiet_until": self._quiet_until,
        }
        told = _Told()

        async def send_named(message: Message) -> None:
            told.note(message)
            if message["type"] == "http.response.start":
                self._name(message, state)
            await send(message)

        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                await self._let_in(scope, receive, send_named, limit, told)
        except Exception as error:
            failure = self._out_of_time() if limit.expired() else error
            report_failure(scope, failure)
            await self._last_words(failure, told, scope, receive, send_named)
        finally:
            self._metrics.in_flight.dec()
            status = CLIENT_CLOSED_REQUEST if told.status is None else told.status
            self._metrics.count_request(_endpoint(scope), status, now() - state["arrived"])
            if scope["method"] == "POST" and scope["path"] in ANSWERS:
                self._metrics.count_outcome(_outcome(told, state["failed_with"]))

    async def _let_in(
        self, scope: Scope, receive: Receive, send: Send, limit: asyncio.Timeout, told: _Told
    ) -> None:
        """Probes, scrapes and operators always are: they see that there is too much, or mend it."""
        _check_head(scope)
        with ExitStack() as until_answered:
            scope["state"] |= {"until_answered": until_answered, "carry": _carry_freely}
            if scope["method"] != "POST" or scope["path"].startswith(OPERATORS):
                await self._app(scope, receive, send)
                return
            visit = until_answered.enter_context(self._gate.visit(limit))
            scope["state"]["carry"] = partial(self._gate.carry, visit)
            await self._app(scope, receive, send)
            visit.is_answered = told.status == 200

    def _out_of_time(self) -> ApiError:
        return stopping() if self._gate.is_closed else timed_out(self._limit_s)

    def _name(self, message: Message, state: dict[str, Any]) -> None:
        state["status"] = message["status"]
        headers = MutableHeaders(scope=message)
        headers[REQUEST_ID_HEADER] = state["request_id"]
        if (client := state["client"]) is not None:
            headers.update(client.allowance.headers())
        if state["warning"] is not None:
            headers[WARNING_HEADER] = state["warning"]
        if state["placed_by"]:
            headers[PLACEMENT_HEADER] = ", ".join(map(_placement, state["placed_by"]))
        if message["status"] == 503 and RETRY_HEADER not in headers:
            headers[RETRY_HEADER] = str(self._gate.retry_after_s())

    async def _last_words(
        self, failure: Exception, told: _Told, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """What is left to say of a failure, if anybody can be told."""
        said = failure if isinstance(failure, ApiError) else internal_error()
        if told.status is None:
            await said.response()(scope, receive, send)
        elif told.is_stream and not told.is_whole and self._gate.is_closed:
            # Nobody who does not read may keep the server from stopping.
            with suppress(TimeoutError):
                async with asyncio.timeout(PARTING_S):
                    await send({"type": "http.response.body", "body": said.event(), "more_body": False})


def report_failure(scope: Scope, error: Exception) -> None:
    """A failure of the cluster in a line, one of ours with its traceback, a client's mistake not at all.

    Of a cluster that is full or gone each request could tell: one line a second does, metrics count them all.
    """
    request_id = scope["state"]["request_id"]
    if isinstance(error, RateLimited):
        scope["state"]["metrics"].count_rate_limited(error.limit)
    if not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
        error = internal_error()
    elif error.status >= 500 and not (error.status == 503 and _is_quiet(scope, str(error.code))):
        logger.warning("request %s: %s %s", request_id, error.status, error.detail or error)
    if error.status >= 500:
        scope["state"]["failed_with"] = error.code
        scope["state"]["metrics"].count_error(str(error.code))


def _carry_freely(num_bytes: int) -> None:
    """A body that is not counted at the gate."""


def _check_head(scope: Scope) -> None:
    """Raises ApiError. One that is much larger has not come so far: the connection has refused it."""
    target = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if target > MAX_TARGET_BYTES:
        message = f"The request's target is longer than {MAX_TARGET_BYTES} bytes."
        raise ApiError(414, message, code="uri_too_long")
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise head_too_large(f"The request has more than {MAX_HEADERS} headers.")
    if target + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise head_too_large(f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")


def _is_quiet(scope: Scope, code: str) -> bool:
    """Whether this was said less than a second ago; if not, it is said now."""
    now, quiet_until = asyncio.get_running_loop().time(), scope["state"]["quiet_until"]
    if now < quiet_until.get(code, 0.0):
        return True
    quiet_until[code] = now + QUIET_S
    return False


def _outcome(told: _Told, failed_with: str | None) -> Outcome:
    if failed_with is not None:
        return Outcome.OVERLOADED if failed_with == ErrorKind.OVERLOADED else Outcome.FAILED
    if told.status in (None, CLIENT_CLOSED_REQUEST) or not told.is_whole:
        return Outcome.ABANDONED
    return Outcome.COMPLETED if told.status < 400 else Outcome.REFUSED


def _endpoint(scope: Scope) -> str:
    """The route, not the path that was asked for: there are only so many."""
    return str(getattr(scope.get("route"), "path", "none"))


def _request_id(scope: Scope) -> str:
    wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return wanted if _SANE_ID.fullmatch(wanted) else f"req-{secrets.token_hex(16)}"


def _placement(by: PlacedBy) -> str:
    return f"blind; reason={by}" if by.is_blind else by
