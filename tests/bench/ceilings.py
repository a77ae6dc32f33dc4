"""The most that some threads of this machine read from memory and multiply-add in a second."""

import ctypes
import os
import subprocess
from pathlib import Path

BYTES_A_THREAD = 96 << 20  # no cache holds it


class Ceilings:
    """The best of all that was measured so far."""

    def __init__(self, threads: int, directory: Path) -> None:
        library = directory / "ceilings.so"
        compiler = os.environ.get("CXX", "g++").split()
        flags = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
        source = Path(__file__).with_name("ceilings.cpp")
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.read_speed.argtypes = (ctypes.c_int, ctypes.c_long)
        self._library.read_speed.restype = self._library.fma_speed.restype = ctypes.c_double
        self._threads = threads
        self.bytes_per_s = self.flops_per_s = 0.0

    def measure(self) -> None:
        self.bytes_per_s = max(self.bytes_per_s, self._library.read_speed(self._threads, BYTES_A_THREAD))
        self.flops_per_s = max(self.flops_per_s, self._library.fma_speed(self._threads))
