"""What is kept of a config.json: found as it was kept, and absent where anything else would be read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.actors.engine.models.choose import lean_model
from shoal.actors.engine.models.decoder_config import LeanModel, load_config
from shoal.cluster import readings
from shoal.cluster.readings import Reading, Readings
from tests.checkpoints import tiny_gemma3, tiny_gpt_oss, tiny_llama


def read(checkpoint: Path, max_model_len: int = 256) -> Reading:
    lean = lean_model(load_config(checkpoint), max_model_len)
    assert isinstance(lean, LeanModel)
    return Reading(max_model_len=max_model_len, lean=lean)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3, tiny_gpt_oss])
def test_a_reading_is_found_as_it_was_kept(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint, kept = make(tmp_path / "model"), Readings(tmp_path / "readings")
    assert kept.find(checkpoint, None) is None
    reading = read(checkpoint)
    kept.keep(checkpoint, None, reading)
    found = kept.find(checkpoint, None)
    assert found == reading
    assert found is not None and [rope.inverse for rope in found.lean.ropes] == [
        rope.inverse for rope in reading.lean.ropes
    ], "to the bit"


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Readings]:
    checkpoint, kept = tiny_llama(tmp_path / "model"), Readings(tmp_path / "readings")
    kept.keep(checkpoint, None, read(checkpoint))
    return checkpoint, kept


def test_another_configuration_length_or_library_is_read_anew(
    kept: tuple[Path, Readings], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, known = kept
    config = checkpoint / "config.json"
    before = config.read_text()
    config.write_text(before.replace("512", "511"))
    assert known.find(checkpoint, None) is None
    config.write_text(before)
    assert known.find(checkpoint, None) is not None, "the bytes decide, not when they were written"
    assert known.find(checkpoint, 256) is None, "a rope may depend on the length that was asked for"
    monkeypatch.setattr(readings, "version", lambda library: "0")
    assert known.find(checkpoint, None) is None


def test_the_same_configuration_elsewhere_is_known(kept: tuple[Path, Readings], tmp_path: Path) -> None:
    _, known = kept
    assert known.find(tiny_llama(tmp_path / "copy"), None) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"max_model_len": 1, "lean": {"config": {}}}'])
def test_what_is_damaged_counts_as_absent(kept: tuple[Path, Readings], tmp_path: Path, text: str) -> None:
    checkpoint, known = kept
    (file,) = (tmp_path / "readings").iterdir()
    file.write_text(text)
    assert known.find(checkpoint, None) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "model")
    (tmp_path / "file").write_text("")
    kept = Readings(tmp_path / "file" / "readings")
    kept.keep(checkpoint, None, read(checkpoint))
    assert kept.find(checkpoint, None) is None
