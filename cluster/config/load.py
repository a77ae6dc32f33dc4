"""From a file and the flags beside it to what this version can serve, or all that is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.cluster.config.document import Document, NotYAML, read_document
from shoal.cluster.config.flags import FLAG_OF, MODEL
from shoal.cluster.config.models import ClusterConfig
from shoal.cluster.config.not_yet import find_not_yet
from shoal.cluster.config.problems import ConfigError, Place, Problem, explain, parsed, spelled
from shoal.cluster.package import hint_in_a_package

_MODELS = parsed(MODEL)[0]


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """What the file says (none: nothing), and over it what flags say: fields, spelled as in
    "models[0].engine_kwargs.threads", and their values. Raises ConfigError with every problem."""
    document = Document(data={}, lines={}) if path is None else _read(path)
    said = _Said(path=path, document=document, by_flag=_places(overrides or {}))
    try:
        config = ClusterConfig.model_validate(said.together())
    except ValidationError as error:
        found = [explain(details, ClusterConfig) for details in error.errors(include_url=False)]
        found.sort(key=lambda problem: said.line(problem[0]))
        raise ConfigError(*(said.problem(place, what) for place, what in found)) from None
    refused = [said.problem(place, what, is_not_yet=True) for place, what in find_not_yet(config)]
    if refused:
        raise ConfigError(*refused)
    return config


def _read(path: Path) -> Document:
    try:
        return read_document(path.read_text(encoding="utf-8"))
    except NotYAML as error:
        raise ConfigError(Problem(where=f"{path}:{error.line}:", field="", what=str(error))) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(where=f"{path}:1:", field="", what="is not text in UTF-8")) from error
    except OSError as error:
        what = f"cannot be read ({error.strerror or error}): check its name{hint_in_a_package()}"
        raise ConfigError(Problem(where=f"{path}:", field="", what=what)) from error


def _places(overrides: Mapping[str, Any]) -> dict[Place, Any]:
    return {parsed(field): value for field, value in overrides.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """Where each thing was said: in the file, or by a flag."""

    path: Path | None
    document: Document
    by_flag: dict[Place, Any]

    def together(self) -> Any:
        """The file's data with the flags' in their places. Raises ConfigError if there may be no place."""
        data = self.document.data
        models = data.get(_MODELS) if isinstance(data, dict) else None
        if isinstance(models, list) and len(models) > 1:
            of_a_model = [place for place in self.by_flag if place[0] == _MODELS]
            if of_a_model:
                what = f"is of one model, and {self.path} has {len(models)}: say it there"
                raise ConfigError(*(self.problem(place, what) for place in of_a_model))
        for place, value in self.by_flag.items():
            data = _with(data, place, value)
        return data

    def problem(self, place: Place, what: str, *, is_not_yet: bool = False) -> Problem:
        if place in self.by_flag or (self.path is None and spelled(place) in FLAG_OF):
            return Problem(where="", field=FLAG_OF[spelled(place)], what=what, is_not_yet=is_not_yet)
        where = "" if self.path is None else f"{self.path}:{self.line(place)}:"
        return Problem(where=where, field=spelled(place), what=what, is_not_yet=is_not_yet)

    def line(self, place: Place) -> int:
        """Of the field, or of what it is missing in."""
        lines = self.document.lines
        return next((lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines), 1)


def _with(data: Any, place: Place, value: Any) -> Any:
    """A copy with this value. Data of another shape stays as it is: what is wrong with it is told later."""
    if not place:
        return value
    part, rest = place[0], place[1:]
    if isinstance(part, int):
        items = [{}] if data is None else data
        if not isinstance(items, list) or part >= len(items):
            return data
        return [*items[:part], _with(items[part], rest, value), *items[part + 1 :]]
    fields = {} if data is None else data
    return {**fields, part: _with(fields.get(part), rest, value)} if isinstance(fields, dict) else data
