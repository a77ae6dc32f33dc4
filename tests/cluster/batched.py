"""`shoal batch` as a child process, which may be killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from tests.cluster.served import ROOT, wait_for

ANSWER_DEADLINE_S = 120.0


class Batch:
    """A command that can be run again and again."""

    def __init__(self, source: Path, target: Path, *flags: str) -> None:
        self._target = target
        self._command = [sys.executable, "-m", "shoal.cluster", "batch", str(source), str(target), *flags]
        self.output = ""
        """What the last run said, on stdout and stderr."""

    def run(self, *, within_s: float = 300.0) -> int:
        """Its exit status."""
        return self._run(lambda process: process.wait(timeout=within_s))

    def run_until(self, num_answers: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends it a signal as soon as so many answers are there; its exit status."""

        def end(process: "subprocess.Popen[bytes]") -> int:
            def is_there() -> bool:
                assert process.poll() is None, "it ended before"
                return self.num_answers() >= num_answers

            wait_for(is_there, f"{num_answers} answers", within_s=ANSWER_DEADLINE_S)
            process.send_signal(number)
            return process.wait(timeout=60)

        return self._run(end)

    def num_answers(self) -> int:
        return self._target.read_bytes().count(b"\n") if self._target.exists() else 0

    def _run(self, end: Callable[["subprocess.Popen[bytes]"], int]) -> int:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "200"}
        environment.pop("RAY_ADDRESS", None)
        with TemporaryFile() as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                return end(process)
            finally:
                process.kill()
                process.wait(timeout=60)
                log.seek(0)
                self.output = log.read().decode()
