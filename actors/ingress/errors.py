"""Everything that can go wrong at the door, in the one shape that OpenAI clients understand."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import to_json

from shoal.actors.ingress.events import event
from shoal.actors.messages import ErrorKind, RequestError

RETRY_SOON: Mapping[str, str] = MappingProxyType({"retry-after": "1"})
TIMED_OUT = "timeout"
STOPPING = "stopping"
_TYPES = {500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}


class ApiError(Exception):
    """An answer that is an error: what the client is told, and what only the log is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        detail: str = "",
    ) -> None:
        """`kind` is the error's type, where the status does not say it."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers
        self.detail = detail
        """For the log: it may name processes and addresses, which are no client's business."""
        self.body = {
            "error": {
                "message": message,
                "type": kind or _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)

    def event(self) -> bytes:
        """The same inside of a stream that has begun."""
        return event(to_json(self.body))


Limit = Literal["requests", "tokens", "concurrent"]


class RateLimited(ApiError):
    """More than its key may ask for; OpenAI's words, so that its clients wait and try again."""

    def __init__(self, limit: Limit, allowed: str, *, wait_s: float, asked: int | None = None) -> None:
        self.limit = limit
        retry_after = max(1, math.ceil(wait_s))
        asks = "" if asked is None else f", and this request asks for {asked}"
        super().__init__(
            429,
            f"Rate limit reached: this key has {allowed}{asks}. Try again in {retry_after} s.",
            code="rate_limit_exceeded",
            kind="tokens" if limit == "tokens" else "requests",
            headers={"retry-after": str(retry_after)},
        )


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def internal_error(detail: str = "") -> ApiError:
    return ApiError(500, "The server failed to process this request.", code="internal", detail=detail)


def overloaded() -> ApiError:
    """When to come again is measured, and said at the edge."""
    return ApiError(503, "Too many requests are open; try again soon.", code=ErrorKind.OVERLOADED)


def stopping() -> ApiError:
    message = "The server is stopping and could not complete this request; send it again, elsewhere or soon."
    return ApiError(503, message, code=STOPPING, headers=RETRY_SOON)


def timed_out(timeout_s: float) -> ApiError:
    return ApiError(504, f"The answer was not complete within {timeout_s:g} seconds.", code=TIMED_OUT)


def unknown_token(token_id: int, num_token_ids: int, *, param: str) -> ApiError:
    message = f"{param}: the token id {token_id} is not in the vocabulary, which ends at {num_token_ids - 1}."
    return bad_request(message, param=param)


def unknown_model(model: str) -> ApiError:
    return ApiError(404, f"The model {model[:128]!r} does not exist.", param="model", code="model_not_found")


def invalid_api_key(kind: Literal["API", "admin"] = "API") -> ApiError:
    message = f"Missing or incorrect {kind} key: send it as 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def admin_key_needed() -> ApiError:
    message = (
        "This endpoint is for operators: start the server with --admin-key, and send that key as"
        " 'Authorization: Bearer KEY'. Without one it answers this machine alone, where clients need no key."
    )
    return ApiError(403, message, code="admin_key_needed")


def head_too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def not_ready() -> ApiError:
    message = "No engine can take a request now; try again soon."
    return ApiError(503, message, code=ErrorKind.NO_ENGINE, headers=RETRY_SOON)


def model_not_ready(model: str) -> ApiError:
    message = f"The model {model[:128]!r} cannot be served here yet; try again soon."
    return ApiError(503, message, code="model_not_ready", headers=RETRY_SOON)


def no_answer(processes: Sequence[str]) -> ApiError:
    """For operators: clients are told no names."""
    message = f"No answer from {', '.join(processes)}; try again soon."
    return ApiError(503, message, code="no_answer", headers=RETRY_SOON)


def context_length_exceeded(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, param: str
) -> ApiError:
    limit = f"This model's maximum context length is {max_model_len} tokens"
    if max_tokens is None:
        message = f"{limit}, but the prompt has {num_prompt_tokens}, which leaves no room for an answer."
    else:
        message = (
            f"{limit}, but {num_prompt_tokens + max_tokens} were requested:"
            f" {num_prompt_tokens} in the prompt and {max_tokens} for the answer."
        )
    return bad_request(message, param=param, code="context_length_exceeded")


def prompt_too_long(num_bytes: int, fewest_tokens: int, max_model_len: int, *, param: str) -> ApiError:
    message = (
        f"This model's maximum context length is {max_model_len} tokens,"
        f" but a prompt of {num_bytes} bytes counts as at least {fewest_tokens}."
    )
    return bad_request(message, param=param, code="context_length_exceeded")


def engine_error(error: RequestError) -> ApiError:
    """Of the engine's own words those about the request are for the client; the rest go to the log."""
    match error.kind:
        case ErrorKind.INVALID | ErrorKind.NEVER_FITS:
            return bad_request(error.message, code=error.kind)
        case ErrorKind.INTERNAL:
            return internal_error(detail=error.message)
        case ErrorKind.NO_ENGINE:
            message = "No engine can take this request now; try again soon."
        case ErrorKind.OVERLOADED:
            message = "Too many requests wait for an engine; try again soon."
            return ApiError(503, message, code=error.kind, detail=error.message)
        case ErrorKind.ENGINE_LOST:
            message = "The engine that served this request is gone; it may be sent again."
    return ApiError(503, message, code=error.kind, headers=RETRY_SOON, detail=error.message)


def invalid_body(error: ValidationError) -> ApiError:
    """The first complaint, with the field in the notation of OpenAI's errors: messages[0].content."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = param.removeprefix(".")
    return bad_request(f"{param}: {first['msg']}." if param else f"{first['msg']}.", param=param or None)
