"""Finding, building and refusing the compiled library."""

import importlib
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.kernels import build, library
from shoal.kernels.choose import choose_backend
from shoal.kernels.library import KernelsUnavailable

ROOT = Path(__file__).parents[2]


def compile_stub(out: Path, source_hash: str) -> None:
    """A library that only knows its hash, in a fraction of a second."""
    code = f'const char* shoal_source_hash(void) {{ return "{source_hash}"; }}'
    command = ["g++", "-x", "c", "-", "-shared", "-fPIC", "-o", str(out)]
    subprocess.run(command, input=code, text=True, check=True)


@pytest.fixture(autouse=True)
def nothing_loaded_yet() -> Iterator[None]:
    """Each test sees the library as a fresh process would, and leaves none of its stubs behind."""
    library.load.cache_clear()
    library.instruction_sets.cache_clear()
    yield
    library.load.cache_clear()
    library.instruction_sets.cache_clear()


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and no carried library; returns where the cached one goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "CARRIED", tmp_path / "absent.so")
    return tmp_path / "shoal" / "kernels" / build.source_hash() / "_kernels.so"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(nothing_built.parent))


def test_the_library_in_use_was_built_from_these_sources() -> None:
    assert library._text(library.load(), "shoal_source_hash") == build.source_hash()


def test_the_hash_covers_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (*build.HERE.glob("*.cpp"), *build.HERE.glob("*.h"), build.HERE / "build.py"):
        shutil.copy(path, tmp_path)
    before = build.source_hash()
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.source_hash() == before
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert build.source_hash() != before, path.name
        path.write_bytes(content)


def test_every_source_is_compiled() -> None:
    assert {path.name for path in build.HERE.glob("*.cpp")} == {*build.COMMON, *build.PER_ISA}


def test_a_carried_library_of_other_sources_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path, tmp_path: Path
) -> None:
    stale, cached = tmp_path / "stale.so", nothing_built
    compile_stub(stale, "of other sources")
    monkeypatch.setattr(library, "CARRIED", stale)
    monkeypatch.setattr(build, "compile_library", lambda out: compile_stub(out, build.source_hash()))
    with pytest.raises(
        AttributeError, match="shoal_linear_new"
    ):  # of the stub it built, not of the stale one
        library.load()
    assert cached.exists()


def test_half_a_library_is_built_anew(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    nothing_built.parent.mkdir(parents=True)
    nothing_built.write_text("half a download")
    monkeypatch.setattr(build, "compile_library", lambda out: compile_stub(out, build.source_hash()))
    assert library._built(build.source_hash()) is not None


def test_a_build_that_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    monkeypatch.setattr(build, "compile_library", lambda out: out.write_text("for another machine"))
    with pytest.raises(KernelsUnavailable, match=f"just built at {nothing_built} cannot be loaded"):
        library.load()


def test_those_that_start_together_build_once(monkeypatch: pytest.MonkeyPatch, nothing_built: Path) -> None:
    built: list[Path] = []

    def slow_build(out: Path) -> None:
        assert not nothing_built.exists()
        built.append(out)
        time.sleep(0.2)
        compile_stub(out, build.source_hash())

    monkeypatch.setattr(build, "compile_library", slow_build)
    starters = [threading.Thread(target=library._built, args=(build.source_hash(),)) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len(built) == 1
    assert sorted(path.name for path in nothing_built.parent.iterdir()) == ["_kernels.so", "lock"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_serves_with_one_loud_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = choose_backend(threads=1)
    assert backend.numerics_id.startswith("torch-reference, torch ")
    (line,) = caplog.messages
    assert "no C++ compiler" in line and "\n" not in line


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_required_kernels_raise() -> None:
    with pytest.raises(KernelsUnavailable, match=r"cannot be built: no C\+\+ compiler"):
        choose_backend(threads=1, require_kernels=True)


@pytest.mark.usefixtures("nothing_built")
def test_a_compiler_that_fails_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -include no_such_header.h")
    with pytest.raises(KernelsUnavailable, match=r"no_such_header\.h: No such file") as failed:
        library.load()
    assert "\n" not in str(failed.value)


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library, "CARRIED", tmp_path / "absent.so")
    with pytest.raises(KernelsUnavailable, match="cannot be built"):
        library.load()


def test_the_best_instruction_set_is_chosen_and_others_can_be_named() -> None:
    sets = library.instruction_sets()
    assert sets[-1] == "portable"
    assert library.kernels().isa == sets[0]
    assert [library.kernels(isa).isa for isa in sets] == list(sets)
    with pytest.raises(ValueError, match="mmx"):
        library.kernels("mmx")


def test_build_is_importable_alone_and_without_setuptools() -> None:
    """As pip's isolated build does: by path, where neither torch nor shoal exists."""
    code = f"""
import importlib.util, sys
sys.modules["setuptools"] = None
spec = importlib.util.spec_from_file_location("shoal.kernels.build", {str(ROOT / "kernels" / "build.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert len(module.source_hash()) == 64 and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def test_this_room_is_a_namespace() -> None:
    """transformers imports a package called `kernels` where there is one: ours must never look like it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert importlib.import_module("shoal.kernels").__file__ is None
