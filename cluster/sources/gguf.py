"""A GGUF file, turned into a safetensors folder by a child process."""

import os
import re
import subprocess
import sys
from pathlib import Path

from shoal.cluster.sources.checkpoint import ModelSourceError

CONVERSION = "gguf to bf16 safetensors, version 1"
"""Raise the version when `convert.py` writes something else: cached conversions are then made again."""

PROGRAM = Path(__file__).with_name("convert.py")


def check_gguf(path: Path) -> None:
    if not path.is_file():
        raise ModelSourceError(f"{path} does not exist: check the path of the GGUF file")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise ModelSourceError(
            f"{path} is part of a split GGUF: join the parts with llama-gguf-split --merge"
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelSourceError(f"{path} does not start like a GGUF file: download it again")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder`: bf16 safetensors, tokenizer and chat template."""
    finished = subprocess.run(
        # -P: nothing beside the program, nor in the working directory, may pose as a library.
        [sys.executable, "-P", str(PROGRAM), str(path), str(folder)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if finished.returncode != 0:
        raise ModelSourceError(f"cannot convert {path.name}: {last_line(finished)}")


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    """The line that says why: the last one of a traceback, or of a tool's output."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with status {finished.returncode} and said nothing"
