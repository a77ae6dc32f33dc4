"""Dynamo's radix tree under the same work, in an environment of its own: it imports nothing of ours."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

NUM_BLOCKS = 128
"""Of a path, and of a prompt that is looked up."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Paths that have nothing in common. One holder has all of it, the next half, the next a quarter."""

    num_holders: int
    num_paths: int

    def told(self) -> Iterator[tuple[int, int, int]]:
        """(holder, path, leading blocks of it)"""
        for path in range(self.num_paths):
            for further, length in enumerate((NUM_BLOCKS, NUM_BLOCKS // 2, NUM_BLOCKS // 4)):
                yield (path + further) % self.num_holders, path, length


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def event(number: int, path: int, length: int) -> bytes:
    first = path * NUM_BLOCKS
    blocks = [{"block_hash": i, "tokens_hash": i} for i in range(first, first + length)]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def main() -> None:
    # here, not above: who wants the workload alone need not have it
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]  # noqa: PLC0415

    num_holders, num_paths, paths = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    before, tree = memory_mib(), RadixTree()
    told = enumerate(Workload(num_holders=num_holders, num_paths=num_paths).told())
    num_blocks, spent_s = 0, 0.0
    while events := [
        (holder, event(number, path, length), length) for number, (holder, path, length) in islice(told, 1000)
    ]:
        began = time.perf_counter()
        for holder, said, _ in events:
            tree.apply_event(holder, said)
        spent_s += time.perf_counter() - began
        num_blocks += sum(length for _, _, length in events)
    mib, times = memory_mib() - before, []
    for path in paths:
        wanted = list(range(path * NUM_BLOCKS, (path + 1) * NUM_BLOCKS))
        began = time.perf_counter()
        found = tree.find_matches(wanted)
        times.append(1e6 * (time.perf_counter() - began))
        assert max(found.scores.values()) == NUM_BLOCKS and len(found.scores) == min(3, num_holders)
    print(json.dumps({"blocks_per_s": num_blocks / spent_s, "mib": mib, "times_us": sorted(times)}))


if __name__ == "__main__":
    main()
