"""Tells the router what is new, in numbered reports."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ray.exceptions import RayError

from shoal.kvstore.calls import within

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05
"""What is new is told to the router at most this often."""

REPORT_DEADLINE_S, REPORT_RETRY_S = 5.0, 0.5

R = TypeVar("R")


class Reporter(Generic[R]):
    """Sends one report at a time, since Ray keeps no order among several.

    After one that is lost, the next shows the router a gap, and it asks for a snapshot.
    """

    def __init__(self, take_report: Callable[[], R], send: Callable[[Any, R], Any]) -> None:
        """send: the remote call (router, report) that a report is."""
        self._take_report = take_report
        self._send = send
        self._router: Any = None
        self._has_news = asyncio.Event()
        self._is_heard = True  # as of the latest report

    def introduce(self, router: Any) -> None:
        """Report to this one, which may know nothing yet."""
        if router != self._router:
            self._router = router
            self._has_news.set()

    def has_news(self) -> None:
        self._has_news.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._router is None:
                continue
            try:
                await within(REPORT_DEADLINE_S, self._send(self._router, self._take_report()))
            except Exception as error:
                self._report_is_lost(error)
                self._has_news.set()
                await asyncio.sleep(REPORT_RETRY_S)
            else:
                self._is_heard = True
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _report_is_lost(self, error: Exception) -> None:
        """Logged once an outage; but what is no failure of a call is a mistake, and logged each time."""
        if not isinstance(error, RayError | TimeoutError):
            logger.error("a report failed", exc_info=error)
        elif self._is_heard:
            logger.warning("reports to the router are lost: %s", type(error).__name__)
        self._is_heard = False
