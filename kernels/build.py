"""Compiles the kernels into one shared library. pip loads this file alone, with only setuptools around."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent

# Compiled once for each instruction set.
PER_ISA = (
    "linear.cpp",
    "attention.cpp",
    "moe.cpp",
    "rowops.cpp",
    "rings.cpp",
    "recurrence.cpp",
    "sample.cpp",
)
COMMON = ("library.cpp", "pool.cpp", "tape.cpp", "weights.cpp")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
# In the order of the link, least first: where objects carry the same inline function of the standard library,
# the linker keeps the first copy, which then is one that every machine that needs it can run.
X86_ISAS = {"portable": (), "avx2": AVX2, "avx512": ("-mavx512f", "-mavx512bw", *AVX2)}

# The first line fixes the bits: no reordering, no fusing but what is written. The exact path relies on it.
FLAGS = (
    *("-std=c++20", "-O3", "-fno-fast-math", "-ffp-contract=off"),
    *("-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread"),
)


class BuildFailed(Exception):
    """The library could not be built; the message is one line."""


def source_hash() -> str:
    """Names a build: everything the library is made from, and the kind of machine it is for."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "build.py"]):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def compile_library(out: Path) -> None:
    """Build the library at `out`. Takes some 20 s on two cores."""
    compiler = _compiler()
    isas = X86_ISAS if platform.machine() in ("x86_64", "AMD64") else {"portable": ()}
    with tempfile.TemporaryDirectory() as scratch:
        units = [(name, [f'-DSHOAL_SOURCE_HASH="{source_hash()}"']) for name in COMMON]
        units += [(name, [f"-DSHOAL_ISA={isa}", *isas[isa]]) for isa in isas for name in PER_ISA]
        objects = [Path(scratch) / f"{i}.o" for i in range(len(units))]

        def compile_unit(i: int) -> None:
            name, flags = units[i]
            _run([*compiler, *FLAGS, *flags, "-c", str(HERE / name), "-o", str(objects[i])])

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(compile_unit, range(len(units))))
        out.parent.mkdir(parents=True, exist_ok=True)
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(out)])


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildFailed("no C++ compiler: none of $CXX, g++, c++, clang++")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise BuildFailed(f"{command[0]}: {why}")


def __getattr__(name: str) -> object:
    """`BuildKernels`, the `build_ext` of pyproject.toml, made when asked for: only pip needs setuptools."""
    if name != "BuildKernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from setuptools import Extension  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415
    from setuptools.errors import CompileError  # noqa: PLC0415

    class BuildKernels(build_ext):
        """Puts the library beside the code, for any Python: it is no extension module."""

        def get_ext_filename(self, fullname: str) -> str:
            return str(Path(*fullname.split("."))) + ".so"

        def build_extension(self, ext: Extension) -> None:
            try:
                compile_library(Path(self.get_ext_fullpath(ext.name)))
            except BuildFailed as failed:
                raise CompileError(str(failed)) from None  # setuptools goes on: the extension is optional

    return BuildKernels
