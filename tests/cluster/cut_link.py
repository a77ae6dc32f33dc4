"""Two nodes in network namespaces, and the link between them cut: `sudo python -m tests.cluster.cut_link`.

Prefixes lie in a store on one node, an engine on the other fetches them. The link is cut while bytes are
under way, for less and for longer than a fetch may take. Prints a line a question and fails if a reply is not
that of an engine without a cache, if anything is held at the end, or if fetches do not come again.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from shoal.actors.engine.fetcher import DEADLINE_S
from shoal.actors.messages import EngineId
from shoal.cluster.bench.two_nodes import another_node, private_ray
from tests.cluster.test_store_faults import (
    OBJECT_STORE,
    WHOLE,
    Nodes,
    Process,
    Store,
    engine_config,
    get,
    without_cache,
)
from tests.cluster.watched import Answer, WatchedEngine

HERE, THERE = "shoal-here", "shoal-there"
HERE_IP, THERE_IP = "10.77.0.1", "10.77.0.2"
NOBODY = "02:00:00:00:00:99"
SHORT_S, LONG_S = 2.0, DEADLINE_S + 5.0
MARGIN_S = 10.0
COMES_AGAIN_S = 120.0
"""Of trying, within which a fetch must have come from the other node again."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    for name in (HERE, THERE):
        ip("netns", "add", name)
    try:
        ip("link", "add", "veth0", "netns", HERE, "type", "veth", "peer", "name", "veth0", "netns", THERE)
        for name, address in ((HERE, HERE_IP), (THERE, THERE_IP)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in (HERE, THERE):
            ip("netns", "delete", name)


@contextmanager
def link_cut() -> Iterator[None]:
    """Packets are lost without a word, as in a switch: they are sent to an address that nobody has."""
    ends = ((HERE, THERE_IP), (THERE, HERE_IP))
    for name, other in ends:
        ip("-n", name, "neighbour", "replace", other, "lladdr", NOBODY, "dev", "veth0", "nud", "permanent")
    try:
        yield
    finally:
        for name, other in ends:
            ip("-n", name, "neighbour", "delete", other, "dev", "veth0")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    if not arguments.parse_args().inside:
        with two_hosts():
            again = [sys.executable, "-m", "tests.cluster.cut_link", "--inside"]
            sys.exit(subprocess.run(["ip", "netns", "exec", HERE, *again], check=False).returncode)
    with (
        tempfile.TemporaryDirectory() as directory,
        private_ray(object_store_bytes=OBJECT_STORE, node_ip=HERE_IP),
        another_node(OBJECT_STORE, node_ip=THERE_IP, prefix=["ip", "netns", "exec", THERE]) as there,
    ):
        _cut(ray.get_runtime_context().get_node_id(), there, Path(directory))
        ray.shutdown()  # first, as in `two_nodes`


def _cut(here: str, there: str, directory: Path) -> None:
    config = engine_config(directory)
    alone = without_cache(config)
    nodes = Nodes(here, there, config)
    reader, writer = (
        Process(nodes.start(node, WatchedEngine, EngineId(f"on {node}"), config, DEADLINE_S))
        for node in (here, there)
    )
    get([reader.actor.start.remote(), writer.actor.start.remote()])
    store = nodes.store("store", writer=writer, reader=reader)
    for prompt, cut_s in ((10, SHORT_S), (11, LONG_S)):
        expected = alone(prompt)
        writer.save(prompt)
        _ask_in_a_cut(reader, store, prompt, cut_s, expected)
        _ask_until_fetched(reader, store, prompt, expected)
    store.is_left_alone()
    print("nothing is held")


def _ask_in_a_cut(reader: Process, store: Store, prompt: int, cut_s: float, expected: Answer) -> None:
    get(reader.actor.hold_transfer.remote())
    asked = reader.ask(prompt, store)
    get(reader.actor.transfer_is_held.remote())
    with link_cut():
        started = time.monotonic()
        get(reader.actor.let_transfer_go.remote())
        time.sleep(cut_s)
    answer = ray.get(asked, timeout=DEADLINE_S + MARGIN_S)
    _say(f"cut for {cut_s:.0f} s", started, answer, reader)
    assert answer == expected
    reader.is_drained()


def _ask_until_fetched(reader: Process, store: Store, prompt: int, expected: Answer) -> None:
    until = time.monotonic() + COMES_AGAIN_S
    fetched = 0
    while fetched < WHOLE:
        assert time.monotonic() < until, "no fetch came again"
        reader.forget()
        started = time.monotonic()
        answer = ray.get(reader.ask(prompt, store), timeout=DEADLINE_S + MARGIN_S)
        _say("  then", started, answer, reader)
        assert answer == expected
        fetched = answer.cached.other_store
        time.sleep(1.0)
    reader.is_drained()


def _say(what: str, since: float, answer: Answer, reader: Process) -> None:
    waited_s = time.monotonic() - since
    print(f"{what}: {waited_s:.1f} s, {answer.cached}, {reader.fallbacks()}", flush=True)


if __name__ == "__main__":
    main()
