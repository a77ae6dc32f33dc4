"""The certificate that the server shows, as it is now."""

import ssl
from dataclasses import dataclass
from pathlib import Path

CERTFILE_FLAG, KEYFILE_FLAG = "--ssl-certfile", "--ssl-keyfile"
_ALPN = ("http/1.1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    certfile: Path
    keyfile: Path | None = None
    """None: the certificate's file has it too."""

    @classmethod
    def of(cls, certfile: str | None, keyfile: str | None) -> "TlsFiles | None":
        if certfile is None:
            if keyfile is not None:
                raise ValueError(f"{KEYFILE_FLAG} needs {CERTFILE_FLAG}")
            return None
        return cls(certfile=Path(certfile), keyfile=None if keyfile is None else Path(keyfile))

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certfile,) if self.keyfile is None else (self.certfile, self.keyfile)

    def load(self) -> ssl.SSLContext:
        """Raises ValueError with a line that names the flag."""
        _check(self.certfile, CERTFILE_FLAG, "CERTIFICATE-----")
        if self.keyfile is None:
            _check(self.certfile, CERTFILE_FLAG, "PRIVATE KEY-----", f"; choose {KEYFILE_FLAG}")
        else:
            _check(self.keyfile, KEYFILE_FLAG, "PRIVATE KEY-----")
        context = _server_context()
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                message = f"{KEYFILE_FLAG} {self.keyfile} does not belong to {CERTFILE_FLAG} {self.certfile}"
                raise ValueError(message) from error
            which = " and ".join(map(str, self.paths))
            raise ValueError(f"{CERTFILE_FLAG} {which} cannot be used: {error.reason or error}") from error
        return context


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    return context


def _check(path: Path, flag: str, needed: str, fix: str = "") -> None:
    """OpenSSL says of a file that it is wrong, and not which one of two."""
    try:
        text = path.read_bytes().decode("latin-1")
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error
    if needed not in text:
        raise ValueError(f"{flag} {path}: there is no PEM '{needed.removesuffix('-----')}' in it{fix}")
    if needed.startswith("PRIVATE") and "ENCRYPTED" in text:
        raise ValueError(
            f"{flag} {path}: the private key is encrypted; keep one that is not, for the server alone"
        )


def _no_password() -> str:
    """Else OpenSSL would ask the terminal."""
    return ""


class ServerTls:
    """Each handshake shows the newest certificate; who has shaken hands goes on as it was."""

    def __init__(self) -> None:
        self.context = _server_context()
        """What the server listens with. It has no certificate of its own, so none can be half in it."""
        self.context.sni_callback = self._show_newest
        self._newest: ssl.SSLContext | None = None

    def show(self, context: ssl.SSLContext) -> None:
        """From the next handshake on."""
        self._newest = context

    def _show_newest(self, connection: ssl.SSLSocket | ssl.SSLObject, *_: object) -> None:
        """Called in every handshake, be a name asked for or not."""
        assert self._newest is not None
        connection.context = self._newest
