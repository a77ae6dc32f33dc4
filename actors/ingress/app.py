"""The HTTP application: which path leads where, who may ask, and how failures are answered."""

import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.params import Depends as Dependency
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from shoal.actors.ingress.dispatch import Dispatcher
from shoal.actors.ingress.edge import CLIENT_CLOSED_REQUEST, Edge, report_failure
from shoal.actors.ingress.endpoints import Endpoints
from shoal.actors.ingress.errors import ApiError, bad_request, invalid_api_key
from shoal.actors.ingress.gate import Gate, GateConfig
from shoal.actors.ingress.generation_config import generation_defaults
from shoal.actors.ingress.intake import Intake
from shoal.actors.ingress.metrics import Metrics
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
from shoal.actors.ingress.text import PromptError, TextCodec
from shoal.actors.messages import ModelCard

MAX_BODY_BYTES = 32 * 2**20
TIMEOUT_S = 3600.0
LIMITS = GateConfig()


def create_app(
    *,
    model: ModelCard,
    codec: TextCodec,
    dispatcher: Dispatcher,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    limits: GateConfig = LIMITS,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The front door of one model."""
    metrics = Metrics()
    gate = Gate(limits, Pace(clock))
    intake = Intake(model, codec, generation_defaults(model.checkpoint))
    endpoints = Endpoints(
        model=model,
        codec=codec,
        intake=intake,
        dispatcher=dispatcher,
        gate=gate,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        timeout_s=timeout_s,
    )
    app = FastAPI(title="Shoal", redirect_slashes=False)
    app.state.intake = intake  # to be told the fingerprint
    app.state.gate = gate  # to be closed
    app.state.sequence_slots = metrics.sequence_slots  # to be told how many engines there are
    _add_get(app.router, "/health", endpoints.health)
    _add_get(app.router, "/ready", endpoints.ready)
    _add_get(app.router, "/metrics", endpoints.metrics)
    app.include_router(_guarded_routes(endpoints, api_key))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(PromptError, _prompt_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_middleware(Edge, gate=gate, metrics=metrics, timeout_s=timeout_s)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


def _guarded_routes(endpoints: Endpoints, api_key: str | None) -> APIRouter:
    guards: list[Dependency] = [] if api_key is None else [Depends(_key_check(api_key))]
    router = APIRouter(dependencies=guards)
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
    router.add_api_route("/reset_prefix_cache", endpoints.reset_prefix_cache, methods=["POST"])
    _add_get(router, "/debug/invariants", endpoints.invariants)
    _add_get(router, "/v1/models", endpoints.models)
    _add_get(router, "/v1/models/{model_id:path}", endpoints.model)  # names may contain slashes
    return router


def _add_get(router: APIRouter, path: str, endpoint: Callable[..., Any]) -> None:
    """And HEAD, by which load balancers probe. On its own: one route's methods share an operation's name."""
    router.add_api_route(path, endpoint)
    router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    expected = f"Bearer {api_key}".encode()

    async def check(request: Request) -> None:
        # Headers are bytes on the wire, which Starlette reads as latin-1.
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, expected):
            raise invalid_api_key()

    return check


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
