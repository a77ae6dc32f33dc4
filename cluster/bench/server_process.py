"""An HTTP server as a child of a benchmark: started, waited for, ended with all that it has started."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile

from shoal.cluster.bench.contender import PeerError

POLL_S = 0.1


@contextmanager
def running(
    name: str, command: Sequence[str], url: str, *, env: Mapping[str, str], within_s: float
) -> Iterator[str]:
    """Yields its URL when its /health answers 200. Raises PeerError with the end of what it said."""
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"cannot run {command[0]} ({error.strerror or error})") from error
        try:
            deadline = time.monotonic() + within_s
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    words = log.read().decode(errors="replace")[-2000:]
                    raise PeerError(f"{name} did not start within {within_s:g} s: {words}")
                time.sleep(POLL_S)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return bool(response.status == 200)
    return False
