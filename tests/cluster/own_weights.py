"""Two Ray nodes that share no files. As root, for the second part:

    python -m tests.cluster.own_weights

First `shoal serve org/name`, against a hub on this machine that has SmolLM2 and wants a token. The command
fetches configuration and tokenizer; each node that gets engines fetches the weights, once, into a cache of
its own; the answer is the model's. Then a folder that has other weights on one of the nodes is refused.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from shoal.cluster.bench.two_nodes import another_node
from shoal.cluster.bench.two_nodes import private_ray as one_node
from tests.checkpoints import smollm2, tiny_llama
from tests.cluster.served import ROOT, Served
from tests.cluster_unit.test_sources_hub import COMMIT, MODEL, FakeHub, serve

OBJECT_STORE = 200 << 20
START_DEADLINE_S = 120.0
WEIGHTS = "model.safetensors"
MOUNTED = ("unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$0" && shift && exec "$@"')
"""Followed by a folder, what is to be seen in its place, and a command that is to see it."""


def own(root: Path, url: str) -> dict[str, str]:
    """The environment of a machine with a disk of its own."""
    return {
        "SHOAL_CACHE": f"{root}/shoal",
        "HF_HOME": f"{root}/hf",
        "HF_ENDPOINT": url,
        "HF_TOKEN": "hf_secret",
    }


@contextmanager
def two_nodes(prefix: Sequence[str]) -> Iterator[str]:
    """Each takes two engines of two threads. prefix: of the second one's command."""
    with (
        one_node(num_cpus=4, object_store_bytes=OBJECT_STORE) as address,
        another_node(OBJECT_STORE, prefix=prefix),
    ):
        yield address


def start(model: str, address: str) -> AbstractContextManager[Served]:
    flags = ("--threads", "2", "--memory", "1GiB", "--block-size", "128")
    return Served.start(Path(model), address, *flags, engines=4)


def from_a_hub(folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in smollm2().iterdir()}
    hub = FakeHub(files=files, token="hf_secret", pause_s=2.0)
    head, other, driver = (folder / name for name in ("head", "other", "driver"))
    with serve(hub) as url:
        os.environ.update(own(head, url))
        environment = [f"{name}={value}" for name, value in own(other, url).items()]
        with two_nodes(["env", *environment]) as address:
            os.environ.update(own(driver, url))
            began = time.monotonic()
            with start(MODEL, address) as served:
                served.wait_until_ready()
                took_s = time.monotonic() - began
                body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
                answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()
    copies = {root.name: len({p.resolve() for p in root.rglob(WEIGHTS)}) for root in (head, other, driver)}
    print(f"ready in {took_s:.1f} s: 4 engines of {MODEL}@{COMMIT[:8]}, {answer['choices'][0]['text']!r}")
    print(f"downloads of {WEIGHTS}: {hub.downloads.count(WEIGHTS)}; whole copies by node: {copies}")
    if copies != {"head": 1, "other": 1, "driver": 0} or hub.downloads.count(WEIGHTS) != 2:
        sys.exit("each node was to get the weights once, and the command none")


def from_folders_that_differ(folder: Path) -> None:
    here, there = tiny_llama(folder / "m"), tiny_llama(folder / "m-there", seed=1)
    with (
        two_nodes([*MOUNTED, str(here), str(there)]) as address,
        start(str(here), address) as served,
    ):
        status = served.process.wait(timeout=START_DEADLINE_S)
        last = served.output.strip().splitlines()[-1]
    print(last)
    if status != 1 or "has other weights or another config.json than on node" not in last:
        sys.exit("nodes with other weights were to be refused")


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT / ".src")
    with tempfile.TemporaryDirectory() as folder:
        from_a_hub(Path(folder))
        from_folders_that_differ(Path(folder))


if __name__ == "__main__":
    main()
