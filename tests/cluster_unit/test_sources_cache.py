"""The checkpoint cache: made once, visible only when whole, whoever is killed meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.checkpoint import ModelSourceError
from tests.checkpoints import hollow_checkpoint

SLOW_START = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from shoal.cluster.sources.cache import CheckpointCache
from tests.checkpoints import hollow_checkpoint

root = Path(sys.argv[1])

def build(scratch):
    (scratch.parent.parent / "builds").open("a").write("x")
    folder = hollow_checkpoint(scratch / "checkpoint")
    deadline = time.monotonic() + 20
    while not (root.parent / "go on").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return folder

print(CheckpointCache(root).find_or_build("tiny", recipe="v1", build=build, waiting=nullcontext))
"""


def build(scratch: Path) -> Path:
    return hollow_checkpoint(scratch / "checkpoint")


def must_not_build(scratch: Path) -> Path:
    raise AssertionError("it is there already")


def find_or_build(cache: CheckpointCache, *, recipe: str = "v1") -> Path:
    return cache.find_or_build("tiny", recipe=recipe, build=build, waiting=nullcontext)


def visible(cache: CheckpointCache) -> list[str]:
    """What is in the cache, less the lock file that stays."""
    return sorted(path.name for path in cache.root.iterdir() if path.name != ".tiny.lock")


def start(root: Path) -> "subprocess.Popen[str]":
    """A process that finds or builds the checkpoint; its build ends when there is a file `go on`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SLOW_START, str(root)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_until_builds(root: Path) -> None:
    deadline = time.monotonic() + 20
    while not list(root.glob(".tiny.scratch-*/checkpoint/model.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_checkpoint_is_built_once_and_found_from_then_on(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path)
    assert cache.find("tiny", recipe="v1") is None

    assert find_or_build(cache) == tmp_path / "tiny"

    assert cache.find("tiny", recipe="v1") == tmp_path / "tiny"
    cache.find_or_build("tiny", recipe="v1", build=must_not_build, waiting=nullcontext)
    assert visible(cache) == ["tiny"]


def test_another_recipe_replaces_it(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path)
    find_or_build(cache, recipe="v1")
    assert cache.find("tiny", recipe="v2") is None

    find_or_build(cache, recipe="v2")

    assert cache.find("tiny", recipe="v2") == tmp_path / "tiny"
    assert visible(cache) == ["tiny"]


def test_a_damaged_checkpoint_counts_as_absent(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path)
    (find_or_build(cache) / "model.safetensors").write_bytes(b"")
    assert cache.find("tiny", recipe="v1") is None

    find_or_build(cache)

    assert cache.find("tiny", recipe="v1") == tmp_path / "tiny"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path)

    def fail(scratch: Path) -> Path:
        build(scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.find_or_build("tiny", recipe="v1", build=fail, waiting=nullcontext)

    assert visible(cache) == []


def test_a_build_that_is_not_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path)

    with pytest.raises(ModelSourceError, match=r"config\.json is missing"):
        cache.find_or_build("tiny", recipe="v1", build=lambda scratch: scratch, waiting=nullcontext)

    assert visible(cache) == []


def test_a_start_killed_in_the_middle_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path / "models")
    with start(cache.root) as killed:
        wait_until_builds(cache.root)
        killed.send_signal(signal.SIGKILL)
    assert cache.find("tiny", recipe="v1") is None
    assert not (cache.root / "tiny").exists()

    find_or_build(cache)

    assert visible(cache) == ["tiny"]


def test_two_starts_at_once_build_it_once(tmp_path: Path) -> None:
    cache = CheckpointCache(tmp_path / "models")
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("waits")
        (tmp_path / "go on").touch()
        yield

    with start(cache.root) as first:
        wait_until_builds(cache.root)
        with start(cache.root) as second:
            found = cache.find_or_build("tiny", recipe="v1", build=must_not_build, waiting=waiting)
            outputs = [process.communicate(timeout=20)[0].strip() for process in (first, second)]

    assert outputs == [str(found)] * 2
    assert (tmp_path / "builds").read_text() == "x"
    assert waits == ["waits"]


def test_a_cache_that_cannot_be_written_says_how_to_move_it(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way")

    with pytest.raises(ModelSourceError, match=r"cannot write a checkpoint to .* set SHOAL_CACHE"):
        find_or_build(CheckpointCache(tmp_path / "models"))


def test_the_root_is_shoal_cache_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    assert CheckpointCache.from_environment().root == Path("/home/ada/.cache/shoal/models")

    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert CheckpointCache.from_environment().root == Path("/xdg/shoal/models")

    monkeypatch.setenv("SHOAL_CACHE", "~/models-disk")
    assert CheckpointCache.from_environment().root == Path("/home/ada/models-disk/models")
