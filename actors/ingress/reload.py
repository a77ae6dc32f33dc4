"""Files that change while they are in use: read again, and what cannot be read changes nothing."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.actors.ingress.metrics import Metrics

logger = logging.getLogger(__name__)

_Look = tuple[tuple[int, int, int] | None, ...]


class Reload:
    """Looks at files, and reads them when they are others than before.

    Times, sizes and inodes are compared, of what the names lead to at the time: a file may be replaced or
    written to, or be behind a link that is turned elsewhere, as those of mounted secrets are.
    """

    def __init__(
        self, name: str, paths: Sequence[Path], *, read: Callable[[], Any], use: Callable[[Any], None]
    ) -> None:
        """`read` raises ValueError for what cannot be used; `use` gets what it returned, on the loop."""
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._use = use
        self._seen: _Look = ()

    def load(self) -> None:
        """At the start, when what cannot be used is an error: ValueError."""
        self._seen = self._look()  # before reading, so that no change between is missed
        self._use(self._read())

    async def look_again(self, metrics: Metrics) -> None:
        try:
            use = await asyncio.to_thread(self._read_if_changed)
        except ValueError as error:
            metrics.count_reload(self._name, succeeded=False)
            logger.error("%s changed and cannot be used; what was before stays: %s", self._name, error)
            return
        if use is not None:
            use()
            metrics.count_reload(self._name, succeeded=True)
            logger.warning("%s changed and was read again", self._name)

    def _read_if_changed(self) -> Callable[[], None] | None:
        look = self._look()
        if look == self._seen:
            return None
        self._seen = look
        return partial(self._use, self._read())

    def _look(self) -> _Look:
        return tuple(map(_stat, self._paths))


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
