"""HTTPS with certificates that are renewed while it is spoken."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from fastapi import FastAPI

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.door_files import DoorFiles
from shoal.actors.ingress.metrics import Metrics
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import HttpConfig, ModelCard
from tests.api.fakes import FakeDispatcher, Script, serving_one
from tests.api.server import serving
from tests.ingress.checkpoints import tokens_of
from tests.ingress.clock import Clock

Authority = trustme.CA


@pytest.fixture(scope="module")
def authority() -> Authority:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture(scope="module")
def another() -> Authority:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def app(card: ModelCard, codec: TextCodec) -> FastAPI:
    dispatcher = FakeDispatcher()
    dispatcher.script = Script(token_ids=tokens_of("alpha"))
    return create_app(models=serving_one(card, codec, dispatcher))


class Certificate:
    """Its files, which a test may write anew."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self.write(authority)

    def write(self, authority: Authority) -> None:
        self.write_chain(authority.issue_cert("127.0.0.1"))

    def write_chain(self, leaf: trustme.LeafCert, *, with_key: bool = True) -> None:
        for number, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(self.certfile), append=number > 0)
        if with_key:
            leaf.private_key_pem.write_to_path(str(self.keyfile))

    @property
    def config(self) -> HttpConfig:
        return HttpConfig(ssl_certfile=str(self.certfile), ssl_keyfile=str(self.keyfile))

    def files(self) -> DoorFiles:
        return DoorFiles(self.config, Clock())


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def context_of(files: DoorFiles) -> ssl.SSLContext:
    assert files.tls is not None
    return files.tls.context


def handshake(url: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    address = urlsplit(url)
    raw = socket.create_connection((address.hostname, address.port), timeout=10)
    try:
        return context.wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


def test_answers_come_over_tls_whole_and_as_streams(
    app: FastAPI, tmp_path: Path, authority: Authority, another: Authority
) -> None:
    body = {"prompt": "the fox", "stream": True}
    with serving(app, context_of(Certificate(tmp_path, authority).files())) as url:
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=trusting(authority), timeout=10) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", verify=trusting(another))
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http"))
        with closing(handshake(url, trusting(authority))) as connection:
            assert connection.version() in ("TLSv1.2", "TLSv1.3")
            assert connection.selected_alpn_protocol() is None, "none was offered"


def test_what_is_no_http_is_told_so_over_tls_too(app: FastAPI, tmp_path: Path, authority: Authority) -> None:
    with (
        serving(app, context_of(Certificate(tmp_path, authority).files())) as url,
        closing(handshake(url, trusting(authority))) as connection,
    ):
        connection.sendall(b"hello\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_what_is_too_old_is_not_spoken(app: FastAPI, tmp_path: Path, authority: Authority) -> None:
    context = trusting(authority)
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        serving(app, context_of(Certificate(tmp_path, authority).files())) as url,
        pytest.raises(ssl.SSLError),
    ):
        handshake(url, context)


def test_a_renewed_certificate_is_shown_from_then_on_and_open_connections_stay(
    app: FastAPI, tmp_path: Path, authority: Authority, another: Authority
) -> None:
    certificate, metrics = Certificate(tmp_path, authority), Metrics()
    files = certificate.files()
    with (
        serving(app, context_of(files)) as url,
        httpx.Client(base_url=url, verify=trusting(authority), timeout=10) as before,
    ):
        assert before.get("/health").status_code == 200
        certificate.write(another)
        asyncio.run(files.look_again(metrics))
        assert httpx.get(f"{url}/health", verify=trusting(another)).status_code == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(url, trusting(authority))
        assert before.get("/health").status_code == 200, "on the connection that it has"


def test_half_a_renewal_changes_nothing_until_the_other_half_is_there(
    app: FastAPI, tmp_path: Path, authority: Authority, another: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, metrics = Certificate(tmp_path, authority), Metrics()
    files, renewed = certificate.files(), another.issue_cert("127.0.0.1")
    with serving(app, context_of(files)) as url:
        certificate.write_chain(renewed, with_key=False)
        asyncio.run(files.look_again(metrics))
        assert "does not belong to --ssl-certfile" in caplog.records[-1].message
        handshake(url, trusting(authority)).close()
        certificate.write_chain(renewed)
        asyncio.run(files.look_again(metrics))
        handshake(url, trusting(another)).close()


def test_one_file_may_have_both(app: FastAPI, tmp_path: Path, authority: Authority) -> None:
    path = tmp_path / "both.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    files = DoorFiles(HttpConfig(ssl_certfile=str(path)), Clock())
    with serving(app, context_of(files)) as url:
        handshake(url, trusting(authority)).close()


Spoil = Callable[[Certificate], object]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.certfile.unlink(), r"^--ssl-certfile \S*tls.crt: No such file or directory$"),
        (lambda c: c.keyfile.unlink(), r"^--ssl-keyfile \S*tls.key: No such file or directory$"),
        (lambda c: c.certfile.write_text("no"), r"^--ssl-certfile \S*tls.crt: there is no PEM 'CERTIFICATE'"),
        (lambda c: c.keyfile.write_text("no"), r"^--ssl-keyfile \S*tls.key: there is no PEM 'PRIVATE KEY'"),
        (lambda c: os.replace(c.certfile, c.keyfile), r"^--ssl-certfile \S*tls.crt: No such file"),
        (lambda c: spoilt(c.certfile), r"^--ssl-certfile \S*tls.crt and \S*tls.key cannot be used: "),
        (lambda c: spoilt(c.keyfile), r"^--ssl-certfile \S*tls.crt and \S*tls.key cannot be used: "),
        (
            lambda c: c.keyfile.write_bytes(trustme.CA().issue_cert("a").private_key_pem.bytes()),
            r"^--ssl-keyfile \S*tls.key does not belong to --ssl-certfile \S*tls.crt$",
        ),
        (
            lambda c: c.keyfile.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n"),
            r"^--ssl-keyfile \S*tls.key: the private key is encrypted",
        ),
    ],
)
def test_files_that_are_wrong_are_one_line_that_names_the_flag(
    tmp_path: Path, authority: Authority, spoil: Spoil, message: str
) -> None:
    certificate = Certificate(tmp_path, authority)
    spoil(certificate)
    with pytest.raises(ValueError, match=message) as raised:
        certificate.files()
    assert "\n" not in str(raised.value)


def spoilt(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "AAAA" + lines[1][4:], *lines[2:]]) + "\n")


def test_a_key_without_a_certificate_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ssl-keyfile needs --ssl-certfile"):
        DoorFiles(HttpConfig(ssl_keyfile=str(tmp_path)), Clock())
    path = tmp_path / "tls.crt"
    path.write_text("-----BEGIN CERTIFICATE-----\n")
    with pytest.raises(ValueError, match=r"there is no PEM 'PRIVATE KEY' in it; choose --ssl-keyfile"):
        DoorFiles(HttpConfig(ssl_certfile=str(path)), Clock())
