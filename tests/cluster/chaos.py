"""Streams that go on while one actor after another is killed: `python -m tests.cluster.chaos`.

Every stream is asked for again and again until the last actor is replaced, and each time it must say what it
said before anything was killed: no error, nothing twice, nothing lost. When its engine was killed, no more of
it may be computed again than a block and what no store had.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from shoal.actors.ingress.dispatch import PlacedBy
from tests.checkpoints import smollm2, tiny_llama
from tests.cluster.continued import continuations, described, let_engines_fetch_all, watch
from tests.cluster.served import Served, private_ray, wait_for
from tests.cluster.streamed import Body, Said, bodies, spoken

ROLES = ("engine", "router", "store", "supervisor")
REPLACED_WITHIN_S = 180.0


@dataclass
class Streams:
    """Runs each of the bodies in a thread of its own, over and over, and compares."""

    url: str
    bodies: Sequence[Body]
    expected: list[Said] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_complete: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run_undisturbed(self) -> None:
        with ThreadPoolExecutor(len(self.bodies)) as pool:
            self.expected = list(pool.map(lambda body: spoken(self.url, body), self.bodies))

    def run_beside(self, disturb: Callable[[], None]) -> None:
        """Until it has returned, and every stream has ended. Raises what it raised."""
        threads = [threading.Thread(target=self._repeat, args=(i,)) for i in range(len(self.bodies))]
        for thread in threads:
            thread.start()
        try:
            disturb()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _repeat(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                said = spoken(self.url, self.bodies[index])
            except Exception as error:
                self._fail(index, f"{type(error).__name__}: {error}")
                time.sleep(1.0)
                continue
            if said != self.expected[index]:
                self._fail(index, f"said {said}\ninstead of {self.expected[index]}")
            with self._lock:
                self.num_complete += 1

    def _fail(self, index: int, message: str) -> None:
        with self._lock:
            self.failures.append(f"stream {index} ({self.bodies[index]}): {message}")


@dataclass(frozen=True, kw_only=True)
class Blow:
    """Ends, or stops, a process of that role, if possible one that streams depend on."""

    role: str
    signal: signal.Signals

    def strike(self, served: Served) -> Callable[[], bool]:
        """What is returned says whether the cluster is whole again: the victim has a successor, and everybody
        knows everybody."""
        victim = self._victim(served)
        before = served.pid(victim)
        os.kill(before, self.signal)

        def is_replaced() -> bool:
            if self.role in ("engine", "store"):
                return victim not in served.names()
            return served.pid(victim) != before

        return lambda: _is_true(is_replaced) and _is_true(lambda: is_whole(served))

    def _victim(self, served: Served) -> str:
        if self.role == "engine":
            names = served.engine_names()
            return max(names, key=partial(_num_requests, served))
        return served.store_names()[0] if self.role == "store" else self.role


def is_whole(served: Served) -> bool:
    ready, on_router = served.ready_engines(), served.loads()
    return (
        bool(ready) and ready == set(on_router) and bool(served.store_names()) and served.get("/ready") == 200
    )


def _num_requests(served: Served, engine: str) -> int:
    try:
        return int(ray.get(served.actor(engine).health.remote(), timeout=10).num_requests)
    except (ValueError, ray.exceptions.RayError):
        return 0


def _is_true(condition: Callable[[], bool]) -> bool:
    """An actor that is not there yet has no answer."""
    try:
        return condition()
    except (ValueError, ray.exceptions.RayError):
        return False


def disturb(served: Served, blows: Sequence[Blow], say: Callable[[str], None], pause_s: float = 1.0) -> None:
    """One blow after another, each when the cluster is whole again and streams have run a while."""
    for blow in blows:
        let_engines_fetch_all(served)
        time.sleep(pause_s)
        started = time.monotonic()
        wait_for(blow.strike(served), f"{blow} is mended", within_s=REPLACED_WITHIN_S)
        say(f"{blow.signal.name} {blow.role}: whole again after {time.monotonic() - started:.1f} s")


def metric(served: Served, name: str, **labels: str) -> float:
    """The sum of its series that have these labels."""
    families = text_string_to_metric_families(httpx.get(f"{served.url}/metrics", timeout=10).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--blows", type=int, default=10)
    parser.add_argument("--hang", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    blows = [
        Blow(role=ROLES[i % len(ROLES)], signal=signal.SIGSTOP if args.hang else signal.SIGKILL)
        for i in range(args.blows)
    ]
    with tempfile.TemporaryDirectory() as folder, private_ray() as address:
        checkpoint = (
            tiny_llama(Path(folder), max_position_embeddings=4096) if args.model == "tiny" else smollm2()
        )
        memory = "300MiB" if args.model == "tiny" else "1GiB"
        flags = ("--max-model-len", "1024", "--memory", memory, "--max-num-seqs", str(args.streams + 8))
        with Served.start(checkpoint, address, *flags, engines=args.engines) as served:
            served.wait_until_ready()
            watch(served)
            return _run(served, args, blows)


def _run(served: Served, args: argparse.Namespace, blows: Sequence[Blow]) -> int:
    streams = Streams(served.url, bodies(served.url, args.streams, args.tokens, seed=args.seed))
    started = time.monotonic()
    streams.run_undisturbed()
    print(f"undisturbed: {args.streams} streams in {time.monotonic() - started:.1f} s", flush=True)
    streams.run_beside(lambda: disturb(served, blows, partial(print, flush=True)))
    wait_for(served.is_clean, "everything is returned")
    blind = sum(metric(served, "shoal_placements_total", by=by) for by in PlacedBy if by.is_blind)
    print(f"{streams.num_complete} streams complete, {len(streams.failures)} failures; {blind:.0f} blind")
    costs = continuations(served)
    print("\n".join(described(costs)))
    for failure in streams.failures[:5]:
        print(failure[:2000])
    return 1 if streams.failures or any(cost.num_too_many for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())
