"""What one holder says of its prefixes, applied to the directory in the order in which it was said."""

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory

H = TypeVar("H", bound=Hashable)


class Report(Protocol):
    """An engine's or a store's, as far as it is about prefixes."""

    @property
    def sequence(self) -> int: ...

    @property
    def stored(self) -> tuple[BlockKey, ...]: ...

    @property
    def removed(self) -> tuple[BlockKey, ...]: ...


class Snapshot(Protocol):
    @property
    def sequence(self) -> int: ...

    @property
    def block_keys(self) -> tuple[BlockKey, ...]: ...


class PrefixFeed(Generic[H]):
    """Follows one holder's numbered reports; asks for a snapshot when it has missed one.

        BEHIND ──take_request()──▶ ASKED ──snapshot──▶ FOLLOWING
           ▲                         │ it failed          │ a gap
           └─────────────────────────┴────────────────────┘

    A snapshot holds all that was said up to its sequence. Reports that arrive while it is awaited are kept
    and applied on top. So every gap costs one snapshot, however many reports are lost, late or said twice.
    A feed begins BEHIND: whether its holder is new, or we are, the first snapshot tells.
    """

    def __init__(self, holder: H, directory: Directory[H]) -> None:
        self._holder = holder
        self._directory = directory
        self._sequence = 0  # all up to here is in the directory
        self._behind = True
        self._kept: dict[int, Report] | None = None  # while a snapshot is awaited

    @property
    def following(self) -> bool:
        return not self._behind

    def take_request(self) -> bool:
        """Whether a snapshot is to be asked for now. True once, until `restore` or `give_up` has followed."""
        if not self._behind or self._kept is not None:
            return False
        self._kept = {}
        return True

    def report(self, report: Report) -> None:
        if self._kept is not None:
            self._kept[report.sequence] = report
        elif not self._behind:
            self._follow(report)

    def restore(self, snapshot: Snapshot) -> None:
        if self._kept is None:  # an answer to a question that was given up
            return
        kept, self._kept = self._kept, None
        self._directory.forget(self._holder)
        self._directory.add(self._holder, snapshot.block_keys)
        self._sequence, self._behind = snapshot.sequence, False
        for _, report in sorted(kept.items()):
            self._follow(report)

    def doubt(self) -> None:
        """The directory has dropped some of what it was told: a snapshot is to tell it again."""
        self._behind = True

    def give_up(self) -> None:
        """The snapshot did not come: it may be asked for again."""
        self._kept = None

    def _follow(self, report: Report) -> None:
        if report.sequence > self._sequence + 1:
            self._behind = True
        elif report.sequence == self._sequence + 1 and not self._behind:
            self._directory.add(self._holder, report.stored)
            self._directory.discard(self._holder, report.removed)
            self._sequence = report.sequence
