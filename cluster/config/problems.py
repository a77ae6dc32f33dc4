"""What is wrong with a configuration, one line each: where it stands, what is wrong, the way out."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Place = tuple[str | int, ...]
"""The way to a field from the top: ("models", 0, "engine_kwargs", "threads")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    where: str
    """A file and line; nothing for a flag."""
    field: str
    """In the file, or the flag; nothing for the file as a whole."""
    what: str
    """Of the field: "must be at least 1, got 0". Behind a colon if it does not continue its name."""
    is_not_yet: bool = False
    """It is said rightly, and this version cannot do it."""

    def __str__(self) -> str:
        if self.field:
            space = "" if self.what.startswith(":") else " "
            line = f"{self.where} {self.field}{space}{self.what}"
        else:
            line = f"{self.where} {self.what.removeprefix(':').lstrip()}"
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line).strip()


_SECRETS = ("api_key", "admin_key", "admin_key_hash")
"""What such a field was given is not told."""
_LONGEST = 60

_WHAT = {
    "missing": "is missing: say it too",
    "literal_error": "must be {expected}, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "int_type": "must be a whole number, got {got}",
    "bool_type": "must be true or false, got {got}",
    "string_type": "must be text, got {got}: put it in quotes",
    "string_too_short": "must not be empty: say it, or leave it out",
    "too_short": "must not be empty: say it, or leave it out",
    "string_pattern_mismatch": "may have letters, digits, '.', '_' and '-', got {got}",
    "model_type": "must have fields of its own, each as `name: value`, got {got}",
    "dict_type": "must have fields of its own, each as `name: value`, got {got}",
    "tuple_type": "must be a list, each item behind `- `, got {got}",
}
"""By pydantic's name of the error, with what it tells of it."""


class ConfigError(ValueError):
    """There is at least one problem; all are told at once, so that a person fixes them in one go."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def spelled(place: Place) -> str:
    """models[0].engine_kwargs.threads"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def parsed(field: str) -> Place:
    """The reverse of `spelled`."""
    parts = field.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts if part)


def explain(error: ErrorDetails, root: type[BaseModel]) -> tuple[Place, str]:
    """The field that an error of pydantic is about, and what is wrong with it."""
    place: Place = tuple(error["loc"])
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return place, _unknown(str(place[-1]), list(_section_at(root, place[:-1]).model_fields))
        case "value_error":
            return _of_a_field(place, str(context["error"]), root)
        case kind:
            what = _WHAT.get(kind, ": {msg}, got {got}")
            return place, what.format(msg=error["msg"], got=_got(place, error["input"]), **context)


def _of_a_field(place: Place, what: str, root: type[BaseModel]) -> tuple[Place, str]:
    """A check of several fields begins with the name of the one that it is about."""
    name, _, rest = what.partition(" ")
    if name in _section_at(root, place).model_fields:
        return (*place, name), rest
    return place, what if what.startswith("must ") else f": {what}"


def _got(place: Place, value: object) -> str:
    """What stands there, if it is short and no secret, nor may have one in it."""
    match value:
        case dict():
            return "fields"
        case list():
            return "a list"
        case _ if place and place[-1] in _SECRETS:
            return "another"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _unknown(name: str, known: Sequence[str]) -> str:
    if near := get_close_matches(name, known, n=1):
        return f"is not known: did you mean {near[0]}?"
    return f"is not known: there are {', '.join(known)}"


def _section_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """The innermost section on the way."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = _section(model.model_fields[part].annotation) or model
    return model


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section in `Section`, `Section | None`, `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section(part))), None)
