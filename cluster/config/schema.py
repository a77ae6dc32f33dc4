"""The JSON schema of the YAML, for editors. What it accepts is a little more than what is right."""

import json

from pydantic.json_schema import GenerateJsonSchema

from shoal.cluster.config.models import ClusterConfig


class _Untitled(GenerateJsonSchema):
    """A field's title would be its name again."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema_text() -> str:
    schema = ClusterConfig.model_json_schema(schema_generator=_Untitled)
    schema = {"$schema": _Untitled.schema_dialect, "title": "A cluster of Shoal"} | schema
    return json.dumps(schema, indent=2) + "\n"
