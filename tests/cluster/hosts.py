"""Three hosts in network namespaces: one dies and joins again, another is cut off. As root:

    sudo python -m tests.cluster.hosts

The first has Ray's head, supervisor, router and ingress; the others an engine and a store each. Streams run
all the while at the ingress, and every one must tell what it tells in peace.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import ray

from shoal.cluster.bench.two_nodes import another_node, private_ray
from tests.checkpoints import tiny_llama
from tests.cluster.served import ROOT, Served, wait_for
from tests.cluster.streamed import Body, Said, bodies, spoken

SWITCH, HOSTS = "shoal-switch", ("shoal-a", "shoal-b", "shoal-c")
OBJECT_STORE = 200 << 20
CUT_S = 20.0
HEALTH = {
    f"RAY_health_check_{name}": value
    for name, value in (
        ("initial_delay_ms", "1000"),
        ("period_ms", "1000"),
        ("timeout_ms", "1000"),
        ("failure_threshold", "10"),
    )
}
"""A host that is silent is given up after some 11 s. As Ray comes it would be a minute."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address_of(host: str) -> str:
    return f"10.78.0.{HOSTS.index(host) + 1}"


@contextmanager
def three_hosts() -> Iterator[None]:
    for name in (SWITCH, *HOSTS):
        ip("netns", "add", name)
    try:
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for host in HOSTS:
            ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", host, "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", host, "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{address_of(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for name in (*HOSTS, SWITCH):
            kill_all_on(name)
            ip("netns", "delete", name)


def kill_all_on(host: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", host], check=True, capture_output=True, text=True)
    for pid in pids.stdout.split():
        if int(pid) != os.getpid():
            subprocess.run(["kill", "-9", pid], check=False)


class Streams:
    """Each is asked again when it has ended, until all are told to stop."""

    def __init__(self, url: str, asked: list[Body]) -> None:
        self._url = url
        self._asked = asked
        self._alone = [spoken(url, body) for body in asked]
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(len(asked))
        self._streams = [self._pool.submit(self._stream, i) for i in range(len(asked))]
        self.num_told = 0

    def end(self) -> None:
        """Raises what one of them met."""
        self._is_over.set()
        for stream in self._streams:
            stream.result(timeout=180)

    def _stream(self, number: int) -> None:
        while not self._is_over.is_set():
            said: Said = spoken(self._url, self._asked[number])
            assert said == self._alone[number]
            self.num_told += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        with three_hosts():
            again = [sys.executable, "-m", "tests.cluster.hosts", "--inside", "--streams", str(args.streams)]
            # the head's own network, but not the processes that are killed with a host
            return subprocess.run(["ip", "netns", "exec", HOSTS[0], *again], check=False).returncode
    os.environ |= HEALTH | {"PYTHONPATH": str(ROOT / ".src")}
    with (
        tempfile.TemporaryDirectory() as folder,
        private_ray(num_cpus=0, object_store_bytes=OBJECT_STORE, node_ip=address_of(HOSTS[0])) as address,
        ExitStack() as nodes,
    ):
        joined = {host: nodes.enter_context(node_on(host)) for host in HOSTS[1:]}
        checkpoint = tiny_llama(Path(folder), max_position_embeddings=4096)
        with Served.start(checkpoint, address, engines=2) as served:
            served.wait_until_ready()
            streams = Streams(served.url, bodies(served.url, args.streams, max_tokens=300))
            _disturb(served, joined, nodes)
            streams.end()
            print(f"{streams.num_told} streams, each told what it tells in peace", flush=True)
        ray.shutdown()
    return 0


def node_on(host: str) -> AbstractContextManager[str]:
    prefix = ["ip", "netns", "exec", host]
    return another_node(OBJECT_STORE, node_ip=address_of(host), prefix=prefix)


def _disturb(served: Served, joined: dict[str, str], nodes: ExitStack) -> None:
    def is_whole() -> bool:
        return len(served.ready_engines()) == 2 and len(served.loads()) == 2

    _, second, third = HOSTS
    time.sleep(3)
    kill_all_on(second)
    _say("a host is killed")
    nodes.enter_context(node_on(second))
    wait_for(is_whole, "it has joined again", within_s=180)
    _say("it has joined again, and hosts an engine")
    ip("-n", SWITCH, "link", "set", third, "down")
    _say("another is cut off")
    time.sleep(CUT_S)
    ip("-n", SWITCH, "link", "set", third, "up")
    _say("and can be reached again")
    kill_all_on(third)  # what a supervisor of the host would do: Ray's node ends itself when it hears of it
    nodes.enter_context(node_on(third))
    wait_for(is_whole, "that has joined again", within_s=180)
    _say("it has joined again, and hosts an engine")
    time.sleep(3)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
