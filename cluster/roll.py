"""How one deployment takes another's place: engine by engine. Arithmetic, no state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    new: int
    """Engines of the deployment that comes,"""
    old: int
    """and of those that go, but for what drains."""


def allowed(*, needed: int, new_ready: int, new_waits: bool, old: int, old_drains: bool) -> Allowed:
    """What is to be done next, if `needed` engines serve the model when it is done.

    One new engine is started at a time, and for each that is ready an old one goes: there are never fewer
    than `needed`. Where a new one waits for room (`new_waits`), an old one goes first to make it, and no
    second before that one has left.
    """
    stays = min(old, max(0, needed - new_ready))
    if new_waits and not old_drains and stays == old:
        stays = max(0, old - 1)
    return Allowed(new=min(needed, new_ready + 1), old=stays)
