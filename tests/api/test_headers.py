"""Case 59: the head of every kind of answer, as bytes. A proxy passes on what it gets."""

import socket
from urllib.parse import urlsplit

import pytest

from shoal.actors.messages import ErrorKind, RequestError
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

HOP_BY_HOP = {
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
}
SENT = {
    "host": "shoal",
    "connection": "keep-alive, x-mine",
    "keep-alive": "timeout=5",
    "te": "trailers",
    "server": "a client's",
    "date": "a client's",
    "x-mine": "for the next hop alone",
    "x-request-id": "mine",
}


def exchange(url: str, method: str, path: str, body: bytes = b"") -> tuple[str, list[tuple[str, str]], bytes]:
    """Status line, headers as they stand there, and body."""
    address = urlsplit(url)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in SENT.items())]
    lines += ["x-request-id: another", f"content-length: {len(body)}", "", ""]
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        received = b""
        while not is_complete(received, method):
            piece = connection.recv(65536)
            assert piece, received
            received += piece
    head, _, content = received.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    return status, [(name.lower(), value) for name, _, value in (f.partition(": ") for f in fields)], content


def is_complete(received: bytes, method: str) -> bool:
    head, found, content = received.partition(b"\r\n\r\n")
    if not found or method == "HEAD":
        return bool(found)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(content) >= int(lengths[0].split()[1]) if lengths else content.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (("POST", "/v1/completions", b'{"prompt": "", "unknown": 1}'), 200),
        (("POST", "/v1/completions", b'{"prompt": "", "stream": true}'), 200),
        (("POST", "/v1/completions", b'{"prompt": "refused"}'), 503),
        (("POST", "/v1/completions", b'{"prompt": "refused", "stream": true}'), 503),
        (("POST", "/v1/completions", b"{"), 400),
        (("GET", "/v1/models", b""), 200),
        (("HEAD", "/v1/models", b""), 200),
        (("GET", "/metrics", b""), 200),
        (("GET", "/nowhere", b""), 404),
    ],
)
def test_case_59_no_header_is_there_twice_nor_of_another_hop(
    url: str, dispatcher: FakeDispatcher, asked: tuple[str, str, bytes], status: int
) -> None:
    method, path, body = asked
    dispatcher.script = Script(token_ids=tokens_of("alpha"))
    full = Script(error=RequestError(kind=ErrorKind.OVERLOADED, message="full"))
    dispatcher.scripts = {(0, *tokens_of("refused")): full}
    line, fields, content = exchange(url, method, path, body)
    assert line.startswith(f"HTTP/1.1 {status} ")
    headers = dict(fields)
    assert len(headers) == len(fields), fields
    assert not HOP_BY_HOP & headers.keys()
    assert headers["x-request-id"] == "mine"
    assert "x-mine" not in headers and "a client's" not in headers.values()
    assert headers.get("connection", "close") == "close"
    assert ("content-length" in headers) != ("transfer-encoding" in headers)
    if "content-length" in headers and method != "HEAD":
        assert int(headers["content-length"]) == len(content)
    is_stream = b"stream" in body and status == 200
    assert headers.get("transfer-encoding") == ("chunked" if is_stream else None)
    assert ("retry-after" in headers) == (status == 503)
