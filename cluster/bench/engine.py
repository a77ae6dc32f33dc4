"""One engine, in this process, beside peers on the same weights and threads, in the same run.

All are timed in turns, so that a noisy neighbour slows all; of all turns the best counts for each.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shoal.actors.engine.build import build_engine
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.models.decoder_config import load_config, longest_length
from shoal.actors.messages import EngineRequest, IngressId, RequestId, SamplingParams
from shoal.cluster.bench.contender import (
    CASES,
    DECODE_STEPS,
    NEVER_REACHED,
    ROUNDS,
    Case,
    Contender,
    PeerName,
    Phase,
    Turn,
    timed,
)
from shoal.cluster.console import write

MAX_MODEL_LEN = 2048
SETTLE_S = 0.25
"""Between two turns. OpenMP's threads spin for up to 0.2 s behind their work, on cores another needs."""
BENCH = IngressId("bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    phase: Phase
    batch: int
    context: int
    peer: PeerName
    peer_dtype: str
    tokens_per_s: float
    baseline_tokens_per_s: float
    """The peer's."""
    ratio: float


class Shoal:
    """The whole engine, scheduler and sampling included, as its actor drives it.

    Nothing is in flight when a turn ends, so that none of it is computed in a peer's turn.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0

    @property
    def dtype(self) -> str:
        return "as in the checkpoint"

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        """Raises ValueError if the engine has no room for the case."""
        self._abort_all()
        if case.phase == "prefill":
            return timed(lambda: self._prefill(prompts[0]))
        self._start(prompts)
        return timed(lambda: self._decode(case.batch))

    def _start(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self._submit(prompt, max_tokens=NEVER_REACHED)
        spoken: set[RequestId] = set()
        while len(spoken) < len(prompts):  # until every prompt has its first token
            spoken.update(reply.chunk.request_id for reply in self._engine.step())
        self._engine.wait()

    def _decode(self, batch: int) -> None:
        for _ in range(DECODE_STEPS):  # the first commits what the turn before has computed
            assert len(self._engine.step()) == batch, "every step decodes the whole batch"
        self._engine.wait()

    def _prefill(self, prompt: list[int]) -> None:
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
        for reply in self._engine.submit([request], BENCH):
            if reply.chunk.error is not None:
                raise ValueError(f"this case cannot be measured: {reply.chunk.error.message}")

    def _abort_all(self) -> None:
        self._engine.abort_all(BENCH)
        while self._engine.has_work:
            self._engine.step()


def bench_engine(
    checkpoint: Path, threads: int, peers: Mapping[PeerName, Contender], console: Console
) -> list[Row]:
    """Of each case one row a peer. Raises ValueError, PeerError with a message for the operator."""
    hf = load_config(checkpoint)
    needed = max(case.context for case in CASES) + 1
    if longest_length(hf) < needed:
        raise ValueError(f"sequences of {needed} tokens are measured; this model has {longest_length(hf)}")
    config = EngineConfig(
        checkpoint=str(checkpoint),
        max_model_len=min(MAX_MODEL_LEN, longest_length(hf)),
        memory_bytes=4 << 30,
        threads=threads,
        prefix_cache="naive",  # the same prompt is measured again and again
    )
    built = build_engine(config)
    console.print(f"{built.backend.name}, {threads} threads, {built.memory.describe()}", highlight=False)
    shoal = Shoal(built.engine)
    rows: list[Row] = []
    with Progress(console=console) as progress:
        for case in progress.track(CASES, description="measuring"):
            prompts = case.prompts(hf.vocab_size)
            rows += measure(case, prompts, shoal, peers, lambda: time.sleep(SETTLE_S))
    return rows


def measure(
    case: Case,
    prompts: list[list[int]],
    shoal: Contender,
    peers: Mapping[PeerName, Contender],
    settle: Callable[[], None],
) -> list[Row]:
    turns = [contender.turn(case, prompts) for contender in (shoal, *peers.values())]
    ours, *theirs = (case.turn_tokens / best_s for best_s in _best_of_rounds(turns, settle))
    return [
        Row(
            **asdict(case),
            peer=name,
            peer_dtype=peer.dtype,
            tokens_per_s=round(ours, 1),
            baseline_tokens_per_s=round(speed, 1),
            ratio=round(ours / speed, 2),
        )
        for (name, peer), speed in zip(peers.items(), theirs, strict=True)
    ]


def _best_of_rounds(turns: Sequence[Turn], settle: Callable[[], None]) -> list[float]:
    """Seconds of each one's fastest turn."""
    best = [math.inf] * len(turns)
    for _ in range(ROUNDS):
        for i, turn in enumerate(turns):
            settle()
            best[i] = min(best[i], turn())
    return best


def report(rows: Sequence[Row], json_file: Path | None, console: Console) -> None:
    peers = {row.peer: row.peer_dtype for row in rows}
    columns = [column for peer, dtype in peers.items() for column in (f"{peer} ({dtype})", "ratio")]
    table = Table("phase", "batch", "context", "shoal tokens/s", *columns)
    for start in range(0, len(rows), len(peers)):
        of_case = rows[start : start + len(peers)]
        first = of_case[0]
        cells = [
            cell for row in of_case for cell in (f"{row.baseline_tokens_per_s:,.1f}", f"{row.ratio:.2f}x")
        ]
        table.add_row(first.phase, str(first.batch), str(first.context), f"{first.tokens_per_s:,.1f}", *cells)
    console.print(table)
    if json_file is not None:
        write(json_file, json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", console)
