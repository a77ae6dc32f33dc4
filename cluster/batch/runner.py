"""Asks the lines of a batch, as many at once as there is room for, until each has an outcome."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.cluster.batch.index import BatchError, Place
from shoal.cluster.batch.lines import Line, Problem, Question, Reply
from shoal.cluster.batch.room import Room
from shoal.cluster.batch.server import Refusal
from shoal.cluster.batch.tasks import all_or_none


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait behind an attempt that failed: the longer the more there were, at least as long as the
    server asks for, and not equally long for those that were refused together."""

    max_attempts: int = 10
    """All of them take some three minutes, which is longer than a cluster takes to replace an engine."""
    first_s: float = 0.5
    longest_s: float = 60.0

    def wait_s(self, num_attempts: int, retry_after_s: float, draw: Callable[[], float]) -> float:
        """draw: of [0, 1)."""
        backoff_s = self.first_s * 2.0 ** (num_attempts - 1)
        return min(self.longest_s, max(backoff_s, retry_after_s)) * (1 + draw() / 4)


class Asks(Protocol):
    def __call__(self, question: Question, /) -> Awaitable[Reply | Problem | Refusal]: ...


class Runner:
    """A line that is refused keeps its place while it waits, so a server that is full is asked less.

    One whose attempts are used up gets the last refusal as its answer, if others were answered meanwhile. If
    nobody was, the server is gone, which is no line's fault: the batch ends, and begins there next time.
    """

    def __init__(
        self,
        ask: Asks,
        room: Room,
        *,
        read: Callable[[Place], Line],
        write: Callable[[int, str | None, Reply | Problem], object],
        policy: RetryPolicy,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._ask = ask
        self._room = room
        self._read = read
        self._write = write
        self._policy = policy
        self._sleep = sleep
        self._draw = draw
        self._num_answered = 0

    async def run(self, places: Iterable[Place]) -> None:
        """Raises BatchError; what was answered until then is written."""
        async with all_or_none() as tasks:
            for place in places:
                await self._room.enter(place.size)
                tasks.create_task(self._settle(place))

    async def _settle(self, place: Place) -> None:
        try:
            line = self._read(place)
            content = line.content
            outcome = content if isinstance(content, Problem) else await self._outcome(content)
            self._write(place.number, line.custom_id, outcome)
        finally:
            self._room.leave(place.size)

    async def _outcome(self, question: Question) -> Reply | Problem:
        attempt = num_answered = 0
        while isinstance(said := await self._ask(question), Refusal):
            attempt += 1
            if attempt == 1:
                num_answered = self._num_answered
            if attempt == self._policy.max_attempts:
                return self._given_up(said, anybody_answered=self._num_answered > num_answered)
            await self._sleep(self._policy.wait_s(attempt, said.retry_after_s, self._draw))
        self._num_answered += 1
        return said

    def _given_up(self, refusal: Refusal, *, anybody_answered: bool) -> Reply | Problem:
        if anybody_answered or refusal.is_about_the_line:
            return refusal.outcome
        raise BatchError(f"the server answers nobody ({_told(refusal.outcome)}): run again to go on")


def _told(outcome: Reply | Problem) -> str:
    match outcome:
        case Problem(message=message):
            return message
        case Reply(status=status):
            return f"status {status}"
