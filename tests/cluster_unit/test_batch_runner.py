"""Lines are asked as there is room, again when they are refused, and never for ever. Time is the test's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.cluster.batch.index import BatchError, Place
from shoal.cluster.batch.lines import Line, Problem, Question, Reply
from shoal.cluster.batch.room import Room
from shoal.cluster.batch.run import concurrency
from shoal.cluster.batch.runner import RetryPolicy, Runner
from shoal.cluster.batch.server import Refusal

GOOD = Reply(status=200, request_id="r", body={})
POLICY = RetryPolicy(max_attempts=4, first_s=1.0, longest_s=20.0)


def refusal(status: int = 503, retry_after_s: float = 0.0) -> Refusal:
    return Refusal(outcome=Reply(status=status, request_id="", body={}), retry_after_s=retry_after_s)


DOWN = Refusal(outcome=Problem(code="connection_error", message="refused"))


class Played:
    """Lines 1, ..., num; the body of each is its number, and `said` what the server says to its attempts."""

    def __init__(
        self,
        num: int,
        said: Callable[[int, int], Reply | Problem | Refusal] = lambda number, attempt: GOOD,
        *,
        size: int = 2,
        max_bytes: int = 1000,
        problems: frozenset[int] = frozenset(),
    ) -> None:
        self._said = said
        self._problems = problems
        self.written: dict[int, Reply | Problem] = {}
        self.waits: list[float] = []
        self.asked: list[int] = []
        self.open = self.most_open = 0
        self.room = Room(size, max_bytes)
        self.runner = Runner(
            self._ask,
            self.room,
            read=self._read,
            write=self._write,
            policy=POLICY,
            sleep=self._sleep,
            draw=lambda: 0.0,
        )
        self.places = [Place(number=number, start=0, size=10) for number in range(1, num + 1)]

    def run(self) -> "Played":
        asyncio.run(self.runner.run(self.places))
        return self

    async def _ask(self, question: Question) -> Reply | Problem | Refusal:
        number = question.body["number"]
        self.asked.append(number)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(3):
            await asyncio.sleep(0)
        self.open -= 1
        return self._said(number, self.asked.count(number))

    def _read(self, place: Place) -> Line:
        content: Any = Question(url="u", body={"number": place.number})
        if place.number in self._problems:
            content = Problem(code="c", message="m")
        return Line(custom_id=str(place.number), content=content)

    def _write(self, number: int, custom_id: str | None, outcome: Reply | Problem) -> None:
        assert custom_id == str(number) and number not in self.written
        self.written[number] = outcome

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


def test_lines_are_asked_in_order_as_many_at_once_as_there_is_room_for() -> None:
    played = Played(9, size=3).run()
    assert played.asked == list(range(1, 10))
    assert played.most_open == 3
    assert played.written == dict.fromkeys(range(1, 10), GOOD)


def test_a_room_that_grows_is_filled_and_one_that_shrinks_empties() -> None:
    played = Played(20, size=1)

    async def run() -> None:
        running = asyncio.create_task(played.runner.run(played.places))
        while len(played.written) < 4:
            await asyncio.sleep(0)
        assert played.most_open == 1
        played.room.resize(4)
        while len(played.written) < 12:
            await asyncio.sleep(0)
        assert played.most_open == 4
        played.room.resize(1)
        while played.open:
            await asyncio.sleep(0)
        played.most_open = 0
        await running

    asyncio.run(run())
    assert played.most_open == 1
    assert len(played.written) == 20


def test_large_lines_are_fewer_at_once_and_one_alone_is_let_in() -> None:
    assert Played(6, size=4, max_bytes=25).run().most_open == 2
    assert Played(6, size=4, max_bytes=5).run().most_open == 1


def test_a_line_that_is_no_question_is_answered_without_a_server() -> None:
    played = Played(3, problems=frozenset({2})).run()
    assert played.asked == [1, 3]
    assert played.written[2] == Problem(code="c", message="m")


def test_who_is_refused_waits_longer_each_time_and_as_long_as_the_server_asks_for() -> None:
    played = Played(1, lambda _, attempt: GOOD if attempt == 4 else refusal(retry_after_s=3.0)).run()
    assert played.waits == [3.0, 3.0, 4.0]
    assert played.written == {1: GOOD}


def test_no_wait_is_longer_than_the_longest_and_two_are_not_alike() -> None:
    assert POLICY.wait_s(9, 0.0, lambda: 0.0) == 20.0
    assert POLICY.wait_s(1, 1e9, lambda: 0.0) == 20.0
    assert POLICY.wait_s(1, 8.0, lambda: 0.5) == 9.0
    assert POLICY.wait_s(2, 0.0, lambda: 0.99) == pytest.approx(2.0, rel=0.25)


def test_while_one_waits_its_place_is_taken_and_the_others_go_on() -> None:
    played = Played(8, lambda number, attempt: refusal() if number == 1 and attempt < 4 else GOOD).run()
    assert sorted(played.written) == list(range(1, 9))
    assert played.most_open <= 2


def test_one_that_is_refused_to_the_end_while_others_are_answered_fails_alone() -> None:
    played = Played(12, lambda number, _: refusal(429) if number == 1 else GOOD).run()
    assert played.written[1] == refusal(429).outcome
    assert played.asked.count(1) == POLICY.max_attempts
    assert [played.written[number] for number in range(2, 13)] == [GOOD] * 11


@pytest.mark.parametrize(("gone", "reason"), [(DOWN, "refused"), (refusal(), "status 503")])
def test_a_server_that_answers_nobody_ends_the_batch_and_no_line_fails(gone: Refusal, reason: str) -> None:
    played = Played(30, lambda number, _: GOOD if number < 5 else gone)
    with pytest.raises(BatchError, match=f"answers nobody \\({reason}\\): run again"):
        played.run()
    assert sorted(played.written) == [1, 2, 3, 4]


def test_a_failure_that_is_about_the_line_is_its_answer_though_nobody_else_is_answered() -> None:
    played = Played(1, lambda number, attempt: refusal(500)).run()
    assert played.written == {1: refusal(500).outcome}


def test_what_was_being_asked_when_the_batch_ends_is_not_written() -> None:
    played = Played(4, size=4)

    async def run() -> None:
        running = asyncio.create_task(played.runner.run(played.places))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert played.asked and not played.written


def test_how_many_keep_the_engines_full() -> None:
    assert concurrency(None) == 64
    assert concurrency(8) == 12
    assert concurrency(64) == 80
    assert concurrency(100_000) == 1000
