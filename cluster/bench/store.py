"""What saving and fetching cost, beside copying memory and a plain socket in the same run.

Engines without a model (`bytes_engine`) on two nodes of a private Ray save to and fetch from one store, in
turns with the two baselines, each time under other names. Both nodes are on this machine: what is called
another node's is all that a network would be asked to carry, over loopback.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import EngineId
from shoal.cluster.bench.bytes_engine import BytesEngine
from shoal.cluster.bench.decode_beside_saving import decode_beside_saving
from shoal.cluster.bench.two_nodes import actor_on, two_nodes
from shoal.cluster.console import write
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.messages import StoreId

OBJECT_STORE_BYTES, BUDGET_BYTES = 1 << 30, 512 << 20
DEADLINE_S = 60.0
STORE = StoreId("store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    what: str
    num_blocks: int
    block_bytes: int
    rounds: int


CASES = (
    Case(what="a state segment", num_blocks=1, block_bytes=1_415_040, rounds=100),
    Case(what="2,048 tokens of SmolLM2", num_blocks=16, block_bytes=128 * 46_080, rounds=20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    operation: str
    num_bytes: int
    p50_ms: float
    p99_ms: float
    bytes_per_s: float
    """At p50."""
    over_tcp: float
    """Times what the plain socket took, at p50."""


def bench_store(config: EngineConfig | None, console: Console) -> dict[str, Any]:
    """config: of an engine whose decoding is measured beside saving; None measures none."""
    with two_nodes(OBJECT_STORE_BYTES) as (here, there):
        store = actor_on(here, StoreActor, STORE, BUDGET_BYTES)
        ray.get(store.start.remote(), timeout=DEADLINE_S)
        rows = [row for case in CASES for row in _measure(case, store, here, there, console)]
        decode = None if config is None else decode_beside_saving(config, store, STORE, here, console)
    return {"rows": [asdict(row) for row in rows], "decode": None if decode is None else asdict(decode)}


def _measure(case: Case, store: Any, here: str, there: str, console: Console) -> list[Row]:
    writer, neighbour, remote = (
        actor_on(
            node,
            BytesEngine,
            EngineId(f"{name} of {case.what}"),
            num_blocks=case.num_blocks,
            block_bytes=case.block_bytes,
        )
        for name, node in (("writer", here), ("neighbour", here), ("remote", there))
    )
    engines = [writer, neighbour, remote]
    ray.get([engine.start.remote() for engine in engines], timeout=DEADLINE_S)
    for engine in engines:
        ray.get(engine.use_stores.remote({STORE: store}, STORE if engine is writer else None))
    port = ray.get(writer.serve_tcp.remote(), timeout=DEADLINE_S)
    names = (
        [BlockKey(f"{case.what} {turn} {i}".encode()) for i in range(case.num_blocks)] for turn in count()
    )

    def save(keys: list[BlockKey]) -> float:
        seconds = float(ray.get(writer.save.remote(keys), timeout=DEADLINE_S))
        _, lost = ray.get(writer.counts.remote(), timeout=DEADLINE_S)
        if lost:
            raise RuntimeError(f"bytes were lost: {lost}")
        return seconds

    def fetch(engine: Any, keys: list[BlockKey]) -> float:
        seconds, failure = ray.get(engine.fetch.remote(STORE, keys), timeout=DEADLINE_S)
        if failure is not None:
            raise RuntimeError(f"a fetch failed: {failure}")
        taken: float = seconds
        return taken

    operations: dict[str, Callable[[list[BlockKey]], float]] = {
        "save": save,
        "fetch, own node": lambda keys: fetch(neighbour, keys),
        "fetch, other node": lambda keys: fetch(remote, keys),
        "TCP": lambda _: float(ray.get(remote.receive_tcp.remote(port, case.num_blocks), timeout=DEADLINE_S)),
        "memcpy": lambda _: float(ray.get(writer.memcpy.remote(case.num_blocks), timeout=DEADLINE_S)),
    }
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for turn in track(range(case.rounds + 1), case.what, console=console):
        keys = next(names)
        for name, operation in operations.items():
            seconds = operation(keys)
            if turn:  # the first warms up
                taken[name].append(seconds)
    for engine in engines:
        ray.kill(engine)
    num_bytes = case.num_blocks * case.block_bytes
    tcp_s = _quantile(taken["TCP"], 0.5)
    return [_row(case.what, name, num_bytes, seconds, tcp_s) for name, seconds in taken.items()]


def _row(what: str, operation: str, num_bytes: int, seconds: list[float], tcp_s: float) -> Row:
    p50_s = _quantile(seconds, 0.5)
    return Row(
        what=what,
        operation=operation,
        num_bytes=num_bytes,
        p50_ms=round(p50_s * 1e3, 2),
        p99_ms=round(_quantile(seconds, 0.99) * 1e3, 2),
        bytes_per_s=round(num_bytes / p50_s),
        over_tcp=round(p50_s / tcp_s, 2),
    )


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[max(0, -(-int(share * 100) * len(values) // 100) - 1)]


def report(result: dict[str, Any], json_file: Path | None, console: Console) -> None:
    table = Table("bytes of", "operation", "p50 ms", "p99 ms", "MB/s", "of TCP's time")
    for row in result["rows"]:
        table.add_row(
            f"{row['what']} ({row['num_bytes']:,})",
            row["operation"],
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['bytes_per_s'] / 1e6:,.0f}",
            f"{row['over_tcp']:.2f}x",
        )
    console.print(table)
    if decode := result["decode"]:
        console.print(
            f"decode: {decode['tokens_per_s']:.1f} tokens/s, {decode['saving_tokens_per_s']:.1f} while "
            f"{decode['saved_bytes'] / 1e6:,.0f} MB are saved: {decode['cost']:.1%} slower",
            highlight=False,
        )
    if json_file is not None:
        write(json_file, json.dumps(result, indent=2) + "\n", console)
