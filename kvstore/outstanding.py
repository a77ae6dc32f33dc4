"""What a process has given out and not got back: how a leak is seen from outside."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """Of an idle process every count is 0; one that stays above has not been returned by somebody."""

    counts: Mapping[str, int]
    """By what is counted. Those that are 0 are there too, to show what was looked at."""
    broken: str = ""
    """What the process's own check of its books found, if it found anything."""

    @classmethod
    def of(cls, counts: Mapping[str, int], check: Callable[[], None]) -> "Outstanding":
        """`check` raises AssertionError if the books disagree with each other."""
        try:
            check()
        except AssertionError as error:
            (*_, where) = traceback.extract_tb(error.__traceback__)
            return cls(counts=counts, broken=str(error) or where.line or "an assertion")
        return cls(counts=counts)

    @property
    def is_clean(self) -> bool:
        return not self.broken and not any(self.counts.values())
