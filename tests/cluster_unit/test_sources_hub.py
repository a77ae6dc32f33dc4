"""Models of a hub, against a small server that speaks as much of the hub's API as a download needs."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.cluster.sources.checkpoint import ModelSourceError, ModelUnreachable, Part, check_checkpoint
from shoal.cluster.sources.hub import Hub
from shoal.cluster.sources.progress import LineProgress
from shoal.cluster.sources.resolve import looks_like_hub_id, resolve_config
from tests.checkpoints import hollow_checkpoint

COMMIT = "c0ffee" + "0" * 34
MODEL = "org/tiny"
SILENT = LineProgress(lambda line: None)


@dataclass
class FakeHub:
    """The state of a hub with one model, and what was asked of it."""

    files: dict[str, bytes]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Model -> status and the hub's error code."""
    downloads: list[str] = field(default_factory=list)
    commit: str = COMMIT
    """Of its main branch. The files are those of any commit."""
    token: str | None = None
    """Without which nothing is given."""
    pause_s: float = 0.0
    """In the middle of the weights."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        for model, (status, code) in self.refused.items():
            if model in path:
                return status, {"X-Error-Code": code}, b"{}"
        match path.strip("/").split("/"):
            case ["api", "models", "org", "tiny"] | ["api", "models", "org", "tiny", "revision", "main"]:
                return 200, {}, json.dumps({"id": MODEL, "sha": self.commit, "siblings": []}).encode()
            case ["api", "models", "org", "tiny", "revision", _]:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            case ["api", "models", "org", "tiny", "tree", *_]:
                return 200, {}, json.dumps([self._entry(name) for name in self.files]).encode()
            case ["org", "tiny", "resolve", commit, *parts]:
                content = self.files["/".join(parts)]
                return 200, {"ETag": f'"{_blob_id(content)}"', "X-Repo-Commit": commit}, content
            case _:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)}


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.downloads.append(self.path.rpartition("/")[2])
            self._send(with_body=True)

        def _send(self, *, with_body: bool) -> None:
            is_known = not hub.token or self.headers.get("Authorization") == f"Bearer {hub.token}"
            gated: tuple[int, dict[str, str], bytes] = (401, {"X-Error-Code": "GatedRepo"}, b"{}")
            status, headers, body = hub.answer(self.path) if is_known else gated
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                with suppress(ConnectionError):  # whoever asked was killed
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    if "safetensors" in self.path:
                        time.sleep(hub.pause_s)
                    self.wfile.write(body[len(body) // 2 :])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    folder = hollow_checkpoint(tmp_path / "origin")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extras = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors")
    return FakeHub(files=files | dict.fromkeys(extras, b"not needed"))


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(hub: FakeHub, tmp_path: Path) -> Iterator[Fetch]:
    with serve(hub) as url:

        def fetch(model: str = MODEL, *, revision: str | None = None, lines: list[str] | None = None) -> Path:
            write = (lines if lines is not None else []).append
            return client(url, tmp_path).fetch(
                model, revision=revision, progress=LineProgress(write), answer_within_s=5.0
            )

        yield fetch


def test_a_plan_needs_the_configuration_alone(hub: FakeHub, tmp_path: Path) -> None:
    with serve(hub) as url:
        folder = resolve_config(MODEL, hub=client(url, tmp_path))
        with pytest.raises(ModelSourceError, match="is neither a directory here nor at"):
            resolve_config("org/other", hub=client(url, tmp_path))
    assert hub.downloads == ["config.json"]
    assert json.loads((folder / "config.json").read_text())


def client(url: str, tmp_path: Path, *, offline: bool = False) -> Hub:
    return Hub(endpoint=url, offline=offline, cache_dir=tmp_path / "hub-cache")


def pinned(hub: Hub, commit: str, part: Part = Part.WHOLE) -> Path:
    return hub.fetch(MODEL, revision=commit, progress=SILENT, answer_within_s=5.0, part=part)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_only_the_needed_files_are_downloaded_once(hub: FakeHub, fetch: Fetch) -> None:
    lines: list[str] = []

    folder = fetch(lines=lines)
    assert fetch() == folder

    check_checkpoint(folder)
    assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert lines[0] == "fetching org/tiny ..."
    assert lines[-1].startswith("fetching org/tiny: done in")


@pytest.mark.parametrize("offline", [False, True])
def test_a_downloaded_model_is_served_from_the_hub_cache_without_the_hub(
    fetch: Fetch, tmp_path: Path, offline: bool
) -> None:
    folder = fetch()

    unreachable = client(f"http://127.0.0.1:{closed_port()}", tmp_path, offline=offline)

    assert unreachable.fetch(MODEL, revision=None, progress=SILENT, answer_within_s=1.0) == folder


def test_a_quantized_model_is_refused_before_its_weights_are_downloaded(hub: FakeHub, fetch: Fetch) -> None:
    hub.files["config.json"] = b'{"quantization_config": {"quant_method": "awq"}}'

    with pytest.raises(ModelSourceError, match=r"^org/tiny: .* is quantized with awq"):
        fetch()

    assert hub.downloads == ["config.json"]


def test_a_model_with_pickled_weights_alone_is_refused(hub: FakeHub, fetch: Fetch) -> None:
    del hub.files["model.safetensors"]

    with pytest.raises(ModelSourceError, match=r"^org/tiny: .* a safetensors checkpoint is needed"):
        fetch()


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((403, "GatedRepo"), "org/tiny is gated: accept its terms at http"),
        ((401, "RepoNotFound"), "org/tiny is neither a directory here nor at http"),
        ((404, "RepoNotFound"), "org/tiny is neither a directory here nor at http"),
        ((401, ""), "org/tiny is refused by http"),
    ],
)
def test_each_refusal_of_the_hub_is_one_line(
    hub: FakeHub, fetch: Fetch, refusal: tuple[int, str], said: str
) -> None:
    hub.refused[MODEL] = refusal

    with pytest.raises(ModelSourceError) as caught:
        fetch()

    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_unknown_revision_is_named(fetch: Fetch) -> None:
    with pytest.raises(ModelSourceError, match=r"^org/tiny has no revision 'v9'"):
        fetch(revision="v9")


def test_a_hub_that_is_down_is_as_good_as_unreachable(hub: FakeHub, fetch: Fetch) -> None:
    hub.refused[MODEL] = (503, "")

    with pytest.raises(ModelUnreachable, match="does not answer"):
        fetch()


def test_a_branch_is_resolved_once_and_every_node_takes_that_commit(hub: FakeHub, tmp_path: Path) -> None:
    with serve(hub) as url:
        first = client(url, tmp_path / "a").fetch(
            MODEL, revision="main", progress=SILENT, answer_within_s=5.0, part=Part.TEXT
        )
        hub.commit = "d0d0" + "0" * 36
        second = pinned(client(url, tmp_path / "b"), first.name)
        moved = client(url, tmp_path / "c").fetch(MODEL, revision=None, progress=SILENT, answer_within_s=5.0)
    assert (first.name, second.name, moved.name) == (COMMIT, COMMIT, hub.commit)
    check_checkpoint(second)


def test_without_weights_the_rest_is_fetched_and_whether_there_are_any_is_known(
    hub: FakeHub, tmp_path: Path
) -> None:
    with serve(hub) as url:
        pinned(client(url, tmp_path), COMMIT, Part.TEXT)
        assert sorted(hub.downloads) == ["config.json", "tokenizer.json"]
        del hub.files["model.safetensors"]
        with pytest.raises(ModelSourceError, match=r"^org/tiny: http.* has no safetensors weights of it"):
            pinned(client(url, tmp_path / "b"), COMMIT, Part.TEXT)


def test_a_commit_that_is_there_is_not_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    with serve(hub) as url:
        folder = pinned(client(url, tmp_path), COMMIT)
    asked = len(hub.downloads)
    assert pinned(client(url, tmp_path), COMMIT) == folder, "though nobody answers any more"
    assert len(hub.downloads) == asked


def test_two_that_want_it_at_once_download_it_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.3
    with serve(hub) as url, ThreadPoolExecutor(2) as engines:
        both = [engines.submit(pinned, client(url, tmp_path), COMMIT) for _ in range(2)]
        folders = [one.result(timeout=30) for one in both]
    assert folders[0] == folders[1]
    check_checkpoint(folders[0])
    assert hub.downloads.count("model.safetensors") == 1


def test_what_is_left_by_one_that_was_killed_is_not_taken_for_whole(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 30.0
    program = (
        "import sys; from pathlib import Path; from shoal.cluster.sources.hub import Hub;"
        "from shoal.cluster.sources.progress import LineProgress;"
        "hub = Hub(endpoint=sys.argv[1], cache_dir=Path(sys.argv[2]));"
        f"hub.fetch({MODEL!r}, revision={COMMIT!r}, progress=LineProgress(), answer_within_s=5.0)"
    )
    with serve(hub) as url:
        command = [sys.executable, "-c", program, url, str(tmp_path / "hub-cache")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as killed:
            wait_until(lambda: {"model.safetensors", "tokenizer.json"} <= set(hub.downloads))
            killed.send_signal(signal.SIGKILL)
        hub.pause_s = 0.0
        with pytest.raises(ModelSourceError, match="does not answer"):
            pinned(client(f"http://127.0.0.1:{closed_port()}", tmp_path), COMMIT)
        check_checkpoint(pinned(client(url, tmp_path), COMMIT))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_gated_model_is_had_with_a_token_that_is_told_to_nobody(
    hub: FakeHub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelSourceError) as caught:
        fetch()
    assert str(caught.value).startswith("org/tiny is gated: accept its terms at http")
    assert str(caught.value).endswith("then set HF_TOKEN, or HF_TOKEN_PATH to a file with one")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check_checkpoint(fetch())


def test_a_cache_that_cannot_be_written_is_one_line(hub: FakeHub, fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "hub-cache").write_text("a file is in the way")
    with pytest.raises(ModelSourceError, match=r"cannot be written to .*hub-cache \(Not a directory\): free"):
        fetch()


def test_a_hub_that_accepts_and_stays_silent_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = client(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)

        with pytest.raises(ModelSourceError, match="does not answer"):
            hub.fetch(MODEL, revision=None, progress=SILENT, answer_within_s=0.1)


def test_offline_is_said_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="HF_HUB_OFFLINE is set"):
        client("http://unused", tmp_path, offline=True).fetch(
            MODEL, revision=None, progress=SILENT, answer_within_s=1.0
        )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("org/name.with.dots", True),
        ("./org/name", False),
        ("../name", False),
        ("~/name", False),
        ("/abs/name", False),
        ("name", False),
        ("a/b/c", False),
        ("org/file.gguf", False),
    ],
)
def test_what_looks_like_a_hub_id(model: str, expected: bool) -> None:
    assert looks_like_hub_id(model) is expected
