"""Drafts that are right as often as a test wants."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.actors.engine.sequence import Sequence
from tests.fake_runner import generate


@dataclass
class FakeDrafts:
    """Implements `Drafts`, and knows what will be drawn."""

    most: int
    right: float = 1.0
    """Chance of each draft."""
    waits: float = 1.0
    """Chance that a sequence is left out of a step for the sake of drafts."""
    choose: random.Random = field(default_factory=lambda: random.Random(0))
    going_on: Callable[[list[int], int, int], list[int]] = generate
    """A history, and what so many tokens after it will be, by the request's seed."""

    def wait(self, sequence: Sequence, *, num_running: int) -> bool:
        assert sequence.num_drawing and num_running
        return self.choose.random() < self.waits

    def propose(self, sequence: Sequence, *, num_running: int, most: int) -> tuple[int, ...]:
        assert not sequence.num_drawing and num_running
        seed = sequence.request.sampling.seed
        drafts = self.going_on(sequence.tokens, max(0, min(most, self.most)), seed)
        return tuple(draft if self.choose.random() < self.right else draft ^ 1 for draft in drafts)
