"""What a connection may do beside asking: how long and how much a request's head may be."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from shoal.actors.ingress import connections
from shoal.actors.ingress.connections import (
    HEAD_DEADLINE_S,
    KEEP_ALIVE_S,
    LINGER_S,
    MAX_UNFINISHED_HEAD_BYTES,
    Connection,
    server_of,
)
from tests.ingress.virtual_time import run_in_virtual_time

HEAD = b"GET / HTTP/1.1\r\nhost: here\r\n"
ASKED = HEAD + b"\r\n"
POSTED = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has read anything, after ten seconds if it is asked to wait."""
    if scope["path"] == "/wait":
        await asyncio.sleep(10)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Wire(asyncio.Transport):
    """The server's side of a connection, without a network."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self._protocol = protocol
        self.sent = b""
        self.closed_at: float | None = None
        self.has_ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self.closed_at is None and not self.has_ended, "nothing is said behind the end"
        self.sent += bytes(data)

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def status(self) -> int:
        return int(self.sent.split(b" ", 2)[1])

    @property
    def error(self) -> dict[str, Any]:
        head, _, body = self.sent.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        error: dict[str, Any] = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


class Server:
    def __init__(self) -> None:
        server = server_of(app)
        self._config, self._state = server.config, server.server_state

    def connect(self) -> tuple[Connection, Wire]:
        connection = Connection(self._config, self._state, {}, asyncio.get_running_loop())
        wire = Wire(connection)
        connection.connection_made(wire)
        return connection, wire


def test_who_says_nothing_is_let_go() -> None:
    async def scenario() -> Wire:
        _, wire = Server().connect()
        await asyncio.sleep(2 * HEAD_DEADLINE_S)
        return wire

    wire = run_in_virtual_time(scenario())
    assert (wire.closed_at, wire.sent) == (HEAD_DEADLINE_S, b"")


def test_headers_that_drip_in_have_a_deadline_however_lively_they_are() -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        connection.data_received(HEAD)
        for _ in range(30):
            await asyncio.sleep(1)
            connection.data_received(b"x-more: 1\r\n")
        return wire

    wire = run_in_virtual_time(scenario())
    assert wire.closed_at == HEAD_DEADLINE_S + LINGER_S
    assert (wire.status, wire.error["code"]) == (408, "timeout")


def test_between_requests_there_may_be_a_while_of_silence_and_then_the_same_deadline() -> None:
    async def scenario() -> tuple[Wire, Wire]:
        server = Server()
        (one, silent), (two, dripping) = server.connect(), server.connect()
        for connection in (one, two):
            connection.data_received(ASKED)
        await asyncio.sleep(KEEP_ALIVE_S / 2)
        two.data_received(HEAD)
        await asyncio.sleep(2 * KEEP_ALIVE_S)
        return silent, dripping

    silent, dripping = run_in_virtual_time(scenario())
    assert silent.closed_at == KEEP_ALIVE_S
    assert dripping.closed_at == KEEP_ALIVE_S / 2 + HEAD_DEADLINE_S + LINGER_S


def test_an_answer_may_take_longer_and_headers_in_pieces_are_headers() -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        for byte in b"GET /wait HTTP/1.1\r\nhost: here\r\n\r\n":
            connection.data_received(bytes([byte]))
        await asyncio.sleep(HEAD_DEADLINE_S - 1)
        connection.data_received(b"GET /wait HTTP/1.1\r\nhost: here\r\n\r\n")
        await asyncio.sleep(HEAD_DEADLINE_S - 1)
        assert wire.closed_at is None
        return wire

    assert run_in_virtual_time(scenario()).sent.count(b"HTTP/1.1 200 ") == 2


def test_a_body_that_nobody_wants_any_more_is_not_read_for_ever() -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        connection.data_received(POSTED)
        for _ in range(9):
            await asyncio.sleep(5)
            if wire.closed_at is None:
                connection.data_received(b"x")
        return wire

    wire = run_in_virtual_time(scenario())
    assert wire.status == 200
    assert wire.closed_at == 5 + HEAD_DEADLINE_S, "from the first byte behind the answer"


def test_one_that_ends_leaves_the_connection_for_the_next_request() -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        connection.data_received(POSTED)
        await asyncio.sleep(1)
        connection.data_received(b"x" * 10)
        connection.data_received(ASKED)
        await asyncio.sleep(HEAD_DEADLINE_S + 1)
        assert wire.closed_at is None
        return wire

    assert run_in_virtual_time(scenario()).sent.count(b"HTTP/1.1 200 ") == 2


def test_headers_without_an_end_are_refused_at_a_size() -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        connection.data_received(HEAD)
        while not wire.has_ended:
            connection.data_received(b"x-more: " + b"x" * 1000 + b"\r\n")
            assert len(connection.conn.trailing_data[0]) < MAX_UNFINISHED_HEAD_BYTES + 2000
        connection.data_received(b"and more")
        await asyncio.sleep(LINGER_S + 1)
        return wire

    wire = run_in_virtual_time(scenario())
    assert (wire.status, wire.error["code"], wire.closed_at) == (431, "headers_too_large", LINGER_S)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", HEAD + b"a b: c\r\n\r\n", b"\0" * 9],
)
def test_what_is_no_http_is_told_so_in_our_words(data: bytes) -> None:
    async def scenario() -> Wire:
        connection, wire = Server().connect()
        connection.data_received(data)
        await asyncio.sleep(HEAD_DEADLINE_S + LINGER_S + 1)
        assert wire.closed_at is not None
        return wire

    wire = run_in_virtual_time(scenario())
    assert (wire.status, wire.error["code"]) == (400, "invalid_http") if b"\r\n" in data else (408, "timeout")


def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)

    async def scenario() -> tuple[Wire, Wire]:
        server = Server()
        first, _ = server.connect()
        server.connect()
        _, refused = server.connect()
        await asyncio.sleep(LINGER_S + 1)
        assert refused.closed_at == LINGER_S
        first.transport.close()
        await asyncio.sleep(1)
        last, let_in = server.connect()
        last.data_received(ASKED)
        await asyncio.sleep(1)
        return refused, let_in

    refused, let_in = run_in_virtual_time(scenario())
    assert (refused.status, refused.error["code"], refused.has_ended) == (503, "overloaded", True)
    assert b"retry-after: 1" in refused.sent.lower()
    assert let_in.status == 200
