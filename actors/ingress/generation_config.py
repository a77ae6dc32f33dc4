"""How a checkpoint wants to be sampled from where a request does not say."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """None where the checkpoint says nothing either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_defaults(checkpoint: str | Path) -> GenerationDefaults:
    """From generation_config.json, if there is one."""
    path = Path(checkpoint) / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return GenerationDefaults(**{field.name: config.get(field.name) for field in fields(GenerationDefaults)})
