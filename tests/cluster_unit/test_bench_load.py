"""Closed and open loops on a clock that only the test moves."""

import asyncio
import json
import math
from itertools import count, islice
from typing import Any

import pytest

from shoal.cluster.bench.serve.arrivals import arrivals
from shoal.cluster.bench.serve.client import Failure, Outcome, Reply
from shoal.cluster.bench.serve.dialogue import Endpoint
from shoal.cluster.bench.serve.load import PAUSE_AFTER_FAILURE_S, LoadGenerator
from shoal.cluster.bench.serve.workload import Lengths, Session, Workload, WorkloadConfig


class FakeClock:
    def __init__(self, stall_s: float = 0.0) -> None:
        self._now = 100.0
        self._stall_s = stall_s

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        """Whoever sleeps wakes at once, and late if the machine stalls."""
        self._now = max(self._now, when + self._stall_s)
        await asyncio.sleep(0)


class FakeServer:
    """Answers after a few turns of the event loop; every one takes a second of the fake clock."""

    def __init__(self, clock: FakeClock, fail: frozenset[int] = frozenset()) -> None:
        self._clock = clock
        self._fail = fail
        self.asked: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    async def ask(self, endpoint: Endpoint, body: bytes) -> Outcome:
        self.asked.append(json.loads(body))
        number = len(self.asked) - 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        await self._clock.sleep_until(self._clock.now() + 1)
        self.running -= 1
        if number in self._fail:
            return Failure(kind="http_503", message="", ended_at=self._clock.now())
        return Reply(text=f"reply {number}", text_at=(), ended_at=self._clock.now(), usage=None)


def sessions(num: int | None = None, **config: Any) -> Any:
    workload = Workload(WorkloadConfig(input_len=Lengths(2, 2), **config))
    drawn = map(workload.session, count())
    return drawn if num is None else islice(drawn, num)


def generator(clock: FakeClock, server: FakeServer) -> LoadGenerator:
    return LoadGenerator(server.ask, clock, endpoint="chat", fields={"model": "m"})


def closed(num_clients: int, played: Any, until: float = math.inf, fail: frozenset[int] = frozenset()) -> Any:
    clock = FakeClock()
    server = FakeServer(clock, fail)
    load = generator(clock, server)
    asyncio.run(load.closed_loop(played, num_clients, until=until))
    return load, server


def opened(played: Any, times: Any, until: float = math.inf, stall_s: float = 0.0) -> LoadGenerator:
    clock = FakeClock(stall_s)
    load = generator(clock, FakeServer(FakeClock()))
    asyncio.run(load.open_loop(played, iter(times), until=until))
    return load


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    load, server = closed(3, sessions(10))
    assert server.most_running == 3
    assert sorted(record.session for record in load.records) == list(range(10))
    assert {record.client for record in load.records} == {0, 1, 2}
    assert all(record.due_at == record.sent_at for record in load.records)
    assert load.num_sent == 10


def test_a_request_has_the_common_fields_and_its_own() -> None:
    _, server = closed(1, sessions(1))
    (asked,) = server.asked
    assert asked["model"] == "m"
    assert asked["max_tokens"] == 64
    assert [message["role"] for message in asked["messages"]] == ["user"]


def test_after_the_duration_nothing_is_sent() -> None:
    load, _ = closed(1, sessions(), until=103.0)
    assert [record.sent_at for record in load.records] == [100.0, 101.0, 102.0]
    load, _ = closed(1, sessions(name="multi-turn", turns=9), until=102.5)
    assert [(record.session, record.turn) for record in load.records] == [(0, 0), (0, 1), (0, 2)]


def test_a_conversation_hears_what_was_said() -> None:
    _, server = closed(1, sessions(1, name="multi-turn", turns=2))
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "reply 0"}


def test_a_conversation_ends_with_a_reply_that_fails_and_its_client_pauses() -> None:
    load, _ = closed(1, sessions(2, name="multi-turn", turns=2), fail=frozenset({0}))
    assert [(record.session, record.turn) for record in load.records] == [(0, 0), (1, 0), (1, 1)]
    assert load.records[1].sent_at == 101.0 + PAUSE_AFTER_FAILURE_S


def test_an_open_loop_does_not_wait_for_replies() -> None:
    load = opened(sessions(4), [0.0, 0.5, 0.5, 2.0])
    assert sorted(record.due_at for record in load.records) == [100.0, 100.5, 100.5, 102.0]
    assert {record.client for record in load.records} == {None}


def test_a_client_that_stalls_does_not_hide_it() -> None:
    (late,) = opened(sessions(1), [1.0], stall_s=5.0).records
    assert (late.due_at, late.sent_at) == (101.0, 106.0)


def test_an_open_loop_ends_with_its_duration() -> None:
    load = opened(sessions(), (0.5 * number for number in count()), until=101.0)
    assert [record.due_at for record in load.records] == [100.0, 100.5]


def test_fixed_arrivals() -> None:
    assert list(islice(arrivals("fixed", 4.0, 0), 3)) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_arrivals_come_at_their_rate_and_the_same_again(rate: float) -> None:
    times = list(islice(arrivals("poisson", rate, 7), 4000))
    assert times == sorted(times)
    assert times == list(islice(arrivals("poisson", rate, 7), 4000))
    assert times != list(islice(arrivals("poisson", rate, 8), 4000))
    assert times[-1] / 4000 == pytest.approx(1 / rate, rel=0.1)


def test_sessions_are_shared_by_the_clients_of_a_loop() -> None:
    played: list[Session] = list(sessions(5))
    load, _ = closed(2, iter(played))
    assert len({record.session for record in load.records}) == 5
