"""From the bytes of a request to a validated model. Whatever the bytes are, the worst outcome is a 4xx."""

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from shoal.actors.ingress.errors import TIMED_OUT, ApiError, bad_request, invalid_body
from shoal.actors.ingress.protocol import MAX_SALT_CHARS, ModelRequest
from shoal.actors.ingress.unsupported import refuse_unsupported, unknown_fields

BODY_DEADLINE_S = 60.0
SALT_HEADER = "x-cache-salt"

RequestT = TypeVar("RequestT", bound=ModelRequest)
_Strict = TypeVar("_Strict", bound=BaseModel)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """What comes is counted at the gate (`carry`)."""
    too_large = ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdecimal() else 0
    if expected > max_bytes:
        raise too_large
    request.state.carry(expected)  # now, and not when most of it has come
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
                if len(body) > expected:
                    request.state.carry(len(body) - expected)
                    expected = len(body)
    except TimeoutError:
        raise ApiError(408, "The request body did not arrive in time.", code=TIMED_OUT) from None
    return bytes(body)


async def read_json(request: Request, model: type[_Strict], *, max_bytes: int) -> _Strict:
    """A short one of the operator's, where every field must be known."""
    data = await read_body(request, max_bytes=max_bytes)
    try:
        return model.model_validate(_json_object(data))
    except ValidationError as error:
        raise invalid_body(error) from None


def cache_salt_of(request: Request) -> str | None:
    """The salt that a header says: that of a gateway, which need not rewrite bodies. It overrules the body's.

    What is no salt is refused: without it the request would share what it is not to share.
    """
    given = request.headers.getlist(SALT_HEADER)
    if not given:
        return None
    try:
        salt = given[0].encode("latin-1").decode()
    except UnicodeDecodeError:
        salt = ""
    if len(given) > 1 or not 1 <= len(salt) <= MAX_SALT_CHARS:
        message = f"{SALT_HEADER}: it must be there once, with 1 to {MAX_SALT_CHARS} characters of UTF-8."
        raise bad_request(message, param=SALT_HEADER)
    return salt


def parse_body(data: bytes, model: type[RequestT]) -> tuple[RequestT, tuple[str, ...]]:
    """The request, and the names of the fields in it that are ignored because nobody knows them.

    The content type is not looked at: many clients send JSON under another name.
    """
    body = _json_object(data)
    refuse_unsupported(body, model.model_fields)
    try:
        return model.model_validate(body), unknown_fields(body, model.model_fields)
    except ValidationError as error:
        raise invalid_body(error) from None


def _json_object(data: bytes) -> dict[str, Any]:
    """pydantic's parser bounds nesting and digits, and refuses NaN and halves of surrogate pairs."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return value
