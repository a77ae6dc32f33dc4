"""The router's index with many holders and millions of keys: what is heard, looked up and placed.

    python -m tests.bench.index [--holders 64] [--keys 4000000] [--peer PYTHON]

PYTHON is an interpreter of an environment with `ai-dynamo-runtime`: its radix tree is told the same, in the
same run. Its find is one lookup; our placement is a lookup and a choice among all engines with their loads.
"""

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from shoal.actors.messages import (
    EngineId,
    EngineInfo,
    EngineReport,
    PlacementRequest,
    PrefixSnapshot,
    RequestId,
)
from shoal.actors.router.members import Members
from shoal.actors.router.placement import Placer
from shoal.kvstore.block_hash import KEY_BYTES, BlockKey
from tests.bench.index_dynamo import NUM_BLOCKS, Workload, memory_mib

BLOCK_SIZE = 128


def engine_id(holder: int) -> EngineId:
    return EngineId(f"engine-{holder}")


def keys(path: int, length: int) -> tuple[BlockKey, ...]:
    """Other objects each time, as they come out of a message."""
    first = path * NUM_BLOCKS
    return tuple(BlockKey(i.to_bytes(KEY_BYTES, "big")) for i in range(first, first + length))


class Index:
    def __init__(self, num_holders: int) -> None:
        self._now = 0.0
        self._sequences = [0] * num_holders
        self.members = Members(lambda: self._now)
        self._placer = Placer(self.members, block_size=BLOCK_SIZE, clock=lambda: self._now)
        self.members.set_engines(
            EngineInfo(engine_id=engine_id(i), node=f"node-{i // 8}", backend="", memory="", fingerprint=b"")
            for i in range(num_holders)
        )
        for holder in self.members.take_snapshot_requests():
            self.members.restore(PrefixSnapshot(engine_id=EngineId(holder), sequence=0, block_keys=()))

    def report(self, holder: int, path: int, length: int) -> EngineReport:
        self._sequences[holder] += 1
        return EngineReport(
            engine_id=engine_id(holder),
            sequence=self._sequences[holder],
            num_requests=8,
            uncomputed_tokens=1000,
            tokens_per_s=10_000.0,
            received=(),
            stored=keys(path, length),
        )

    def request(self, path: int) -> PlacementRequest:
        self._now += 0.05  # twenty requests a second
        return PlacementRequest(
            request_id=RequestId(f"r{self._now}"),
            attempt=1,
            num_prompt_tokens=NUM_BLOCKS * BLOCK_SIZE + 1,
            block_keys=keys(path, NUM_BLOCKS),
        )

    def place(self, request: PlacementRequest) -> None:
        assert self._placer.place(request) is not None


def fill(index: Index, workload: Workload) -> float:
    """Blocks heard a second."""
    told: Iterator[tuple[int, int, int]] = workload.told()
    num_blocks, spent_s = 0, 0.0
    while reports := [index.report(*said) for said in islice(told, 1000)]:
        began = time.perf_counter()
        for report in reports:
            index.members.report(report)
        spent_s += time.perf_counter() - began
        num_blocks += sum(len(report.stored) for report in reports)
    return num_blocks / spent_s


def times_us(index: Index, paths: list[int], work: Callable[[PlacementRequest], object]) -> list[float]:
    times = []
    for path in paths:
        request = index.request(path)
        began = time.perf_counter()
        work(request)
        times.append(1e6 * (time.perf_counter() - began))
    return sorted(times)


def show(name: str, times: list[float]) -> None:
    print(f"  {name:<28} p50 {times[len(times) // 2]:8.1f} us   p99 {times[99 * len(times) // 100]:8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--holders", type=int, default=64)
    parser.add_argument("--keys", type=int, default=4_000_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--peer")
    options = parser.parse_args()
    workload = Workload(num_holders=options.holders, num_paths=options.keys // NUM_BLOCKS)
    before = memory_mib()
    index = Index(options.holders)
    heard = fill(index, workload)
    index.members.check()
    size = index.members.directory.size
    print(f"Shoal: {size.num_keys:,} keys of {size.num_holders} holders, {size.num_entries:,} entries")
    print(f"  heard {heard:,.0f} blocks/s; {memory_mib() - before:,.0f} MiB (says {size.num_bytes >> 20:,})")
    paths = random.Random(1).choices(range(workload.num_paths), k=options.queries)
    directory = index.members.directory
    show("match 128 blocks", times_us(index, paths, lambda request: directory.match(request.block_keys)))
    show("place 128 blocks", times_us(index, paths, index.place))
    if options.peer:
        script = Path(__file__).with_name("index_dynamo.py")
        command = [
            options.peer,
            str(script),
            str(options.holders),
            str(workload.num_paths),
            json.dumps(paths),
        ]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"Dynamo: heard {said['blocks_per_s']:,.0f} blocks/s; {said['mib']:,.0f} MiB")
        show("find 128 blocks", said["times_us"])


if __name__ == "__main__":
    main()
