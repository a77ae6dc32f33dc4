"""Who may come in: bounds on what is open at once, and the end of all of it when the door closes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.actors.ingress.errors import overloaded, stopping
from shoal.actors.ingress.pace import Pace
from shoal.kvstore.outstanding import Outstanding


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    max_requests: int = 1024
    max_bytes: int = 256 * 2**20
    """Of their bodies together. What becomes of one in memory is several times as large, and stays until its
    answer has ended: 1,024 bodies of 32 MiB would be the end of this process."""

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.max_bytes < 1:
            raise ValueError("a gate lets in at least one request and one byte")


@dataclass(slots=True, eq=False)
class Visit:
    """One request, from when it was let in until its answer has ended."""

    until: asyncio.Timeout
    num_bytes: int = 0
    is_answered: bool = False
    """Set at its end, unless it was refused or failed."""


class Gate:
    """Counts the requests that are open and the bytes that they brought along.

    One that comes alone is let in, however large: then nothing would be gained by waiting.
    """

    def __init__(self, config: GateConfig, pace: Pace) -> None:
        self._config = config
        self._pace = pace
        self._visits: set[Visit] = set()
        self._num_bytes = 0
        self.is_closed = False

    @contextmanager
    def visit(self, until: asyncio.Timeout) -> Iterator[Visit]:
        """Within a timeout that the gate may shorten. Raises ApiError if nobody else is let in."""
        if self.is_closed:
            raise stopping()
        if len(self._visits) >= self._config.max_requests:
            raise overloaded()
        if not self._visits:
            self._pace.restart()
        visit = Visit(until)
        self._visits.add(visit)
        try:
            yield visit
        finally:
            self._visits.remove(visit)
            self._num_bytes -= visit.num_bytes
            if visit.is_answered:
                self._pace.ended()

    def carry(self, visit: Visit, num_bytes: int) -> None:
        """It brings so much more along. Raises ApiError if that is too much beside the others."""
        if len(self._visits) > 1 and self._num_bytes + num_bytes > self._config.max_bytes:
            raise overloaded()
        visit.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def retry_after_s(self) -> int:
        """For one that is refused now, here or by the engines."""
        return self._pace.retry_after_s()

    def close(self, grace_s: float) -> None:
        """Let nobody else in; who is inside after the grace is told that it cannot go on."""
        self.is_closed = True
        leave_at = asyncio.get_running_loop().time() + grace_s
        for visit in self._visits:
            ends_at = visit.until.when()
            if not visit.until.expired() and (ends_at is None or leave_at < ends_at):
                visit.until.reschedule(leave_at)

    def outstanding(self) -> Outstanding:
        return Outstanding(counts={"requests": len(self._visits), "body_bytes": self._num_bytes})
