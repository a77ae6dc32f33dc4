"""A Ray on this machine, of one node or two, which nobody else finds by accident."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NODE_DEADLINE_S = 120.0
LEAVE_S = 5.0
"""For a node that is told to go: it waits half a minute for actors that it still hosts."""
_ANY_PORTS = ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port")


@contextmanager
def private_ray(
    *, num_cpus: int = 4, object_store_bytes: int | None = None, node_ip: str | None = None
) -> Iterator[str]:
    """Ends with the block, and may be shut down before; yields its address. None: as Ray chooses."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    directory = tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp")  # Ray's socket paths must be short
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address=node_ip,
            _temp_dir=directory,
        )
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def two_nodes(object_store_bytes: int) -> Iterator[tuple[str, str]]:
    """A private Ray; the ids of its nodes, the first of which is this process's."""
    with private_ray(object_store_bytes=object_store_bytes), another_node(object_store_bytes) as there:
        yield ray.get_runtime_context().get_node_id(), there
        ray.shutdown()  # first, or it would complain at length that the other node is gone


@contextmanager
def another_node(
    object_store_bytes: int, *, node_ip: str | None = None, prefix: Sequence[str] = ()
) -> Iterator[str]:
    """Joins the Ray that this process is connected to, and leaves it with the context; its id.

    prefix: of the command that starts it, as of one that enters another host's network.
    """
    known = _nodes()
    address = ray.get_runtime_context().gcs_address
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", address]
    command += ["--num-cpus", "4", "--object-store-memory", str(object_store_bytes)]
    command += [part for name in _ANY_PORTS for part in (f"--{name}", "0")]
    command += ["--node-ip-address", node_ip] if node_ip else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _wait_for_new_node(known, process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # Ray's reaper ends what it had started
            process.wait()


def on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def actor_on(node: str, actor_class: type, *args: Any, **more: Any) -> Any:
    """It ends when nobody has it any more."""
    remote: Any = ray.remote(num_cpus=0, scheduling_strategy=on(node))(actor_class)
    return remote.remote(*args, **more)


def _wait_for_new_node(known: set[str], process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + NODE_DEADLINE_S
    while not (new := _nodes() - known):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a second Ray node did not start within {NODE_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    return new.pop()


def _nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}
