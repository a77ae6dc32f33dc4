"""How an actor comes by a model's files on its own node.

Whoever makes the actor says how: sources, caches and downloads are the cluster's, and no room here may look
there. What an actor is told is a line; what it asks with it, before it reads anything, is a folder.
"""

from collections.abc import Callable

Fetch = Callable[[str, Callable[[str], None]], str]
"""From what a cluster calls a checkpoint to a folder here, on any thread. Meanwhile it tells what it does, in
words for people. Raises ValueError for what no retry can mend."""


def as_it_is(checkpoint: str, tell: Callable[[str], None]) -> str:
    """It is a folder on every node."""
    return checkpoint
