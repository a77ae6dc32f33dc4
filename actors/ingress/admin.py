"""What operators ask of this ingress, below `/admin/`."""

from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import Client


class Admin:
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def keys(self) -> Response:
        """Those that are let in here and now; empty too where everybody is."""
        clients = [] if self._guard.keys is None else self._guard.keys.clients()
        return JSONResponse({"keys": [_entry(client) for client in clients]})


def _entry(client: Client) -> dict[str, Any]:
    limits = client.allowance.limits
    return {
        "name": client.name,
        "tenant": client.tenant,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "max_concurrent": limits.max_concurrent,
        "open_requests": client.allowance.num_open,
    }
