"""What the kernels reach of what the machine can do: `python -m tests.bench.kernels [--json FILE]`.

The ceilings, memory reads and fused multiply-adds of all threads, are measured between the kernels, so that
other load on the machine weighs on both. A kernel's floor is the longer of what its bytes and what its
operations take at the ceilings; 100% is a kernel at its floor.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.bench.ceilings import Ceilings
from tests.bench.kernel_cases import Case, World, cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    kernel: str
    shape: str
    us: float
    gigabytes_per_s: float
    gigaflops: float
    of_floor: float | None
    """The floor's share of the time; None where neither bytes nor operations are counted."""
    bound: str


def measure(world: World, ceilings: Ceilings, seconds: float) -> list[Measured]:
    timed: list[tuple[Case, float]] = []
    for make in cases(world):
        for case in make():
            ceilings.measure()
            timed.append((case, best_s(case.run, seconds)))
            print(f"{case.kernel}, {case.shape}: {timed[-1][1] / case.times * 1e6:.1f} µs", flush=True)
    return [judge(case, taken_s, ceilings) for case, taken_s in timed]


def best_s(run: Callable[[], object], seconds: float) -> float:
    run()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def judge(case: Case, taken_s: float, ceilings: Ceilings) -> Measured:
    floors = {"memory": case.num_bytes / ceilings.bytes_per_s, "fma": case.flops / ceilings.flops_per_s}
    bound = max(floors, key=lambda name: floors[name])
    counted = floors[bound] > 0
    return Measured(
        kernel=case.kernel,
        shape=case.shape,
        us=taken_s / case.times * 1e6,
        gigabytes_per_s=case.num_bytes / taken_s / 1e9,
        gigaflops=case.flops / taken_s / 1e9,
        of_floor=floors[bound] / taken_s if counted else None,
        bound=bound if counted else "",
    )


def table(measured: list[Measured]) -> str:
    lines = ["| kernel | shape | µs | GB/s | GFLOP/s | of its floor | bound by |", f"|{'---|' * 7}"]
    for m in measured:
        speeds = " | ".join(f"{x:.0f}" if x >= 1 else "" for x in (m.gigabytes_per_s, m.gigaflops))
        share = "" if m.of_floor is None else f"{m.of_floor:.0%}"
        lines.append(f"| {m.kernel} | {m.shape} | {m.us:.0f} | {speeds} | {share} | {m.bound} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kernel")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # its threads would spin on the cores that are measured
    world = World(args.threads)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        ceilings = Ceilings(args.threads, Path(directory))
        measured = measure(world, ceilings, args.seconds)
    reads, fma = ceilings.bytes_per_s / 1e9, ceilings.flops_per_s / 1e9
    print(f"\n{world.backend.name}, {args.threads} threads: reads {reads:.1f} GB/s, fma {fma:.0f} GFLOP/s\n")
    print(table(measured))
    if args.json:
        figures = {
            "backend": world.backend.name,
            "threads": args.threads,
            "read_gigabytes_per_s": reads,
            "fma_gigaflops": fma,
            "kernels": [asdict(m) for m in measured],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
