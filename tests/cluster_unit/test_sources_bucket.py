"""Models in object storage, against an S3 server on this machine."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from shoal.cluster.sources import (
    LineProgress,
    ModelSourceError,
    ModelSources,
    ModelUnreachable,
    Part,
    resolve_config,
)
from shoal.cluster.sources import bucket as bucket_module
from shoal.cluster.sources.bucket import Bucket
from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.checkpoint import check_checkpoint
from tests.checkpoints import hollow_checkpoint, safetensors_bytes
from tests.cluster_unit.test_sources_hub import closed_port

SERVER_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A process of its own: it has its own ideas of what is worth a warning."""
    port = closed_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


@dataclass
class World:
    """A bucket with a model in it, and a node that has nothing yet."""

    root: Path
    fs: Any
    bucket: str
    asked: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/models/tiny"

    def put(self, name: str, content: bytes) -> None:
        self.fs.pipe_file(f"{self.bucket}/models/tiny/{name}", content)

    def node(self, name: str = "a") -> ModelSources:
        return ModelSources(
            progress=LineProgress(self.lines.append), cache=CheckpointCache(self.root / name / "models")
        )


@pytest.fixture
def world(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    bucket = f"b-{uuid4().hex[:8]}"
    deadline = time.monotonic() + SERVER_DEADLINE_S
    while True:
        try:
            fs.mkdir(bucket)
            break
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    world = World(tmp_path, fs, bucket)
    for file in hollow_checkpoint(tmp_path / "origin").iterdir():
        world.put(file.name, file.read_bytes())
    world.put("README.md", b"not needed")
    world.put("onnx/model.safetensors", b"not needed")
    return world


def test_a_folder_is_fetched_once_and_pinned(world: World) -> None:
    found = world.node().resolve(f"{world.url}/")
    check_checkpoint(found.directory)
    assert found.name == "tiny"
    assert found.source.startswith(f"{world.url}@")
    assert "README.md" not in os.listdir(found.directory)
    assert world.node().fetch(found.source, Part.WHOLE) == found.directory
    assert [line for line in world.lines if line.endswith("...")] == [f"fetching {world.url} ..."]


def test_another_node_gets_the_same_bytes_by_the_source_alone(world: World) -> None:
    there = world.node("a").resolve(world.url)
    here = world.node("b").fetch(there.source, Part.WHOLE)
    assert here != there.directory
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (here / name).read_bytes() == (there.directory / name).read_bytes()


def test_a_front_door_gets_no_weights_but_uses_a_whole_checkpoint_if_there_is_one(world: World) -> None:
    door = world.node("door").resolve(world.url, part=Part.TEXT)
    assert sorted(os.listdir(door.directory)) == ["config.json", "shoal_recipe.txt", "tokenizer.json"]
    whole = world.node("both").resolve(world.url)
    assert whole.source == door.source
    assert world.node("both").fetch(door.source, Part.TEXT) == whole.directory


def test_a_plan_needs_no_weights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(world.root / "plan"))
    folder = resolve_config(world.url)
    assert (folder / "config.json").is_file() and not (folder / "model.safetensors").exists()


def test_large_files_arrive_whole_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 1000)
    content = safetensors_bytes(5000)
    world.put("model.safetensors", content)
    found = world.node().resolve(world.url)
    assert (found.directory / "model.safetensors").read_bytes() == content


def test_what_was_written_since_is_not_served_as_the_same(world: World) -> None:
    source = world.node("a").resolve(world.url, part=Part.TEXT).source
    world.put("model.safetensors", safetensors_bytes(5))
    with pytest.raises(ModelSourceError, match="has changed since the cluster was told of it"):
        world.node("b").fetch(source, Part.WHOLE)
    assert world.node("a").resolve(world.url).source != source


def test_what_is_written_while_it_is_fetched_is_not_kept(world: World) -> None:
    class Meanwhile(Bucket):
        def fetch(self, *args: Any) -> None:
            super().fetch(*args)
            world.put("model.safetensors", safetensors_bytes(5))

    def bucket(url: str) -> Bucket:
        real = Bucket.of(url)
        return Meanwhile(scheme=real.scheme, filesystem=real.filesystem)

    with pytest.raises(ModelSourceError, match="has changed since"):
        replace(world.node(), bucket=bucket).resolve(world.url)
    assert not list((world.root / "a" / "models").glob("[!.]*"))


def test_a_gguf_file_is_converted_here(world: World) -> None:
    world.fs.pipe_file(f"{world.bucket}/tiny.gguf", b"GGUF and more")
    converted: list[bytes] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf.read_bytes())
        hollow_checkpoint(folder)

    node = replace(world.node(), convert=convert)
    found = node.resolve(f"s3://{world.bucket}/tiny.gguf")
    assert node.fetch(found.source, Part.WHOLE) == found.directory
    assert (found.name, converted) == ("tiny", [b"GGUF and more"])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://{bucket}/none", "s3://{bucket}/none does not exist: check the name of bucket and folder"),
        ("s3://no-such-bucket-{bucket}/m", "does not exist: check the name of bucket and folder"),
        ("s3://{bucket}/models", "has no config.json: name the folder that has a model's files"),
    ],
)
def test_what_is_not_there_is_one_line(world: World, url: str, said: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        world.node().resolve(url.format(bucket=world.bucket))
    assert said.format(bucket=world.bucket) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_pickled_weights_is_refused_before_anything_is_fetched(world: World) -> None:
    world.fs.rm(f"{world.bucket}/models/tiny/model.safetensors")
    with pytest.raises(ModelSourceError, match="has no safetensors weights"):
        world.node().resolve(world.url, part=Part.TEXT)
    assert world.lines == []


def refusal_of_google() -> Exception:
    error: Any = RuntimeError("Anonymous caller does not have storage.objects.list access")
    error.code = 401
    return error  # type: ignore[no-any-return]


def refusing(world: World, error: Exception) -> ModelSources:
    def filesystem(scheme: str) -> Any:
        raise error

    return replace(world.node(), bucket=lambda url: Bucket(scheme=url[:2], filesystem=filesystem))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("Install s3fs"), "s3:// needs a library: pip install 'shoal[s3]'"),
        (
            PermissionError("Forbidden"),
            "is refused to the credentials that this node has: give it AWS_ACCESS",
        ),
        (refusal_of_google(), "is refused to the credentials that this node has: give it AWS_ACCESS"),
        (
            type("NoCredentialsError", (Exception,), {})(),
            "needs credentials, and this node has none: give it",
        ),
    ],
)
def test_each_refusal_names_the_way_out(world: World, error: Exception, said: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        refusing(world, error).resolve("s3://b/m")
    assert said in str(caught.value)
    assert not isinstance(caught.value, ModelUnreachable)


def test_a_store_that_does_not_answer_may_do_so_later(world: World) -> None:
    with pytest.raises(ModelUnreachable, match="s3://b/m cannot be read: timed out"):
        refusing(world, TimeoutError("timed out")).resolve("s3://b/m")


def test_a_full_disk_is_one_line_and_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        ModelSourceError, match=r"cannot write a checkpoint to .* \(No space left on device\)"
    ):
        world.node().resolve(world.url)
    assert not list((world.root / "a" / "models").glob("[!.]*"))
    assert not list((world.root / "a" / "models").glob(".*scratch*"))
