"""Finds the compiled kernels, building them where they are missing, and gives them their signatures."""

import ctypes
import fcntl
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from shoal.kernels import build

CARRIED = Path(__file__).parent / "_kernels.so"


class KernelsUnavailable(Exception):
    """No compiled kernels here and none can be built; the message is one line."""


_P, _L, _I, _F = c_void_p, c_long, c_int, c_float  # plain addresses: converting anything richer takes longer


# `Pool`, `Ring` and `Rows` of paged.h.
class Pool(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_long) for name in ("k_stride", "v_stride", "blocks")),
        *((name, c_int) for name in ("block_rows", "heads", "head_size", "is_bf16")),
    )


class Ring(ctypes.Structure):
    _fields_ = (("slots", Pool), ("segments", Pool), ("k", _P), ("v", _P), ("own_rows", _L))


class Rows(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("sequence", "position", "table", "store_from")),
        *((name, c_void_p) for name in ("slot", "start", "valid_from", "restores", "captures")),
        *((name, c_long) for name in ("count", "sequences", "width", "num_restores", "num_captures")),
    )


# The operations of ops.h.
class LinearOp(ctypes.Structure):
    _fields_ = (
        *(("w", _P), ("x", _P), ("x_stride", _L), ("y", _P), ("y_stride", _L)),
        *(("add", _I), ("gate", _I)),
    )


class ExpertsOp(ctypes.Structure):
    _fields_ = (
        *(("x", _P), ("x_stride", _L), ("logits", _P), ("logits_stride", _L)),
        *(("gate_up", _P), ("down", _P), ("y", _P), ("y_stride", _L)),
        *(("experts", _I), ("top", _I), ("gate", _I)),
    )


class GatherOp(ctypes.Structure):
    _fields_ = (
        *(("table", _P), ("table_stride", _L), ("table_rows", _L), ("dtype", _I)),
        *(("ids", _P), ("out", _P), ("out_stride", _L), ("size", _L), ("scale", _F)),
    )


class RmsNormOp(ctypes.Structure):
    _fields_ = (
        *(("x", _P), ("x_stride", _L), ("weight", _P)),
        *(("out", _P), ("out_stride", _L), ("heads", _L), ("size", _L), ("eps", _F), ("add", _I)),
    )


class RotateOp(ctypes.Structure):
    _fields_ = (
        *(("x", _P), ("x_stride", _L), ("heads", _L), ("head_size", _L)),
        *(("cosines", _P), ("sines", _P), ("positions", _L), ("half", _L)),
    )


class StoreOp(ctypes.Structure):
    _fields_ = (("k", _P), ("k_stride", _L), ("v", _P), ("v_stride", _L), ("pool", _P), ("ring", _P))


class AttentionOp(ctypes.Structure):
    _fields_ = (
        *(("q", _P), ("q_stride", _L), ("pool", _P), ("ring", _P), ("out", _P), ("out_stride", _L)),
        *(("q_heads", _I), ("window", _I), ("scale", _F), ("sinks", _P)),
    )


class RingOp(ctypes.Structure):
    _fields_ = (("ring", _P),)


class RecurrenceOp(ctypes.Structure):
    _fields_ = (
        *(("q", _P), ("q_stride", _L), ("k", _P), ("k_stride", _L), ("v", _P), ("v_stride", _L)),
        *(("decay", _P), ("beta", _P), ("out", _P), ("out_stride", _L)),
        *(("slots", _P), ("slot_stride", _L), ("num_slots", _L)),
        *(("segments", _P), ("segment_stride", _L), ("num_segments", _L)),
        *(("key_heads", _I), ("heads", _I), ("key_size", _I), ("value_size", _I)),
    )


# `Adjustment` of sample.cpp.
class Adjustment(ctypes.Structure):
    _fields_ = (
        *(("row", _L), ("tokens", _P), ("count", _L), ("prompt", _L)),
        *(("repetition", _F), ("frequency", _F), ("presence", _F)),
        *(("bias_ids", _P), ("bias", _P), ("biases", _L)),
    )


Function = Callable[..., int]
Op = LinearOp | ExpertsOp | GatherOp | RmsNormOp | RotateOp | StoreOp | AttentionOp | RingOp | RecurrenceOp


