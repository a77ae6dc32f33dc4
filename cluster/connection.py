"""The Ray that a command joins, or starts for itself."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from shoal.cluster.host_memory import check_shared_memory, needed_object_store_bytes
from shoal.cluster.lifecycle import ServeError
from shoal.cluster.options import ServeOptions

LOCAL = "local"
"""Ray's own word for one that begins and ends with us."""

PROBE_DEADLINE_S = 5.0


@contextmanager
def connected(options: ServeOptions) -> Iterator[str | None]:
    """Join the named Ray cluster, or start a private one that ends with us; yields its dashboard's address.

    Never joins whatever cluster happens to be found on the machine.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = ray_address(options)
    if address == LOCAL and options.is_detached:
        raise ServeError("--detached needs --address or RAY_ADDRESS: a Ray of our own ends with this command")
    private: dict[str, Any] = {}
    if address == LOCAL:
        wanted_cpus = sum(model.engines * (model.threads or 1) for model in options.models)
        private = {"num_cpus": max(num_cores(), wanted_cpus), "include_dashboard": True}
        private |= _object_store_of_our_own(options.kv_store_bytes)
    _check_that_somebody_listens(address)
    try:
        context = ray.init(address=address, logging_level=logging.WARNING, **private)
    except Exception as error:  # a bare one too, when a process of a Ray of our own does not start
        if address == LOCAL:
            raise ServeError(f"Ray does not start here ({_reason(error)})") from error
        raise ServeError(f"no Ray at {address} ({_reason(error)}): check --address or RAY_ADDRESS") from error
    try:
        yield context.dashboard_url
    finally:
        ray.shutdown()


def ray_address(options: ServeOptions) -> str:
    return options.address or os.environ.get("RAY_ADDRESS") or LOCAL


def _reason(error: Exception) -> str:
    """A line of what Ray says. That may be the end of a log: then the last error in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def _object_store_of_our_own(kv_store_bytes: int | None) -> dict[str, int]:
    """Just large enough for the KV store if its size was chosen; what is not taken here is for engines."""
    if kv_store_bytes is None:
        return {}
    check_shared_memory(kv_store_bytes, shutil.disk_usage("/dev/shm").total)
    return {"object_store_memory": needed_object_store_bytes(kv_store_bytes)}


def _check_that_somebody_listens(address: str) -> None:
    """Ray itself would try for some minutes before it gives up on an address where nobody is."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # "local", "auto", or not ours to judge
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_DEADLINE_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServeError(f"no Ray at {address} ({reason}): check --address or RAY_ADDRESS") from error


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
