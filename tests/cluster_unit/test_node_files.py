"""How an actor comes by a model's files on its node: what is there already, what is fetched, what is said."""

import pickle
from pathlib import Path

import pytest

from shoal.cluster import node_files
from shoal.cluster.node_files import ToldProgress
from tests.checkpoints import hollow_checkpoint
from tests.cluster_unit.test_sources_hub import COMMIT, MODEL, FakeHub, closed_port, serve


def nothing(_: str) -> None:
    pass


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a node that has nothing."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "shoal"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    for fetch in (node_files.whole, node_files.without_weights):
        assert fetch(str(tmp_path), nothing) == str(tmp_path)
        assert pickle.loads(pickle.dumps(fetch)) is fetch, "it goes to other processes by its name"


def test_a_folder_that_is_not_there_says_so_and_what_else_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none is not there: mount it on every node, or name a hub id or s3"
    ):
        node_files.whole(str(tmp_path / "none"), nothing)


def test_a_hub_model_is_fetched_and_told_of(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = hollow_checkpoint(tmp_path / "origin")
    hub = FakeHub(files={path.name: path.read_bytes() for path in origin.iterdir()})
    told: list[str] = []
    with serve(hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        text = node_files.without_weights(f"hf://{MODEL}@{COMMIT}", nothing)
        assert not (Path(text) / "model.safetensors").exists()
        whole = node_files.whole(f"hf://{MODEL}@{COMMIT}", told.append)
    assert whole == text, "the same snapshot, with more in it"
    assert (Path(whole) / "model.safetensors").read_bytes() == (origin / "model.safetensors").read_bytes()
    assert told[0] == "fetching org/tiny" and told[-1].startswith("fetching org/tiny: ")
    assert node_files.whole(f"hf://{MODEL}@{COMMIT}", told.append) == whole, "and nobody answers any more"


def test_what_may_be_had_later_is_an_oserror_and_names_the_node(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(
        OSError, match=r"^on .*: org/tiny is not in the hub cache, and http.* does not answer"
    ):
        node_files.whole(f"hf://{MODEL}@{COMMIT}", nothing)


def test_what_can_only_be_mended_is_a_valueerror(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(FakeHub(files={}, token="hf_secret")) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(
            ValueError, match=r"^on .*: org/tiny is gated: .* then set HF_TOKEN, or HF_TOKEN_PATH"
        ):
            node_files.whole(f"hf://{MODEL}@{COMMIT}", nothing)


def test_progress_is_told_in_sizes() -> None:
    told: list[str] = []
    with ToldProgress(told.append).step("fetching org/large") as step:
        step.add_total(16 << 30)
        step.advance(12 << 30)
        step.advance(100 << 20)
    assert told == [
        "fetching org/large",
        "fetching org/large: 12GiB of 16GiB",
        "fetching org/large: 12.1GiB of 16GiB",
    ]


def test_a_gguf_file_must_be_the_one_that_the_cluster_was_told_of(node: Path) -> None:
    gguf = node / "a.gguf"
    gguf.write_bytes(b"GGUF but another")
    with pytest.raises(
        ValueError, match=r"a\.gguf is another file here than where the cluster was told of it"
    ):
        node_files.whole(f"{gguf}@{'0' * 64}", nothing)
    gguf.unlink()
    with pytest.raises(ValueError, match=r"a\.gguf does not exist"):
        node_files.whole(f"{gguf}@{'0' * 64}", nothing)
