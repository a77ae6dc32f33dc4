"""What `ray job submit --working-dir .` makes of a clone, by Ray's own packaging."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from shoal.kernels import build

ROOT = Path(__file__).parents[2]
LARGEST_BYTES = 10 << 20
JUNK_BYTES = 200 << 20


def package(directory: Path, target: Path, *, with_ignored: bool = False) -> ZipFile:
    """with_ignored: as under RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1."""
    create_package(str(directory), target, not with_ignored, logger=logging.getLogger())
    return ZipFile(target)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as it is here, with what a clone that is worked in has beside it."""
    directory = tmp_path_factory.mktemp("clone") / "shoal"
    ignore = shutil.ignore_patterns(
        ".git", "__pycache__", "*.so", ".*_cache", ".hypothesis", ".venv", "build"
    )
    shutil.copytree(ROOT, directory, symlinks=True, ignore=ignore)
    for junk in (
        ".git/objects/pack/a.pack",
        ".venv/lib/torch.py",
        "tiny/model.safetensors",
        "build/x",
        "my.gguf",
    ):
        path = directory / junk
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, JUNK_BYTES)  # takes no room on the disk
    (directory / "kernels" / "_kernels.so").write_bytes(b"built")
    return directory


@pytest.mark.parametrize("with_ignored", [False, True])
def test_60_a_package_is_small_whatever_lies_in_the_clone(
    clone: Path, tmp_path: Path, with_ignored: bool
) -> None:
    made = package(clone, tmp_path / "package.zip", with_ignored=with_ignored)
    assert Path(str(made.filename)).stat().st_size < LARGEST_BYTES
    names = set(made.namelist())
    assert not [name for name in names if name.startswith((".git/", ".venv", "build", "tests", "kernels/"))]
    assert {f".src/shoal/{name}" for name in ("py.typed", "cluster/cli.py", "kernels/linear.cpp")} <= names
    assert "configs/laptop.yaml" in names, "where --config names it"


@pytest.mark.parametrize(("with_ignored", "carried"), [(False, False), (True, True)])
def test_61_built_kernels_are_carried_when_asked_for(
    clone: Path, tmp_path: Path, with_ignored: bool, carried: bool
) -> None:
    names = package(clone, tmp_path / "package.zip", with_ignored=with_ignored).namelist()
    assert (".src/shoal/kernels/_kernels.so" in names) is carried


def test_a_package_is_the_product(clone: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, with PYTHONPATH as configs/ray-job.yaml has it, it is what runs."""
    package(clone, tmp_path / "package.zip").extractall(tmp_path / "node")
    program = "from shoal.cluster import cli; from shoal.kernels import build\n"
    program += "print(cli.__file__, build.source_hash())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "node",
        env={**os.environ, "PYTHONPATH": ".src"},
        capture_output=True,
        text=True,
        check=True,
    )
    file, source_hash = done.stdout.split()
    assert Path(file) == tmp_path / "node" / ".src" / "shoal" / "cluster" / "cli.py"
    assert source_hash == build.source_hash(), "so kernels that were built here serve there"
