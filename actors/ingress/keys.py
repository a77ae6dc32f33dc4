"""API keys: what their file says of them, and whose a key that was shown is.

A key has 256 random bits: nobody finds it by trying, so one fast hash keeps it as well as a slow one would.
Those are for passwords, of which there are few enough to try. A file of hashes that leaks lets nobody in.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.actors.ingress.limits import Allowance, Limits

KEY_PREFIX = "sk-shoal-"
KEY_BYTES = 32
DEFAULT_TENANT = "default"
"""Whose everything is that no key of a file asks for."""
FLAG = "--api-keys"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
HASH = r"^sha256:[0-9a-f]{64}$"
KeyHash = Annotated[str, Field(pattern=HASH)]
AtLeastOne = Annotated[int, Field(ge=1, le=2**53)]


class KeyEntry(BaseModel):
    """One key, as it stands in the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Name
    """For people: in messages and lists."""
    hash: KeyHash
    tenant: Name | None = None
    """Keys of one tenant share cached prefixes. Without it a key is a tenant of its own, called as it is."""
    requests_per_minute: AtLeastOne | None = None
    tokens_per_minute: AtLeastOne | None = None
    max_concurrent: AtLeastOne | None = None

    @property
    def whose(self) -> str:
        return self.tenant or self.name

    @property
    def limits(self) -> Limits:
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
        )


class _KeyFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keys: list[KeyEntry]


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str | bytes) -> str:
    """As it stands in files."""
    return f"sha256:{sha256(key.encode() if isinstance(key, str) else key).hexdigest()}"


def is_hash(text: str) -> bool:
    return re.fullmatch(HASH, text) is not None


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Raises ValueError with a line that names the file and, if it is one entry's, the field."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{FLAG} {path}: {reason}") from error
    try:
        return parse_keys(text)
    except ValueError as error:
        raise ValueError(f"{FLAG} {path}: {error}") from error


def parse_keys(text: str) -> tuple[KeyEntry, ...]:
    """Of YAML or JSON. Raises ValueError in one line.

    An empty list is a list, which lets nobody in; an empty file may be one that is being written.
    """
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ValueError("it must be a mapping with a list `keys`")
    with in_one_line():
        keys = _KeyFile.model_validate(document).keys
    for field in ("name", "hash"):
        values = [getattr(key, field) for key in keys]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"two keys have the {field} {twice}")
    return tuple(keys)


@contextmanager
def in_one_line() -> Iterator[None]:
    """pydantic's first complaint alone, with the field."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise ValueError(f"{where.removeprefix('.')}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """Who asks, and what of it is left to him."""

    name: str
    tenant: str
    allowance: Allowance


class KeyRing:
    """Everybody who may come in, by the hash of the key.

    What the time of a lookup tells is about the hash of what was shown, which nobody can steer: it does not
    tell how much of a key was right. Lives on one event loop.
    """

    def __init__(self, clock: Callable[[], float], *, always: Iterable[KeyEntry] = ()) -> None:
        """`always` are those of the command line, which no file takes away."""
        self._clock = clock
        self._always = tuple(always)
        self._clients: dict[str, Client] = {}
        self.replace(())

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, key: bytes) -> Client | None:
        return self._clients.get(hash_of(key))

    def replace(self, entries: Iterable[KeyEntry]) -> None:
        """These hold from now on. A key that stays keeps what it has used, also under other limits; who is
        inside with one that goes may finish."""
        clients: dict[str, Client] = {}
        for entry in (*self._always, *entries):
            before = self._clients.get(entry.hash)
            allowance = Allowance(entry.limits, self._clock) if before is None else before.allowance
            allowance.change(entry.limits)
            clients[entry.hash] = Client(entry.name, entry.whose, allowance)
        self._clients = clients

    def clients(self) -> list[Client]:
        return list(self._clients.values())


def tenant_salt(tenant: str, salt: str) -> str:
    """Both as one salt of block keys. With the tenant's length in front no pair is written like another, so a
    client cannot choose a salt that makes it another tenant."""
    return f"{len(tenant)}:{tenant}{salt}"
