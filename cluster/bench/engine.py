"""One engine, in this process, beside a peer on the same weights and threads, in the same run.

Both sides are timed in turns, so that a noisy neighbour slows both; of all turns the best counts for each.
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.actors.engine.build import build_engine
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.engine import Engine
from shoal.actors.messages import EngineRequest, IngressId, RequestId, SamplingParams
from shoal.cluster.console import write

Phase = Literal["decode", "prefill"]

DECODE_STEPS = 8
"""Steps of one turn, timed together."""
ROUNDS = 5
NEVER_REACHED = 1000
"""Output tokens: a sequence that ends while it is measured would make its batch smaller than is said."""
BENCH = IngressId("bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    phase: Phase
    batch: int
    context: int
    """decode: tokens each sequence holds before the first timed step; prefill: the prompt's length."""


CASES = (
    Case(phase="decode", batch=1, context=256),
    Case(phase="decode", batch=8, context=256),
    Case(phase="decode", batch=32, context=256),
    Case(phase="prefill", batch=1, context=1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    phase: Phase
    batch: int
    context: int
    tokens_per_s: float
    baseline_tokens_per_s: float
    ratio: float


class Contender(Protocol):
    def decode(self, prompts: list[list[int]]) -> Callable[[], None]:
        """Compute the prompts; what is returned takes DECODE_STEPS steps further each time it is called."""
        ...

    def prefill(self, prompt: list[int]) -> None:
        """Compute one prompt up to its first output token."""
        ...


class Shoal:
    """The whole engine, scheduler and sampling included, as its actor drives it.

    Nothing is in flight when a turn ends, so that none of it is computed in the peer's turn.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0

    def decode(self, prompts: list[list[int]]) -> Callable[[], None]:
        self._abort_all()
        for prompt in prompts:
            self._submit(prompt, max_tokens=NEVER_REACHED)
        spoken: set[RequestId] = set()
        while len(spoken) < len(prompts):  # until every prompt has its first token
            spoken.update(reply.chunk.request_id for reply in self._engine.step())

        def steps() -> None:
            for _ in range(DECODE_STEPS):  # the first commits what the turn before has computed
                assert len(self._engine.step()) == len(prompts), "every step decodes the whole batch"
            self._engine.wait()

        self._engine.wait()
        return steps

    def prefill(self, prompt: list[int]) -> None:
        self._abort_all()
        self._submit(prompt, max_tokens=1)
        while self._engine.has_work:
            self._engine.step()

    def _submit(self, prompt: list[int], max_tokens: int) -> None:
        self._num_requests += 1
        request = EngineRequest(
            request_id=RequestId(str(self._num_requests)),
            attempt=1,
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=0.0),
        )
        self._engine.submit(request, BENCH)

    def _abort_all(self) -> None:
        self._engine.abort_all(BENCH)
        while self._engine.has_work:
            self._engine.step()


def bench_engine(config: EngineConfig, baseline: Contender, console: Console) -> list[Row]:
    built = build_engine(config)
    console.print(
        f"{built.backend.name}, {config.threads} threads, {built.memory.describe()}", highlight=False
    )
    shoal = Shoal(built.engine)
    return [_measure(case, shoal, baseline) for case in track(CASES, "measuring", console=console)]


def _measure(case: Case, shoal: Contender, baseline: Contender) -> Row:
    ours, theirs = (_turn(case, contender) for contender in (shoal, baseline))
    best = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for side, turn in enumerate((ours, theirs)):
            started = time.perf_counter()
            turn()
            best[side] = min(best[side], time.perf_counter() - started)
    tokens = case.context if case.phase == "prefill" else case.batch * DECODE_STEPS
    speed, baseline_speed = tokens / best[0], tokens / best[1]
    return Row(
        **asdict(case),
        tokens_per_s=round(speed, 1),
        baseline_tokens_per_s=round(baseline_speed, 1),
        ratio=round(speed / baseline_speed, 2),
    )


def _turn(case: Case, contender: Contender) -> Callable[[], None]:
    """One warmed-up unit of work."""
    words = random.Random(0)
    prompts = [[words.randrange(5, 10_000) for _ in range(case.context)] for _ in range(case.batch)]
    if case.phase == "decode":
        turn = contender.decode(prompts)
    else:

        def turn() -> None:
            contender.prefill(prompts[0])

    turn()
    return turn


def report(rows: list[Row], peer: str, json_file: Path | None, console: Console) -> None:
    table = Table("phase", "batch", "context", "shoal tokens/s", f"{peer} tokens/s", "ratio")
    for row in rows:
        table.add_row(
            row.phase,
            str(row.batch),
            str(row.context),
            f"{row.tokens_per_s:,.1f}",
            f"{row.baseline_tokens_per_s:,.1f}",
            f"{row.ratio:.2f}x",
        )
    console.print(table)
    if json_file is not None:
        write(json_file, json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", console)
