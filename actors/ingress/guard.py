"""Who a request comes from, and whether he may ask for this."""

import hmac
import ipaddress
from collections.abc import Callable

from fastapi import Request

from shoal.actors.ingress.errors import admin_key_needed, invalid_api_key
from shoal.actors.ingress.keys import DEFAULT_TENANT, Client, KeyRing, hash_of, is_hash
from shoal.actors.ingress.limits import Allowance, Limits

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SENT_ON = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers of those who pass on what another has sent."""


class Guard:
    """Who may ask for what: clients by their keys, operators by the admin key.

    Without an admin key operators are those on this machine, and nobody where clients need keys: there others
    than the operator come from loopback too, such as neighbours in a pod, and all the clients of a mesh's
    proxy.
    """

    def __init__(
        self, clock: Callable[[], float], *, keys: KeyRing | None = None, admin_key_hash: str | None = None
    ) -> None:
        """Without `keys` everybody is a client, and all are one tenant. ValueError for what is no hash."""
        if admin_key_hash is not None and not is_hash(admin_key_hash):
            raise ValueError("admin_key_hash must be a hash as `shoal keys new` shows it, not the key")
        self.keys = keys
        self._admin_key_hash = admin_key_hash
        self._anybody = Client("anybody", DEFAULT_TENANT, Allowance(Limits(), clock))

    async def admit(self, request: Request) -> None:
        """A client, as `request.state.client`; what it posts counts until its answer has ended. ApiError."""
        client = self._client(request)
        request.state.client = client
        if request.method == "POST":
            request.state.until_answered.enter_context(client.allowance.request())

    def _client(self, request: Request) -> Client:
        if self.keys is None:
            return self._anybody
        key = _bearer(request)
        client = self.keys.find(key) if key else None
        if client is None:
            raise invalid_api_key()
        return client

    async def admit_operator(self, request: Request) -> None:
        """Raises ApiError for everybody else."""
        if self._admin_key_hash is not None:
            key = _bearer(request)
            if not (key and hmac.compare_digest(hash_of(key), self._admin_key_hash)):
                raise invalid_api_key("admin")
        elif self.keys is not None or not _is_on_this_machine(request):
            raise admin_key_needed()


def _bearer(request: Request) -> bytes:
    """Nothing if there is none. Headers are bytes on the wire, which Starlette reads as latin-1."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""


def _is_on_this_machine(request: Request) -> bool:
    """And speaks for itself: not for a page in a browser here, which may post anywhere and whose host's name
    may lead here, nor for the client of a proxy."""
    if request.client is None or not _is_loopback(request.client.host):
        return False
    is_own_word = "origin" not in request.headers and not any(name in request.headers for name in SENT_ON)
    return is_own_word and _host_name(request) in LOOPBACK_NAMES


def _host_name(request: Request) -> str:
    host = request.headers.get("host", "").lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
