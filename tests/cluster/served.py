"""`shoal serve` as a child process, and a look at its actors from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

import httpx
import ray
from openai import OpenAI
from ray.util import list_named_actors

from shoal.cluster.bench.two_nodes import private_ray as one_node

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token under the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

ROOT = Path(__file__).parents[2]
READY_DEADLINE_S = 120.0


@contextmanager
def private_ray(*, object_store_bytes: int | None = 200 << 20) -> Iterator[str]:
    """Of one node with eight CPUs, whatever the machine has; yields its address. None: as Ray chooses."""
    os.environ["PYTHONPATH"] = str(ROOT / ".src")  # for Ray's workers, where shoal is not installed
    with one_node(num_cpus=8, object_store_bytes=object_store_bytes) as address:
        yield address


def wait_for(condition: Callable[[], Any], what: str, *, within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return result


def shoal(*words: str) -> list[str]:
    """The command, as from a shell."""
    return [sys.executable, "-m", "shoal.cluster", *words]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "200"}


def serve_command(checkpoint: Path, address: str, *flags: str, engines: int, name: str) -> list[str]:
    limits = ("--threads", "1", "--memory", "300MiB", "--max-num-seqs", "8", "--block-size", "16")
    where = ("--port", "0", "--address", address, "--name", name, "--engines", str(engines))
    return shoal("serve", str(checkpoint), *where, *limits, *flags)


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    name: str
    _log: IO[bytes]
    urls: tuple[str, ...] = ()
    """One an ingress."""
    clients: list[OpenAI] = field(default_factory=list)

    @classmethod
    @contextmanager
    def start(
        cls, checkpoint: Path, address: str, *flags: str, engines: int = 1, name: str | None = None
    ) -> "Iterator[Served]":
        name = name or f"test-{uuid4().hex[:6]}"
        command = serve_command(checkpoint, address, *flags, engines=engines, name=name)
        with cls.of(command, name) as served:
            yield served

    @classmethod
    @contextmanager
    def of(cls, command: Sequence[str], name: str) -> "Iterator[Served]":
        """Whatever it serves."""
        with TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())
            served = cls(process, name, log)
            try:
                yield served
            finally:
                for client in served.clients:
                    client.close()
                served.stop()

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def wait_until_ready(self) -> None:
        """The printed line. Every front door can place then."""

        def printed() -> bool:
            assert not self.process.poll(), self.output  # a detached one may have returned
            return "\nready: " in self.output

        wait_for(printed, "the ready line", within_s=READY_DEADLINE_S)
        lines = [line for line in self.output.splitlines() if line.startswith("ready: ")]
        self.urls = tuple(line.removeprefix("ready: ").removesuffix("/v1").strip() for line in lines)
        assert [self.get("/ready", url) for url in self.urls] == [200] * len(self.urls)

    @property
    def url(self) -> str:
        return self.urls[0]

    def get(self, path: str, url: str | None = None) -> int:
        try:
            return httpx.get(f"{url or self.url}{path}", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def client(self) -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.clients.append(client)
        return client

    @property
    def namespace(self) -> str:
        return f"shoal-{self.name}"

    def names(self) -> set[str]:
        named = list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in named if actor["namespace"] == self.namespace}

    def engine_names(self) -> list[str]:
        return sorted(name for name in self.names() if name.startswith("engine-"))

    def store_names(self) -> list[str]:
        return sorted(name for name in self.names() if name.startswith("store-"))

    def actor(self, name: str) -> Any:
        """By its name, or by what no other's begins with."""
        if name not in (names := self.names()):
            found = [full for full in names if full.startswith(f"{name}-")]
            name = found[0] if len(found) == 1 else name
        return ray.get_actor(name, namespace=self.namespace)

    def is_replaced(self, name: str, before: Any) -> bool:
        """Whether there is another of that name now."""
        try:
            return bool(self.actor(name) != before)
        except ValueError:
            return False

    def pid(self, name: str) -> int:
        return int(ray.get(self.actor(name).__ray_call__.remote(lambda _: os.getpid()), timeout=10))

    def ready_engines(self) -> set[str]:
        """By the supervisor's account; none while it is away or anybody is missing."""
        try:
            status = ray.get(self.actor("supervisor").status.remote(), timeout=10)
        except (ValueError, ray.exceptions.RayError):
            return set()
        engines = [engine.info for deployment in status.deployments for engine in deployment.engines]
        return {engine.engine_id for engine in engines if engine} if status.ready else set()

    def loads(self) -> dict[str, int]:
        """Of engines, by the router's account."""
        answer: dict[str, int] = ray.get(self.actor("router").loads.remote(), timeout=10)
        return answer

    def holds_a_request(self, name: str) -> bool:
        return bool(ray.get(self.actor(name).health.remote(), timeout=10).num_requests)

    def num_requests(self) -> int:
        """Running and waiting on all engines."""
        healths = [self.actor(name).health.remote() for name in self.engine_names()]
        return sum(health.num_requests for health in ray.get(healths, timeout=10))

    def is_clean(self) -> bool:
        """Everything is returned, by the account of every process behind the front door."""
        response = httpx.get(f"{self.url}/debug/invariants", timeout=30)
        return response.status_code == 200 and bool(response.json()["clean"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)
