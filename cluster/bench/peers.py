"""Peers of `shoal bench engine` by name: whether one can take part, and how it starts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shoal.cluster.bench.contender import Contender, Dtype, PeerName
from shoal.cluster.bench.llama_cpp_peer import LlamaCpp, find_program
from shoal.cluster.bench.transformers_peer import TransformersPeer
from shoal.cluster.bench.vllm_peer import check_vllm, running_vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    checkpoint: Path
    threads: int
    dtype: Dtype | None = None
    """Of the weights; None is what each is best known for: see `started`."""
    python: Path | None = None
    """An interpreter that has vLLM."""


def check(names: Sequence[PeerName], python: Path | None) -> None:
    """Before, not after, minutes of measuring. Raises PeerError."""
    if PeerName.LLAMA_CPP in names:
        find_program("llama-batched-bench")
    if PeerName.VLLM in names:
        check_vllm(python)


@contextmanager
def started(
    names: Sequence[PeerName], options: PeerOptions
) -> Iterator[MappingProxyType[PeerName, Contender]]:
    """All of them, until the end of the block. Raises PeerError."""
    with ExitStack() as stack:
        yield MappingProxyType({name: _started(name, options, stack) for name in names})


def _started(name: PeerName, options: PeerOptions, stack: ExitStack) -> Contender:
    checkpoint, threads, dtype = options.checkpoint, options.threads, options.dtype
    match name:
        case PeerName.TRANSFORMERS:
            return TransformersPeer(checkpoint, threads, dtype or "float32")
        case PeerName.LLAMA_CPP:
            return LlamaCpp(checkpoint, threads, dtype or "float16")
        case PeerName.VLLM:
            python = check_vllm(options.python)
            return stack.enter_context(running_vllm(python, checkpoint, threads, dtype))