# What a tape holds, see tape.cpp.
class Call(ctypes.Structure):
    _fields_ = (("kernel", _P), ("op", _P))

    def __init__(self, kernel: Function, op: Op) -> None:
        """`op` must outlive it."""
        super().__init__(ctypes.cast(cast(Any, kernel), _P), ctypes.addressof(op))


_PER_ISA: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("linear", "experts", "gather", "rms_norm", "rotate", "store", "attention"), (_P, _P, _I)
    ),
    **dict.fromkeys(("restore", "capture", "commit", "recurrence"), (_P, _P, _I)),
    "sample": (_P, _L, _L, _L, _P, _P, _P, _P, _P, _P, _P, _L, _P, _I),
    "logprobs": (_P, _L, _L, _L, _P, _P, _L, _L, _P, _P, _P, _I),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions of one instruction set. Each runs without the GIL; 1 means rows or ids out of range."""

    isa: str
    linear: Function
    experts: Function
    gather: Function
    rms_norm: Function
    rotate: Function
    store: Function
    attention: Function
    restore: Function
    capture: Function
    commit: Function
    recurrence: Function
    sample: Function
    logprobs: Function


def kernels(isa: str | None = None) -> Kernels:
    """The kernels of one instruction set; the best this machine has unless named."""
    chosen = isa or instruction_sets()[0]
    if chosen not in instruction_sets():
        raise ValueError(f"instruction set {chosen!r} is not among {instruction_sets()}")
    functions: dict[str, Function] = {}
    for name, argtypes in _PER_ISA.items():
        function = load()[f"shoal_{name}_{chosen}"]
        function.argtypes, function.restype = argtypes, c_int
        functions[name] = function
    return Kernels(isa=chosen, **functions)


@cache
def instruction_sets() -> tuple[str, ...]:
    """What this machine can run, best first."""
    return tuple(_text(load(), "shoal_instruction_sets").split())


@cache
def load() -> ctypes.CDLL:
    """The library: carried beside the code if it is of these sources, else the user's cache, built once."""
    expected = build.source_hash()
    library = _open(CARRIED, expected) or _open(_cached_path(expected), expected) or _built(expected)
    library.shoal_linear_new.argtypes, library.shoal_linear_new.restype = (_I, _L, _L, _I, _I), _P
    library.shoal_linear_fill.argtypes, library.shoal_linear_fill.restype = (_P, _I, _L, _L, _P, _L, _I), None
    library.shoal_linear_settle.argtypes, library.shoal_linear_settle.restype = (_P, _I), _I
    library.shoal_linear_fill_bias.argtypes, library.shoal_linear_fill_bias.restype = (_P, _I, _P), None
    library.shoal_linear_num_bytes.argtypes, library.shoal_linear_num_bytes.restype = (_P,), _L
    library.shoal_linear_free.argtypes, library.shoal_linear_free.restype = (_P,), None
    library.shoal_run_tape.argtypes, library.shoal_run_tape.restype = (_P, _L, _P, _I), _I
    return library


def _cached_path(source_hash: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shoal" / "kernels" / source_hash / "_kernels.so"


def _built(source_hash: str) -> ctypes.CDLL:
    """The library, built into the cache. Processes that start together build it once."""
    path = _cached_path(source_hash)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if library := _open(path, source_hash):
                return library
            fresh = path.with_name(f"{os.getpid()}.so")
            build.compile_library(fresh)
            fresh.replace(path)  # whoever looks sees no library or a whole one
    except (build.BuildFailed, OSError) as error:
        raise KernelsUnavailable(f"the kernels cannot be built: {error}") from error
    if library := _open(path, source_hash):
        return library
    raise KernelsUnavailable(f"the kernels just built at {path} cannot be loaded")


def _open(path: Path, source_hash: str) -> ctypes.CDLL | None:
    """The library at `path`, if it is one and was built from the sources of that hash."""
    try:
        library = ctypes.CDLL(str(path))
        return library if _text(library, "shoal_source_hash") == source_hash else None
    except (OSError, AttributeError):
        return None


def _text(library: ctypes.CDLL, function: str) -> str:
    call = library[function]
    call.restype = ctypes.c_char_p
    text: bytes = call()
    return text.decode()
