"""Within a Ray job's package, an error about a file that is missing says why that may be."""

from pathlib import Path

import pytest

from shoal.cluster.config import ConfigError, load_config
from shoal.cluster.sources.checkpoint import ModelSourceError, check_checkpoint

HINT = "; here is a Ray job's package, without what .gitignore and .rayignore name: "


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray unpacks one."""
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    return package


def test_61_a_configuration_that_was_ignored(package: Path) -> None:
    with pytest.raises(ConfigError, match=HINT) as raised:
        load_config(Path("my.yaml"))
    assert str(raised.value).startswith(
        "my.yaml: cannot be read (No such file or directory): check its name;"
    )
    assert str(raised.value).endswith("or submit with RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1")


def test_61_a_model_that_was_ignored(package: Path) -> None:
    with pytest.raises(ModelSourceError, match=HINT):
        check_checkpoint(package / "model")


def test_elsewhere_nothing_of_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError) as raised:
        check_checkpoint(tmp_path / "model")
    assert str(raised.value).endswith(
        "is not a directory: give a checkpoint folder, a .gguf file, a hub id, s3:// or gs://"
    )
