"""Ends a process that no longer obeys, wherever it runs: by SIGKILL, from its own node.

`ray.kill` asks the process itself. One that is stopped, or stuck in a device's driver, does not hear it: dead
to Ray, it keeps its CPUs, its port and its memory, and its successor finds no room.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import state  # who runs where is otherwise only told by Ray's dashboard, which may not run
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

CLOCK_SLACK_S = 5.0
"""How far the clocks of two nodes may lie apart. Between a process's death and another one under its number
there is far more: the kernel gives out every other number first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where an actor runs, by Ray's own books: they know it without the process's help."""

    node: str
    pid: int
    alive_at_s: float
    """When Ray first knew it to live there. What began later under this number is another process."""


def home_of(actor: Any) -> Home | None:
    """None of an actor that is dead, or has no place yet."""
    said = state.actors(actor._actor_id.hex())
    if said.get("State") != "ALIVE":
        return None
    return Home(node=said["Address"]["NodeID"], pid=said["Pid"], alive_at_s=said["Timestamp"] / 1e3)


def end_actor(actor: Any) -> Future[None]:
    """Returns at once. The future is done when its process is ended, or could not be, which is logged."""
    home = home_of(actor)
    ray.kill(actor)
    return _done() if home is None else end(home)


def end(home: Home) -> Future[None]:
    """The same for an actor that Ray is to restart. On the node of an actor that calls it is done at once."""
    here = ray.get_runtime_context()
    if here.get_actor_id() and here.get_node_id() == home.node:
        end_sister(home)
        return _done()
    there = NodeAffinitySchedulingStrategy(home.node, soft=False)
    ended: Future[None] = Future()

    def settle(done: Future[Any]) -> None:
        if error := done.exception():  # most likely the node itself is gone, and the process with it
            logger.warning("process %d on node %s: %s", home.pid, home.node[:8], type(error).__name__)
        ended.set_result(None)

    _end_sister.options(scheduling_strategy=there).remote(home).future().add_done_callback(settle)
    return ended


def end_sister(home: Home) -> bool:
    """Whether there was a process to end. It must be a sister of this one: a child of the same Ray node."""
    with _process(home.pid) as handle:
        if handle is None or not _is_that(home):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True


@ray.remote(num_cpus=0, max_retries=3)
def _end_sister(home: Home) -> bool:
    return end_sister(home)


@contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A handle on whatever has this number now. It never comes to mean another process, as the number may."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _is_that(home: Home) -> bool:
    try:
        said = Path(f"/proc/{home.pid}/stat").read_text()
    except OSError:  # it ended just now
        return False
    fields = said.rpartition(")")[2].split()  # its name, before that, may contain anything
    parent, began_ticks = int(fields[1]), int(fields[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    began_s = time.time() - uptime_s + began_ticks / os.sysconf("SC_CLK_TCK")
    return parent == os.getppid() and began_s <= home.alive_at_s + CLOCK_SLACK_S


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
