"""What the YAML can say and this version cannot do. It is refused, never ignored.

Whoever adds the feature deletes its line here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shoal.cluster.config.models import ClusterConfig
from shoal.cluster.config.problems import Place, parsed


@dataclass(frozen=True, slots=True)
class NotYet:
    field: str
    """* is each item of a list. It is refused where it is not as in a file that says nothing."""
    instead: str


NOT_YET = (NotYet("models.*.accelerator_type", "leave it out: engines compute on CPUs"),)


def find_not_yet(config: ClusterConfig) -> Iterator[tuple[Place, str]]:
    """Each field that asks for what cannot be had, and what to do instead."""
    for entry in NOT_YET:
        for place, value, default in _values(config, parsed(entry.field)):
            if value != default:
                yield place, f"is not served by this version: {entry.instead}"


def _values(config: ClusterConfig, pattern: Place) -> Iterator[tuple[Place, Any, Any]]:
    """Every place that the pattern means, with its value and its default."""
    found: list[tuple[Place, Any, Any]] = [((), config, None)]
    for part in pattern:
        found = [step for place, value, _ in found for step in _steps(place, value, part)]
    yield from found


def _steps(place: Place, value: Any, part: str | int) -> Iterator[tuple[Place, Any, Any]]:
    if isinstance(value, BaseModel):
        assert isinstance(part, str)
        default = type(value).model_fields[part].get_default(call_default_factory=True)
        yield (*place, part), getattr(value, part), default
    else:
        for index, item in enumerate(value):
            if part in ("*", index):
                yield (*place, index), item, None
