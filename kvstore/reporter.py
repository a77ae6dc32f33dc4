"""Tells the routers what is new, in numbered reports."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from ray.exceptions import RayError

from shoal.kvstore.calls import within

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05
"""What is new is told to the routers at most this often."""

REPORT_DEADLINE_S, REPORT_RETRY_S = 5.0, 0.5

R = TypeVar("R")


class Reporter(Generic[R]):
    """Sends each router one report at a time, since Ray keeps no order among several.

    After one that is lost, the next shows the router a gap, and it asks for a snapshot. One that did not
    answer is told on, and not waited for until it does: others are not to know less for it.
    """

    def __init__(self, take_report: Callable[[], R], send: Callable[[Any, R], Any]) -> None:
        """send: the remote call (router, report) that a report is."""
        self._take_report = take_report
        self._send = send
        self._routers: tuple[Any, ...] = ()
        self._has_news = asyncio.Event()
        self._silent: set[Any] = set()
        """Routers that did not answer the latest report that they were told."""
        self._telling: dict[Any, asyncio.Task[None]] = {}
        self._behind: set[Any] = set()
        """Routers that missed a report while they were told an earlier one."""

    def introduce(self, routers: Collection[Any]) -> None:
        """Report to these, which may know nothing yet."""
        if any(router not in self._routers for router in routers):
            self._has_news.set()
        self._routers = tuple(routers)
        self._silent &= set(routers)

    def has_news(self) -> None:
        self._has_news.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if not self._routers:
                continue
            report = self._take_report()
            for router in self._routers:
                if router in self._telling:  # it misses this one, and sees the gap when it hears the next
                    self._behind.add(router)
                else:
                    self._telling[router] = asyncio.create_task(self._tell(router, report))
            if heard := [task for router, task in self._telling.items() if router not in self._silent]:
                await asyncio.wait(heard)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _tell(self, router: Any, report: R) -> None:
        try:
            await within(REPORT_DEADLINE_S, self._send(router, report))
        except Exception as error:
            self._report_is_lost(router, error)
            await asyncio.sleep(REPORT_RETRY_S)
            self._has_news.set()
        else:
            self._silent.discard(router)
            if router in self._behind:
                self._has_news.set()
        finally:
            self._behind.discard(router)
            del self._telling[router]

    def _report_is_lost(self, router: Any, error: Exception) -> None:
        """Logged once an outage; but what is no failure of a call is a mistake, and logged each time."""
        if not isinstance(error, RayError | TimeoutError):
            logger.error("a report failed", exc_info=error)
        elif router not in self._silent:
            logger.warning("reports to a router are lost: %s", type(error).__name__)
        if router in self._routers:
            self._silent.add(router)
