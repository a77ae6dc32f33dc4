"""What an engine's requests do at a moment."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.actors.engine.sequence import Sequence
from shoal.actors.messages import IngressId


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    num_running: int
    num_waiting: int
    """For room,"""
    num_fetching: int
    """and for a prefix that is on its way."""

    @classmethod
    def of(
        cls, running: Iterable[Sequence], waiting: Iterable[Sequence], asked_by: IngressId | None = None
    ) -> "Load":
        """Of all requests, or of one ingress's alone."""
        queued = [s for s in waiting if asked_by in (None, s.reply_to)]
        num_fetching = sum(s.fetching is not None for s in queued)
        return cls(
            num_running=sum(asked_by in (None, s.reply_to) for s in running),
            num_waiting=len(queued) - num_fetching,
            num_fetching=num_fetching,
        )
