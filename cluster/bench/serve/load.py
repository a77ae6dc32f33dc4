"""Plays sessions against a server, in a closed or an open loop, and records every request.

Closed: N clients, each sends its next request when the last is answered; a slow server is asked less.
Open: sessions begin when they are due, whatever the server does, and a request's time counts from when it was
due: a stall shows in every request that it held up (to leave those out is called coordinated omission).
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.cluster.bench.serve.client import Failure, Outcome, Reply
from shoal.cluster.bench.serve.dialogue import Dialogue, Endpoint
from shoal.cluster.bench.serve.workload import Session

PAUSE_AFTER_FAILURE_S = 0.1
"""Of a closed loop's client: one that is refused at once must not ask ten thousand times a second."""


class Clock(Protocol):
    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None: ...


class WallClock:
    """Monotonic seconds."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. Times are the clock's."""

    session: int
    turn: int
    group: int
    client: int | None
    """Which of a closed loop's clients sent it."""
    due_at: float
    """Latencies count from here. In a closed loop, and from the second turn on, it is when it was sent."""
    sent_at: float
    output_len: int
    """Tokens that were asked for."""
    outcome: Outcome


class LoadGenerator:
    def __init__(
        self,
        ask: Callable[[Endpoint, bytes], Awaitable[Outcome]],
        clock: Clock,
        *,
        endpoint: Endpoint,
        fields: Mapping[str, Any],
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """`fields` go into every request beside its prompt and length."""
        self._ask = ask
        self._clock = clock
        self._endpoint = endpoint
        self._fields = fields
        self._on_record = on_record
        self.num_sent = 0
        self.records: list[Record] = []

    async def closed_loop(
        self, sessions: Iterable[Session], num_clients: int, *, until: float = math.inf
    ) -> None:
        """Until the sessions are all played; after `until` nothing is sent, and what runs is waited for."""
        queue = iter(sessions)
        async with asyncio.TaskGroup() as tasks:
            for client in range(num_clients):
                tasks.create_task(self._client(client, queue, until))

    async def open_loop(
        self, sessions: Iterable[Session], arrivals: Iterator[float], *, until: float = math.inf
    ) -> None:
        """Session k begins at arrival k, in seconds from now; its later turns follow its replies."""
        started_at = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            for session in sessions:
                due_at = started_at + next(arrivals)
                if due_at >= until:
                    break
                await self._clock.sleep_until(due_at)
                tasks.create_task(self._play(session, until, due_at=due_at))

    async def _client(self, client: int, queue: Iterator[Session], until: float) -> None:
        while self._clock.now() < until and (session := next(queue, None)) is not None:
            if not await self._play(session, until, client=client):
                await self._clock.sleep_until(self._clock.now() + PAUSE_AFTER_FAILURE_S)

    async def _play(
        self, session: Session, until: float, *, client: int | None = None, due_at: float | None = None
    ) -> bool:
        """False when a turn failed: nothing can follow a reply that is not there."""
        dialogue = Dialogue(session, self._endpoint)
        for number, turn in enumerate(session.turns):
            body = json.dumps({**self._fields, **dialogue.ask(turn)}).encode()
            sent_at = self._clock.now()
            if number and sent_at >= until:
                break
            self.num_sent += 1
            outcome = await self._ask(self._endpoint, body)
            record = Record(
                session=session.index,
                turn=number,
                group=session.group,
                client=client,
                due_at=sent_at if due_at is None else due_at,
                sent_at=sent_at,
                output_len=turn.output_len,
                outcome=outcome,
            )
            self.records.append(record)
            self._on_record(record)
            match outcome:
                case Reply(text=text):
                    dialogue.hear(text)
                case Failure():
                    return False
            due_at = None
        return True
