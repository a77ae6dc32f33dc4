"""How fast a simulated engine computes a prompt and draws beside it."""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from shoal.cluster.bench.trace.config import EngineSpeed

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Drawing(Generic[T]):
    last_step: float
    number: int
    job: T = field(compare=False)
    context_tokens: int = field(compare=False)


class Compute(Generic[T]):
    """One prompt at a time, in chunks, and a row in each step for everybody who draws.

    Between two events (a prompt begins or is computed, somebody has drawn the last token) all steps take
    equally long, so the time of the next event is arithmetic, and no step is simulated by itself. A context
    counts with its length in the middle of its output.
    """

    def __init__(self, speed: EngineSpeed) -> None:
        self._speed = speed
        self._at = 0.0  # all below is as of then
        self._prompt: T | None = None
        self._left_tokens = 0.0
        self._steps = 0.0  # so far, by which those who draw know when they end
        self._drawing: list[_Drawing[T]] = []
        self._context_tokens = 0
        self._numbers = count()

    @property
    def num_drawing(self) -> int:
        return len(self._drawing)

    @property
    def is_computing(self) -> bool:
        return self._prompt is not None

    def left_tokens(self, now: float) -> float:
        """Of the prompt, if there is one."""
        self._advance(now)
        return self._left_tokens

    def compute(self, job: T, num_tokens: int, now: float) -> None:
        """Begin with a prompt; there must be none."""
        assert self._prompt is None
        self._advance(now)
        self._prompt, self._left_tokens = job, max(float(num_tokens), self._speed.tokens_of_a_step)

    def draw(self, job: T, num_tokens: int, context_tokens: int, now: float) -> None:
        self._advance(now)
        context_tokens += num_tokens // 2
        last = self._steps + num_tokens
        heapq.heappush(self._drawing, _Drawing(last, next(self._numbers), job, context_tokens))
        self._context_tokens += context_tokens

    def next_at(self) -> float | None:
        """When something ends; None if nothing runs."""
        ends = [end for end in (self._prompt_ends_at(), self._draw_ends_at()) if end is not None]
        return min(ends, default=None)

    def take_ended(self, now: float) -> tuple[T | None, T | None]:
        """At `next_at`: (whose prompt is computed, who has drawn the last token); exactly one is given."""
        prompt_at, draw_at = self._prompt_ends_at(), self._draw_ends_at()
        self._advance(now)
        if prompt_at is not None and (draw_at is None or prompt_at <= draw_at):
            job, self._prompt, self._left_tokens = self._prompt, None, 0.0
            return job, None
        ended = heapq.heappop(self._drawing)
        self._context_tokens -= ended.context_tokens
        return None, ended.job

    def left_to_draw(self, job: T, now: float) -> float:
        """Tokens that are still to be drawn by one that draws; 0 for anybody else."""
        self._advance(now)
        return next((d.last_step - self._steps for d in self._drawing if d.job is job), 0.0)

    def _step_s(self) -> float:
        speed = self._speed
        beside = len(self._drawing) * speed.row_s + self._context_tokens * speed.context_token_s
        if self._prompt is None:
            return speed.step_s + beside
        return speed.chunk_tokens / speed.prefill_tokens_per_s + beside

    def _prompt_ends_at(self) -> float | None:
        if self._prompt is None:
            return None
        return self._at + self._left_tokens * self._step_s() / self._speed.chunk_tokens

    def _draw_ends_at(self) -> float | None:
        if not self._drawing:
            return None
        return self._at + max(0.0, self._drawing[0].last_step - self._steps) * self._step_s()

    def _advance(self, now: float) -> None:
        if now > self._at:
            steps = (now - self._at) / self._step_s()
            if self._prompt is not None:
                self._left_tokens = max(0.0, self._left_tokens - steps * self._speed.chunk_tokens)
            self._steps += steps
            self._at = now
