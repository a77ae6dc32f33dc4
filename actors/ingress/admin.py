"""The operator's door: what the cluster does, and what it is to do. It asks the supervisor alone."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shoal.actors.ingress.body import read_json
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import Client

MAX_BODY_BYTES = 64 << 10


class Cluster(Protocol):
    """What an operator asks of it. Each raises ApiError."""

    async def status(self) -> Mapping[str, Any]: ...

    async def change(self, method: str, *args: Any) -> None:
        """Call the supervisor's `scale`, `drain_node`, `undrain_node`, `drain_engine` or `stop`."""
        ...


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ScaleRequest(_Body):
    engines: Annotated[int, Field(ge=0)]
    """How many are too many the cluster says."""
    model: str | None = None
    """The only one, if none is named."""


class DrainRequest(_Body):
    node: str | None = None
    """A node's id: nothing is started there any more, and what runs there finishes and goes."""
    engine: str | None = None
    """An engine's id: it finishes, goes, and another comes in its place."""
    undo: bool = False
    """Of a node: it may be used again."""

    @model_validator(mode="after")
    def _names_one(self) -> "DrainRequest":
        if (self.node is None) == (self.engine is None):
            raise ValueError("either node or engine must be given")
        if self.undo and self.engine is not None:
            raise ValueError("an engine that drains cannot be called back")
        return self


def admin_routes(cluster: Cluster | None, guard: Guard) -> APIRouter:
    """What is asked of this ingress, and of the cluster if there is one behind it."""
    router = APIRouter(prefix="/admin")

    @router.get("/keys")
    async def keys() -> Response:
        """Those that are let in here and now; empty too where everybody is."""
        clients = [] if guard.keys is None else guard.keys.clients()
        return JSONResponse({"keys": [_entry(client) for client in clients]})

    if cluster is not None:
        _add_cluster(router, cluster)
    return router


def _add_cluster(router: APIRouter, cluster: Cluster) -> None:

    @router.get("/status")
    async def status() -> Response:
        return JSONResponse(await cluster.status())

    @router.post("/scale")
    async def scale(request: Request) -> Response:
        body = await read_json(request, ScaleRequest, max_bytes=MAX_BODY_BYTES)
        await cluster.change("scale", body.model, body.engines)
        return JSONResponse(await cluster.status())

    @router.post("/drain")
    async def drain(request: Request) -> Response:
        body = await read_json(request, DrainRequest, max_bytes=MAX_BODY_BYTES)
        if body.engine is not None:
            await cluster.change("drain_engine", body.engine)
        else:
            await cluster.change("undrain_node" if body.undo else "drain_node", body.node)
        return JSONResponse(await cluster.status())

    @router.post("/stop")
    async def stop() -> Response:
        """The answer comes before the end does."""
        await cluster.change("stop")
        return JSONResponse({}, 202)


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
