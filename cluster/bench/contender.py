"""What `shoal bench engine` measures: the cases, and what whoever takes part in them must be able to do."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

Phase = Literal["decode", "prefill"]
Dtype = Literal["float32", "bfloat16", "float16"]

DECODE_STEPS = 8
"""Steps of one turn, timed together."""
ROUNDS = 5
MEASURED_STEPS = DECODE_STEPS * (ROUNDS + 1)
"""One turn more warms up."""
NEVER_REACHED = 256
"""Output tokens: more than MEASURED_STEPS and what the first sequences speak while the last ones' prompts are
computed. One that ended would make its batch smaller than is said."""
Turn = Callable[[], float]
"""One turn, and the seconds it took."""


class PeerName(StrEnum):
    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"


class PeerError(Exception):
    """A peer cannot take part; one line for the operator, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    phase: Phase
    batch: int
    context: int
    """decode: tokens each sequence holds before the first timed step; prefill: the prompt's length."""

    @property
    def turn_tokens(self) -> int:
        """That one turn computes."""
        return self.context if self.phase == "prefill" else self.batch * DECODE_STEPS

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Ordinary tokens, if the vocabulary has so many: special ones stand before or far behind."""
        words = random.Random(0)
        last = min(vocab_size, 10_000)
        return [[words.randrange(5, last) for _ in range(self.context)] for _ in range(self.batch)]


CASES = (
    Case(phase="decode", batch=1, context=256),
    Case(phase="decode", batch=8, context=256),
    Case(phase="decode", batch=32, context=256),
    Case(phase="prefill", batch=1, context=128),
    Case(phase="prefill", batch=1, context=1024),
)


class Contender(Protocol):
    @property
    def dtype(self) -> str:
        """Of the weights it computes with."""
        ...

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        """A warmed-up turn of a case; ends the case before it.

        decode: DECODE_STEPS steps of the whole batch, which goes on where the turn before it ended;
        prefill: the prompt, up to its first output token.
        """
        ...


def timed(work: Callable[[], None]) -> Turn:
    """A turn that is measured in this process. It is taken once before it is returned."""

    def turn() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    turn()
    return turn
