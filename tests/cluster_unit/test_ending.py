"""A process that does not obey is ended, and no other: real processes, no Ray."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shoal.cluster.ending import CLOCK_SLACK_S, Home, end_sister

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT_OF_ONE_THAT_SLEEPS = (
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
)


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        yield process
        process.kill()


def from_a_sister(home: Home) -> bool:
    """Our other child does it, as a process of the same Ray node would."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(end_sister, (home,))


def home(pid: int, alive_at_s: float | None = None) -> Home:
    return Home(node="n", pid=pid, alive_at_s=time.time() if alive_at_s is None else alive_at_s)


def test_a_stopped_process_is_ended(stopped: subprocess.Popen[bytes]) -> None:
    assert from_a_sister(home(stopped.pid))
    assert stopped.wait(timeout=10) == -signal.SIGKILL


def test_one_that_came_later_under_its_number_is_not(stopped: subprocess.Popen[bytes]) -> None:
    assert not from_a_sister(home(stopped.pid, time.time() - 2 * CLOCK_SLACK_S))
    assert stopped.poll() is None


def test_nor_is_one_of_another_family(stopped: subprocess.Popen[bytes]) -> None:
    assert not end_sister(home(stopped.pid)), "it is our child, and not our sister"
    command = [sys.executable, "-c", PARENT_OF_ONE_THAT_SLEEPS, *SLEEPS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        niece = int(parent.stdout.readline())
        try:
            assert not from_a_sister(home(niece))
            os.kill(niece, 0)
        finally:
            os.kill(niece, signal.SIGKILL)


def test_nobody_is_there_any_more() -> None:
    with subprocess.Popen(SLEEPS) as process:
        process.kill()
    assert not from_a_sister(home(process.pid))
