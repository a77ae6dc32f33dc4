"""What goes wrong in one part of a tick, so that the other parts go on. Plain, like the supervisor."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.cluster.watch import last_line

logger = logging.getLogger(__name__)


class Mishaps:
    """A call to Ray may raise while its control store, or a node, is away.

    What raises has changed nothing, so the next tick tries it again. It is logged when it begins, counted
    each time, and told until a tick has passed without it. A broken invariant of ours is no mishap.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Mapping[str, str] = {}
        self._now: dict[str, str] = {}

    @property
    def troubles(self) -> Mapping[str, str]:
        """By part, those of the latest tick."""
        return self._now

    def begin_tick(self) -> None:
        self._before, self._now = self._now, {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Whatever is done within is passed over from where it raises."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self.count += 1
            if part not in self._before and part not in self._now:
                logger.warning("%s: trying again each tick", part, exc_info=True)
            self._now[part] = f"{type(error).__name__}: {last_line(error)}"
