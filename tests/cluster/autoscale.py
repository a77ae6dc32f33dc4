"""Load rises and falls on a cluster that scales itself, on a Ray whose autoscaler adds and removes nodes.

    python -m tests.cluster.autoscale --json grown.json --plot grown.png

Engines and nodes must come and go with the load, no request may fail, and each must be answered with what it
is answered with in peace.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray

from tests.checkpoints import tiny_llama
from tests.cluster.growing_ray import growing_ray
from tests.cluster.served import Served, wait_for
from tests.cluster.streamed import Body, Said, bodies, events, heard, spoken

TARGET = 4
"""Requests on an engine,"""
SLOTS = 6
"""and sequences that it computes at once, as some requests have several choices: the others wait."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    at_s: float
    clients: int
    engines: int
    """Ready."""
    draining: int
    nodes: int
    """Beside the head."""


@dataclass
class Load:
    """So many clients, each asks again when it is answered."""

    url: str
    asked: list[Body]
    undisturbed: list[Said]
    began: float = field(default_factory=time.monotonic)
    wanted: int = 0
    ttfts: list[tuple[float, float]] = field(default_factory=list)
    """(when it was asked, seconds until its first token), of whole answers"""
    num_asked: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(64)
        self._clients: list[Future[None]] = []

    def become(self, clients: int) -> None:
        self.wanted = clients
        for number in range(len(self._clients), clients):
            self._clients.append(self._pool.submit(self._client, number))

    def end(self) -> None:
        self.become(0)
        for client in self._clients:
            client.result(timeout=120)

    def _client(self, number: int) -> None:
        while self.wanted:
            if number >= self.wanted:
                time.sleep(0.05)
                continue
            which = number % len(self.asked)
            self.num_asked += 1
            timed = Timed(events(self.url, self.asked[which]))
            try:
                said = heard(iter(timed))
            except Exception as error:  # whatever it is, a client had no answer
                self.failures.append(f"{type(error).__name__}: {error}"[:500])
            else:
                if said != self.undisturbed[which]:
                    self.failures.append(f"another answer: {self.asked[which]}"[:500])
                self.ttfts.append((timed.began - self.began, timed.first_s))


class Timed:
    """A stream's events, and how long its first token took."""

    def __init__(self, stream: Iterator[httpx.Headers | Body]) -> None:
        self._stream = stream
        self.began = time.monotonic()
        self.first_s = 0.0

    def __iter__(self) -> Iterator[httpx.Headers | Body]:
        for event in self._stream:
            if not self.first_s and not isinstance(event, httpx.Headers):
                self.first_s = time.monotonic() - self.began
            yield event


class Watcher:
    """A moment each second."""

    def __init__(self, url: str, load: Load) -> None:
        self.moments: list[Moment] = []
        self._url = url
        self._load = load
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def now(self) -> Moment:
        return self.moments[-1]

    def end(self) -> None:
        self._ended.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            phases = _phases(self._url)
            alive = sum(node["Alive"] for node in ray.nodes()) - 1  # type: ignore[no-untyped-call]
            moment = Moment(
                at_s=round(time.monotonic() - self._load.began, 1),
                clients=self._load.wanted,
                engines=phases.count("ready"),
                draining=phases.count("draining"),
                nodes=alive,
            )
            if not self.moments or asdict(moment) | {"at_s": 0} != asdict(self.now) | {"at_s": 0}:
                print(moment, flush=True)
            self.moments.append(moment)


def _phases(url: str) -> list[str]:
    status: dict[str, Any] = httpx.get(f"{url}/admin/status", timeout=20).json()
    return [engine["phase"] for model in status["models"] for engine in model["engines"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-engines", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    worker = {"CPU": 1, "memory": 400 << 20, "object_store_memory": 100 << 20}
    with (
        tempfile.TemporaryDirectory() as folder,
        growing_ray(worker, max_workers=args.max_engines, idle_s=6.0) as address,
    ):
        ray.init(address=address, log_to_driver=False)
        checkpoint = tiny_llama(Path(folder), max_position_embeddings=4096)
        flags = ("--max-engines", str(args.max_engines), "--target-ongoing-requests", str(TARGET))
        delays = ("--upscale-delay", "2", "--downscale-delay", "10")
        slots = ("--max-num-seqs", str(SLOTS))
        with Served.start(checkpoint, address, *flags, *delays, *slots) as served:
            served.wait_until_ready()
            return _run(served, args)


def _run(served: Served, args: argparse.Namespace) -> int:
    asked = bodies(served.url, 8, args.tokens)
    load = Load(served.url, asked, [spoken(served.url, body) for body in asked])
    watcher = Watcher(served.url, load)
    load.become(2)
    time.sleep(10)
    load.become(TARGET * args.max_engines)
    wait_for(lambda: watcher.now.engines == args.max_engines, "engines for the load", within_s=180)
    time.sleep(15)
    load.become(2)
    wait_for(lambda: watcher.now.engines == 1 and not watcher.now.draining, "the others go", within_s=180)
    wait_for(lambda: watcher.now.nodes == 1, "their nodes are given back", within_s=180)
    time.sleep(3)
    load.end()
    watcher.end()
    print(f"{load.num_asked} requests, {len(load.failures)} failures")
    for failure in load.failures[:5]:
        print(failure)
    if args.json:
        measured = {"moments": [asdict(m) for m in watcher.moments], "ttfts": load.ttfts}
        args.json.write_text(json.dumps(measured | {"failures": load.failures}, indent=1))
    if args.plot:
        _draw(args.plot, watcher.moments, load.ttfts)
    return 1 if load.failures else 0


def _draw(path: Path, moments: list[Moment], ttfts: list[tuple[float, float]]) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True)
    at = [moment.at_s for moment in moments]
    above.step(at, [moment.clients for moment in moments], where="post", label="clients")
    target = [TARGET * moment.engines for moment in moments]
    above.step(at, target, where="post", label="the engines' target", linestyle="--")
    above.set_ylabel("requests")
    above.legend(loc="upper right")
    middle.step(at, [moment.engines for moment in moments], where="post", label="engines ready")
    middle.step(at, [moment.draining for moment in moments], where="post", label="engines draining")
    middle.step(at, [moment.nodes for moment in moments], where="post", label="nodes", linestyle="--")
    middle.set_ylabel("count")
    middle.legend(loc="upper left")
    below.plot(*zip(*ttfts, strict=True), ".", markersize=3)
    below.set_ylabel("seconds to the first token")
    below.set_xlabel("seconds")
    for axes in (above, middle, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
