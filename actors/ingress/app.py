"""The HTTP application: which path leads where, who may ask, and how failures are answered."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from shoal.actors.ingress.admin import Cluster, admin_routes
from shoal.actors.ingress.edge import CLIENT_CLOSED_REQUEST, Edge, report_failure
from shoal.actors.ingress.endpoints import Endpoints
from shoal.actors.ingress.errors import ApiError, bad_request
from shoal.actors.ingress.gate import Gate, GateConfig
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.metrics import Metrics
from shoal.actors.ingress.models import Models
from shoal.actors.ingress.openapi import body_of, describe
from shoal.actors.ingress.pace import Pace
from shoal.actors.ingress.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from shoal.actors.ingress.responses import ClientGone
from shoal.actors.ingress.text import PromptError

MAX_BODY_BYTES = 32 * 2**20
TIMEOUT_S = 3600.0
LIMITS = GateConfig()


def create_app(
    *,
    models: Models,
    cluster: Cluster | None = None,
    guard: Guard | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    limits: GateConfig = LIMITS,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The front door of these models, also of those that come and go later; without a guard it stands open to
    all clients."""
    guard = guard or Guard(clock)
    metrics = Metrics()
    gate = Gate(limits, Pace(clock))
    endpoints = Endpoints(
        models=models,
        gate=gate,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        timeout_s=timeout_s,
    )
    app = FastAPI(title="Shoal", redirect_slashes=False)
    app.state.gate = gate  # to be closed
    app.state.metrics = metrics  # for what happens beside requests, and to be told to Ray
    _add_get(app.router, "/health", endpoints.health)
    _add_get(app.router, "/ready", endpoints.ready)
    _add_get(app.router, "/metrics", endpoints.metrics)
    app.include_router(_client_routes(endpoints, guard))
    app.include_router(_operator_routes(endpoints, cluster, guard))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(PromptError, _prompt_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_middleware(Edge, gate=gate, metrics=metrics, timeout_s=timeout_s)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


def _client_routes(endpoints: Endpoints, guard: Guard) -> APIRouter:
    router = APIRouter(dependencies=[Depends(guard.admit)])
    for path, endpoint, asked, answered in (
        ("/v1/chat/completions", endpoints.chat_completions, ChatCompletionRequest, ChatCompletion),
        ("/v1/completions", endpoints.completions, CompletionRequest, Completion),
        ("/tokenize", endpoints.tokenize, TokenizeRequest, TokenizeResponse),
        ("/detokenize", endpoints.detokenize, DetokenizeRequest, DetokenizeResponse),
    ):
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            openapi_extra=body_of(asked),
            responses={200: {"model": answered}},
        )
    _add_get(router, "/v1/models", endpoints.models)
    _add_get(router, "/v1/models/{model_id:path}", endpoints.model)  # names may contain slashes
    return router


def _operator_routes(endpoints: Endpoints, cluster: Cluster | None, guard: Guard) -> APIRouter:
    """What is not for clients: all of `/admin/`, and two whose names are older or another server's."""
    router = APIRouter(dependencies=[Depends(guard.admit_operator)])
    router.add_api_route("/reset_prefix_cache", endpoints.reset_prefix_cache, methods=["POST"])
    _add_get(router, "/debug/invariants", endpoints.invariants)
    router.include_router(admin_routes(cluster, guard))
    return router


def _add_get(router: APIRouter, path: str, endpoint: Callable[..., Any]) -> None:
    """And HEAD, by which load balancers probe. On its own: one route's methods share an operation's name."""
    router.add_api_route(path, endpoint)
    router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    report_failure(request.scope, error)
    return error.response()


async def _prompt_error(request: Request, error: Exception) -> Response:
    return bad_request(str(error)).response()


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown route, a wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.scope['path']}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
