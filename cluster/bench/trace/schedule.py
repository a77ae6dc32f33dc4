"""Engines that come and go while a trace is replayed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Change = Literal["join", "die", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_s: float
    change: Change
    count: int = 1
    """Of engines that join."""
    engine: int = 0
    """Which one dies, or is given nothing more and ends when it has done what it has: they are numbered
    from 0, those that join after those that were there."""


def read_schedule(text: str) -> tuple[Event, ...]:
    """A file, or the events themselves: `600 join 2; 900 die 3; 1200 drain 0`, a line of a file or what
    stands between semicolons each, with seconds in front. Raises ValueError, naming what it cannot read."""
    if not text.strip():
        return ()
    if ";" not in text and Path(text).is_file():
        text = Path(text).read_text()
    parts = [part.strip() for line in text.splitlines() for part in line.split("#")[0].split(";")]
    return tuple(sorted((_event(part) for part in parts if part), key=lambda event: event.at_s))


def _event(text: str) -> Event:
    try:
        at, change, number = text.split()
        at_s, value = float(at), int(number)
        if change not in get_args(Change) or not 0 <= at_s < math.inf or value < (change == "join"):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--schedule: {text!r} is neither a file nor `SECONDS join COUNT`, `SECONDS die ENGINE` or "
            "`SECONDS drain ENGINE`"
        ) from None
    if change == "join":
        return Event(at_s=at_s, change="join", count=value)
    return Event(at_s=at_s, change="die" if change == "die" else "drain", engine=value)
