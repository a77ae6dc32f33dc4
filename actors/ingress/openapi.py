"""The API's description of itself. Bodies are read by hand, so FastAPI has to be told of them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shoal.actors.ingress.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_SCHEMAS = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_SCHEMAS)
        description = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = description.setdefault("components", {})
        components.setdefault("schemas", {}).update(bodies["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{}, {"key": []}]  # not everything needs one, and not everywhere
        app.openapi_schema = description
    return app.openapi_schema
