"""What the front door costs: with an engine that answers at once, all that is left is the way there.

Asked are, in turns, an HTTP server that answers at once, directly; our ingress, router and Ray in front of an
engine actor that does; and routers of other projects in front of that HTTP server. One client after the other
tells the added time of a request, many at once the requests a second. The client is this process: it shares
the machine with all of them.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles

import aiohttp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.cluster.bench.serve.dialogue import Dialogue
from shoal.cluster.bench.serve.workload import Lengths, Workload, WorkloadConfig
from shoal.cluster.console import write

DIRECT = "direct"
ANSWER_DEADLINE_S = 30.0
WARM_UP_REQUESTS = 50
SAVED_BODIES = 512
"""So many prompts are made before the clock runs, since making one takes time; then they are asked again."""


class OverheadError(Exception):
    """A server did not answer as it should; one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rounds: int = 3
    """Of all servers; the best of each one's counts."""
    requests: int = 300
    """Of one client, one after the other."""
    concurrency: int = 32
    requests_at_once: int = 1500
    input_len: int = 128
    """Words of a prompt, about as many tokens."""

    def __post_init__(self) -> None:
        for name in ("rounds", "requests", "concurrency", "requests_at_once", "input_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.requests < 2:
            raise ValueError("--requests must be at least 2: there is no median of one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Of one server in one round."""

    latencies_s: tuple[float, ...]
    """Of one client's requests."""
    requests_per_s: float
    """Of many clients."""

    @property
    def p50_s(self) -> float:
        return quantiles(self.latencies_s, n=100)[49]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    server: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    """Of the round whose median was the lowest."""
    added_p50_ms: float | None
    """Over the server asked directly; None for that one."""
    requests_per_s: float


def bodies(model: str, plan: Plan) -> list[bytes]:
    """Requests for one token, each with a prompt of its own."""
    length = Lengths(plan.input_len, plan.input_len)
    workload = Workload(WorkloadConfig(input_len=length, output_len=Lengths(1, 1)))
    sessions = map(workload.session, range(SAVED_BODIES))
    asked = [Dialogue(session, "completions").ask(session.turns[0]) for session in sessions]
    return [json.dumps({"model": model, "temperature": 0, "seed": 0, **fields}).encode() for fields in asked]


def measure(servers: Mapping[str, str], model: str, plan: Plan, console: Console) -> list[Row]:
    """servers: URLs by name, DIRECT among them. Raises OverheadError."""
    asked = bodies(model, plan)
    turns: dict[str, list[Turn]] = {server: [] for server in servers}
    rounds = list(itertools.product(range(plan.rounds), servers))
    for _, server in track(rounds, "asking", console=console):
        turns[server].append(asyncio.run(_turn(server, servers[server], asked, plan)))
    return rows_of(turns)


def rows_of(turns: Mapping[str, Sequence[Turn]]) -> list[Row]:
    best = {server: min(taken, key=lambda turn: turn.p50_s) for server, taken in turns.items()}
    return [_row(server, best[server], turns[server], best[DIRECT]) for server in turns]


def _row(server: str, best: Turn, turns: Sequence[Turn], direct: Turn) -> Row:
    cuts = quantiles(best.latencies_s, n=100)
    return Row(
        server=server,
        p50_ms=round(cuts[49] * 1e3, 2),
        p90_ms=round(cuts[89] * 1e3, 2),
        p99_ms=round(cuts[98] * 1e3, 2),
        added_p50_ms=None if server == DIRECT else round((best.p50_s - direct.p50_s) * 1e3, 2),
        requests_per_s=round(max(turn.requests_per_s for turn in turns), 1),
    )


async def _turn(server: str, url: str, asked: Sequence[bytes], plan: Plan) -> Turn:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_DEADLINE_S)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:
        client = _Client(server, http, f"{url}/v1/completions", itertools.cycle(asked))
        await client.ask(WARM_UP_REQUESTS)
        latencies_s = await client.ask(plan.requests)
        share = -(-plan.requests_at_once // plan.concurrency)
        await asyncio.gather(*(client.ask(1) for _ in range(plan.concurrency)))  # they connect
        began = time.perf_counter()
        await asyncio.gather(*(client.ask(share) for _ in range(plan.concurrency)))
        taken_s = time.perf_counter() - began
    return Turn(latencies_s=tuple(latencies_s), requests_per_s=share * plan.concurrency / taken_s)


class _Client:
    def __init__(self, server: str, http: aiohttp.ClientSession, url: str, asked: Iterator[bytes]) -> None:
        self._server = server
        self._http = http
        self._url = url
        self._asked = asked

    async def ask(self, times: int) -> list[float]:
        """One after the other; how long each took. Raises OverheadError."""
        return [await self._ask() for _ in range(times)]

    async def _ask(self) -> float:
        began = time.perf_counter()
        try:
            async with self._http.post(self._url, data=next(self._asked)) as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OverheadError(f"{self._server}: {type(error).__name__}: {error}") from error
        taken_s = time.perf_counter() - began
        if response.status != 200:
            raise OverheadError(f"{self._server}: {response.status}: {said[:200].decode(errors='replace')}")
        return taken_s


def report(rows: Sequence[Row], plan: Plan, json_file: Path | None, console: Console) -> None:
    table = Table("asked", "p50 ms", "p90 ms", "p99 ms", "added p50 ms", f"requests/s of {plan.concurrency}")
    for row in rows:
        added = "" if row.added_p50_ms is None else f"{row.added_p50_ms:.2f}"
        figures = (f"{row.p50_ms:.2f}", f"{row.p90_ms:.2f}", f"{row.p99_ms:.2f}")
        table.add_row(row.server, *figures, added, f"{row.requests_per_s:,.0f}")
    console.print(table)
    if json_file is not None:
        said = {"plan": asdict(plan), "rows": [asdict(row) for row in rows]}
        write(json_file, json.dumps(said, indent=2) + "\n", console)
