"""Routers of other projects, as processes in front of a server that answers at once."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from shoal.cluster.bench.contender import PeerError
from shoal.cluster.bench.server_process import free_port, running
from shoal.cluster.bench.vllm_peer import environment

START_DEADLINE_S = 60.0


class RouterName(StrEnum):
    SMG = "smg"
    VLLM_ROUTER = "vllm-router"


def check(names: Sequence[RouterName], python: Path | None) -> None:
    """Raises PeerError if one of them cannot be run."""
    for name in names:
        _program(name, python)


@contextmanager
def router(name: RouterName, worker_url: str, python: Path | None) -> Iterator[str]:
    """In front of that worker; yields its URL."""
    program = _program(name, python)
    port = free_port()
    command = [str(program), *_ARGUMENTS[name](worker_url, port)]
    url = f"http://127.0.0.1:{port}"
    with running(name, command, url, env=environment(program, os.environ), within_s=START_DEADLINE_S):
        yield url


def _program(name: RouterName, python: Path | None) -> Path:
    hint = f"python -m venv V && V/bin/pip install {name}, then --peer-python V/bin/python"
    if python is None:
        raise PeerError(f"--vs {name} needs an environment of its own: {hint}")
    program = python.absolute().with_name(name.value)
    if not program.is_file():
        raise PeerError(f"there is no {name} beside --peer-python {python}: {hint}")
    return program


def _launch(worker_url: str, port: int) -> list[str]:
    return ["launch", *_plain(worker_url, port)]


def _plain(worker_url: str, port: int) -> list[str]:
    where = ["--worker-urls", worker_url, "--host", "127.0.0.1", "--port", str(port)]
    where += ["--prometheus-port", str(free_port())]  # else both want the same
    return [*where, "--policy", "cache_aware"]


_ARGUMENTS: Mapping[RouterName, Callable[[str, int], list[str]]] = {
    RouterName.SMG: _launch,
    RouterName.VLLM_ROUTER: _plain,
}
