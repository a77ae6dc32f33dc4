"""Files of keys that change while they are in use."""

import asyncio
import os
from pathlib import Path

import pytest

from shoal.actors.ingress.door_files import POLL_S, DoorFiles
from shoal.actors.ingress.keys import hash_of
from shoal.actors.ingress.metrics import Metrics
from shoal.actors.messages import HttpConfig
from tests.api.test_operations import samples
from tests.ingress.clock import Clock
from tests.ingress.virtual_time import run_in_virtual_time


def keys(*names: str) -> str:
    """Each one's key is its name."""
    return "keys:\n" + "".join(f"  - {{name: {name}, hash: '{hash_of(name)}'}}\n" for name in names)


class Followed:
    """A file of keys, and who is let in by it."""

    def __init__(self, path: Path) -> None:
        path.write_text(keys("alice"))
        self.path = path
        self.metrics = Metrics()
        self.files = DoorFiles(HttpConfig(api_keys=str(path), api_key_hash=hash_of("fixed")), Clock())

    def look(self) -> None:
        asyncio.run(self.files.look_again(self.metrics))

    def let_in(self) -> list[str]:
        assert self.files.guard.keys is not None
        return [client.name for client in self.files.guard.keys.clients()]

    def reloads(self) -> tuple[float, float]:
        """Read and refused."""
        seen = samples(self.metrics.exposition({}).decode())
        name = "shoal_file_reloads_total{file=api_keys}{outcome=%s}"
        return seen.get(name % "read", 0), seen.get(name % "refused", 0)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "keys.yaml")


def test_the_key_of_the_command_line_is_there_whatever_the_file_says(followed: Followed) -> None:
    assert followed.let_in() == ["default", "alice"]


def test_a_file_is_read_again_when_it_is_another_and_only_then(followed: Followed) -> None:
    followed.look()
    assert followed.reloads() == (0, 0)
    followed.path.write_text(keys("alice", "bob"))
    for _ in range(2):
        followed.look()
        assert followed.let_in() == ["default", "alice", "bob"]
    assert followed.reloads() == (1, 0)


def test_what_takes_a_files_place_is_noticed_be_it_as_long_and_as_old(followed: Followed) -> None:
    other = followed.path.with_suffix(".new")
    other.write_text(keys("carol"))
    then = followed.path.stat()
    os.utime(other, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert other.stat().st_size == then.st_size
    os.replace(other, followed.path)
    followed.look()
    assert followed.let_in() == ["default", "carol"]


def test_a_link_that_is_turned_elsewhere_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret."""
    link, target = tmp_path / "keys.yaml", tmp_path / "first.yaml"
    link.symlink_to(target)
    followed = Followed(link)
    second = tmp_path / "second.yaml"
    second.write_text(keys("bob"))
    turned = tmp_path / "turned"
    turned.symlink_to(second)
    os.replace(turned, link)
    followed.look()
    assert followed.let_in() == ["default", "bob"]


@pytest.mark.parametrize("broken", ["", "keys: [", "keys: [{name: bob}]", None])
def test_a_broken_file_changes_nothing_and_is_said_once(
    followed: Followed, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    if broken is None:
        followed.path.unlink()
    else:
        followed.path.write_text(broken)
    for _ in range(3):
        followed.look()
    assert followed.let_in() == ["default", "alice"]
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "what was before stays: --api-keys" in record.message and "\n" not in record.message
    assert followed.reloads() == (0, 1)
    followed.path.write_text(keys("bob"))
    followed.look()
    assert followed.let_in() == ["default", "bob"]
    assert followed.reloads() == (1, 1)


def test_it_is_looked_at_every_second(followed: Followed) -> None:
    async def scenario() -> None:
        following = asyncio.create_task(followed.files.follow(followed.metrics))
        followed.path.write_text(keys("bob"))
        await asyncio.sleep(POLL_S / 2)
        assert followed.let_in() == ["default", "alice"]
        await asyncio.sleep(POLL_S)
        assert followed.let_in() == ["default", "bob"]
        following.cancel()

    run_in_virtual_time(scenario())


def test_what_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: 1")
    with pytest.raises(ValueError, match=r"--api-keys .*keys.yaml: keys: Input should be a valid list"):
        DoorFiles(HttpConfig(api_keys=str(path)), Clock())
