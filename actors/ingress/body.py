"""From the bytes of a request to a validated model. Whatever the bytes are, the worst outcome is a 4xx."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from shoal.actors.ingress.errors import ApiError, bad_request, invalid_body
from shoal.actors.ingress.protocol import GenerationRequest
from shoal.actors.ingress.unsupported import refuse_unsupported

RequestT = TypeVar("RequestT", bound=GenerationRequest)


async def read_request(request: Request, model: type[RequestT], *, max_bytes: int) -> RequestT:
    """The content type is not looked at: many clients send JSON under another name."""
    body = _json_object(await _read(request, max_bytes))
    refuse_unsupported(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _json_object(body: bytes) -> dict[str, Any]:
    """pydantic's parser bounds nesting and digits, and refuses NaN and halves of surrogate pairs."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return value
