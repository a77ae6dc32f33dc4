"""What a connection may do before, between and beside requests: uvicorn bounds none of it.

Every connection that says nothing useful ends by itself, so nobody can hold all of them with a few bytes.
"""

import asyncio
import http
import ssl
import sys

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.actors.ingress.errors import ApiError, head_too_large

HEAD_DEADLINE_S = 15.0
"""From the first byte, or from when a connection is opened, to the end of a request's headers. A refused body
that still comes has as long."""
KEEP_ALIVE_S = 75.0
"""Of silence between two requests. Longer than the minute after which load balancers close what is idle:
whoever closes first must not be the one who does not know of the next request."""
MAX_UNFINISHED_HEAD_BYTES = 64 * 2**10
"""A larger head is not waited for; the edge's own limit is half of it."""
LINGER_S = 2.0
"""After a refusal, while what still comes is thrown away: a connection that is closed over bytes nobody has
read is reset, and its client may never see why."""
MAX_CONNECTIONS = 4096
"""Far more than requests may be open: idle ones are most of them."""


class Connection(H11Protocol):
    """Has a timer while it owes the end of a request's head, or of a body that is not wanted any more."""

    _overdue: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "Too many connections are open; try again soon.", code="overloaded"))
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_refused:
            return
        their, our = self.conn.their_state, self.conn.our_state
        if their is h11.IDLE or (their is h11.SEND_BODY and our in (h11.DONE, h11.MUST_CLOSE)):
            self._expect()
        else:
            self._expect_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in our words. It is called while h11's error is handled, which
        knows better what is wrong."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            limit = MAX_UNFINISHED_HEAD_BYTES
            self._refuse(head_too_large(f"The request's headers are larger than {limit} bytes."))
        else:
            self._refuse(ApiError(400, f"This is not HTTP/1.1: {error or msg}.", code="invalid_http"))

    def _expect(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(HEAD_DEADLINE_S, self._give_up)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        """Who has said half is told; who has said nothing has opened a connection that it did not need."""
        self._overdue = None
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "The request's headers did not arrive in time.", code="timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """The last that is said here."""
        self._is_refused = True
        self._expect_nothing()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            if error.status == 503:
                headers.append((b"retry-after", b"1"))
            reason = http.HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():  # over TLS there is no half of an end
            self.transport.write_eof()
        self._overdue = self.loop.call_later(LINGER_S, self.transport.close)


def server_of(app: ASGIApp, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Who a request's client is says the connection, not a header: proxies are none of ours."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=round(KEEP_ALIVE_S),
        h11_max_incomplete_event_size=MAX_UNFINISHED_HEAD_BYTES,
    )
    config.load()
    config.ssl = tls
    return uvicorn.Server(config)
