"""Reports to a router that fails: they go on, and the log says so once."""

import asyncio
from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from shoal.kvstore.reporter import Reporter
from tests.ingress.virtual_time import run_in_virtual_time


class FakeRouter:
    """Each report is answered with the next of these outcomes, then with None."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = list(outcomes)
        self.sequences: list[int] = []

    def report(self, sequence: int) -> Any:
        self.sequences.append(sequence)
        self._future: Future[None] = Future()
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if outcome is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(outcome)
        return self

    def future(self) -> Future[None]:
        return self._future


async def _report_to(router: FakeRouter, *, num_news: int) -> None:
    sequences = count(1)
    reporter = Reporter(lambda: next(sequences), FakeRouter.report)
    reporter.has_news()
    reporting = asyncio.create_task(reporter.run())
    await asyncio.sleep(10)
    assert router.sequences == [], "it knows no router yet"
    reporter.introduce([router])
    for _ in range(num_news):
        reporter.has_news()
        await asyncio.sleep(10)
    reporter.introduce([router])
    await asyncio.sleep(10)
    assert not reporting.done()
    reporting.cancel()


def test_a_router_that_is_gone_is_warned_of_once_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    router = FakeRouter(*[ActorDiedError()] * 5, None, None, ActorDiedError(), TimeoutError())
    run_in_virtual_time(_report_to(router, num_news=3))
    assert router.sequences == list(range(1, 11)), "each that was lost leaves a gap"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_failure_that_nobody_foresaw_is_loud_and_does_not_end_the_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = FakeRouter(RuntimeError("unforeseen"), None, RuntimeError("again"))
    run_in_virtual_time(_report_to(router, num_news=2))
    assert router.sequences == [1, 2, 3, 4]
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "unforeseen" in caplog.text


class SlowRouter:
    """Fails its first report; each later one is answered when its future is."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.answers: list[Future[None]] = []

    def report(self, sequence: int) -> Any:
        self.sequences.append(sequence)
        self.answers.append(Future())
        if sequence == 1:
            self.answers[0].set_exception(TimeoutError())
        return self

    def future(self) -> Future[None]:
        return self.answers[-1]


def test_a_router_that_missed_a_report_while_it_was_slow_is_told_another_at_once() -> None:
    async def reported() -> None:
        router, sequences = SlowRouter(), count(1)
        reporter = Reporter(lambda: next(sequences), SlowRouter.report)
        reporting = asyncio.create_task(reporter.run())
        reporter.introduce([router])
        await asyncio.sleep(1)
        reporter.has_news()
        await asyncio.sleep(1)
        assert router.sequences == [1, 2]
        router.answers[-1].set_result(None)
        await asyncio.sleep(1)
        reporting.cancel()
        assert router.sequences == [1, 2, 4], "or it would not see the gap until there is other news"

    run_in_virtual_time(reported())
