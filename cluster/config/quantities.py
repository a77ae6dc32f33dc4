"""Sizes and durations: in Python a number of bytes or seconds, in YAML and flags as people write them."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from shoal.kvstore.sizes import format_size, parse_size

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_DURATION_S = 7 * 24 * 3600
"""Longer ones would overflow the waits that they are for."""
_DURATION = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(ms|s|min|m|h|)", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds of "30s", "5m", "1.5h", "500ms" or "30". Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it like 30s or 5m")
    return float(match[1]) * _UNITS[match[2].lower()]


def format_duration(seconds: float) -> str:
    """90 s as "90s", in a spelling that `parse_duration` takes."""
    for unit, scale in (("h", 3600), ("m", 60)):
        if seconds and seconds % scale == 0:
            return f"{seconds / scale:.0f}{unit}"
    return f"{seconds:f}".rstrip("0").rstrip(".") + "s"


def _exact_size(num_bytes: int) -> str:
    """As "4GiB" where that says it all, else in bytes."""
    short = format_size(num_bytes)
    return short if parse_size(short, or_none=True) == num_bytes else str(num_bytes)


def _size(*, or_none: bool) -> Any:
    def read(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("must be a memory size; write it like 4GiB or 512MiB")
        return parse_size(str(value), or_none=or_none)

    return BeforeValidator(read)


def _read_duration(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a duration; write it like 30s or 5m")
    return parse_duration(str(value))


def _schema(what: str, pattern: str, least: int) -> WithJsonSchema:
    written = {"type": "string", "pattern": f"^{pattern}$", "examples": [what]}
    return WithJsonSchema({"anyOf": [written, {"type": "number", "minimum": least}]})


_SIZE_PATTERN = r"\s*\d{1,18}(\.\d+)?\s*([KkMmGgTt]?([Ii]?[Bb])?)\s*"
_WRITE_SIZE = PlainSerializer(_exact_size, return_type=str)

Size = Annotated[int, _size(or_none=False), _WRITE_SIZE, _schema("4GiB", _SIZE_PATTERN, 1)]
SizeOrNone = Annotated[int, _size(or_none=True), _WRITE_SIZE, _schema("4GiB", _SIZE_PATTERN, 0)]
"""0 is an answer too."""
Duration = Annotated[
    float,
    BeforeValidator(_read_duration),
    Field(ge=0, le=MAX_DURATION_S),
    PlainSerializer(format_duration, return_type=str),
    _schema("30s", r"\s*\d{1,9}(\.\d+)?\s*([Mm]?[Ss]|[Mm]([Ii][Nn])?|[Hh]|)\s*", 0),
]
