"""`shoal serve`: starts a cluster in Ray, keeps its lease, and tears it down when told to stop."""

import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.models.decoder_config import LeanModel, load_config, longest_length, usual_length
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.messages import HttpConfig, ModelCard
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.autoscaler import AutoscalingConfig
from shoal.cluster.driver import Account, watch
from shoal.cluster.host_memory import check_shared_memory, check_store_budget, needed_object_store_bytes
from shoal.cluster.launcher import object_store_bytes
from shoal.cluster.lifecycle import ServeError, changed, find_running, new_cluster
from shoal.cluster.readings import Reading, Readings
from shoal.cluster.sources import Part, resolve_model
from shoal.cluster.spec import ClusterSpec, DeploymentSpec
from shoal.cluster.start_time import StartTime, process_age_s
from shoal.cluster.watch import START_TIMEOUT_S
from shoal.kvstore.layout import KVDtype
from shoal.kvstore.sizes import format_size

CALL_DEADLINE_S = 5.0
MAX_PORT = 65535

DEFAULT_MEMORY_SHARE = 0.6
"""Of the memory that Ray has free, for all engines together; the rest is for ingress, Ray, page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line says; None is "choose for me"."""

    model: str | None = None
    revision: str | None = None
    served_model_name: str | None = None
    engines: int = 1
    ingresses: int = 1
    threads: int | None = None
    memory_bytes: int | None = None
    max_model_len: int | None = None
    block_size: int = 128
    kv_cache_dtype: KVDtype = "float32"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    num_dropped_layers: int = 0
    kv_store_bytes: int | None = None
    """Of each node; 0 is none."""
    kv_write_policy: WritePolicy = "write_through"
    prefix_cache: PrefixCacheName = "radix"
    routing_policy: RoutingPolicyName = "cost"
    require_kernels: bool = False
    http: HttpConfig = field(default_factory=HttpConfig)
    address: str | None = None
    name: str = "default"
    autoscaling: AutoscalingConfig | None = None
    """None: `engines`, whatever the load is."""
    is_detached: bool = False
    stop_grace_s: float = 3.0
    drain_s: float = 120.0
    start_timeout_s: float = START_TIMEOUT_S


def serve(options: ServeOptions, console: Console) -> None:
    """Run until SIGINT or SIGTERM. Raises ServeError or ValueError with a line for the operator."""
    took = StartTime(time.monotonic, before_s=process_age_s())
    took.until_here("command")
    # In a Ray of our own this node is the only one. Else each that hosts an engine gets the weights itself.
    is_ours = _address(options) == "local"
    part = Part.WHOLE if is_ours else Part.TEXT
    checkpoint = resolve_model(options.model, revision=options.revision, part=part)
    max_model_len, lean = _read_config(checkpoint.directory, options)
    model = ModelCard(
        name=options.served_model_name or checkpoint.name,
        checkpoint=str(checkpoint.directory) if is_ours else checkpoint.source,
        max_model_len=max_model_len,
        block_size=options.block_size,
        fingerprint=b"",  # which kernels the nodes have is known when the first engine is ready
    )
    # A wrong limit is refused before Ray is started.
    _spec(options, model, lean, _Share(threads=1, memory_bytes=1))
    took.until_here("model")
    with _connected(options) as dashboard_url, _stop_signal() as stop:
        took.until_here("Ray")
        if options.kv_store_bytes:
            check_store_budget(options.kv_store_bytes, max(object_store_bytes().values()))
        running = find_running(options.name, is_detached=options.is_detached)
        before = running.spec if running else None
        share = _share_of_an_engine(options, before, is_ours=is_ours)
        spec = _spec(options, model, lean, share, before)
        console.print(
            f"{'changing to' if running else 'starting'} {model.name} on {options.engines} engine(s) "
            f"in Ray namespace {spec.namespace}"
        )
        account = Account(spec, dashboard_url, took, console)
        with changed(running, spec) if running else new_cluster(spec) as supervisor:
            watch(supervisor, spec.namespace, stop, account, until_ready=options.is_detached)
            if options.is_detached and not account.was_ready:
                raise ServeError("stopped before it was ready")
            if not options.is_detached:
                console.print("stopping")


def _read_config(checkpoint: Path, options: ServeOptions) -> tuple[int, LeanModel | None]:
    """How long a sequence may be, and what engines would read. Refuses here a model that none could load."""
    wanted, kept = options.max_model_len, Readings.from_environment()
    if not options.num_dropped_layers and (reading := kept.find(checkpoint, wanted)):
        return reading.max_model_len, reading.lean
    # These import torch, and load_config transformers.
    from shoal.actors.engine.models.choose import lean_model, model_config  # noqa: PLC0415
    from shoal.cluster.footprint import Limits, footprint  # noqa: PLC0415

    hf = load_config(checkpoint)
    model_config(hf)
    limit = longest_length(hf)
    if wanted is not None and not 1 <= wanted <= limit:
        raise ValueError(f"--max-model-len {wanted} must be from 1 to the model's own {limit}")
    max_model_len = wanted or usual_length(hf)
    if options.num_dropped_layers:
        footprint(hf, Limits(max_model_len=max_model_len, num_dropped_layers=options.num_dropped_layers))
    if lean := lean_model(hf, max_model_len):
        kept.keep(checkpoint, wanted, Reading(max_model_len=max_model_len, lean=lean))
    return max_model_len, lean


@contextmanager
def _connected(options: ServeOptions) -> Iterator[str | None]:
    """Join the named Ray cluster, or start a private one that ends with us; yields its dashboard's address.

    Never joins whatever cluster happens to be found on the machine.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = _address(options)
    if address == "local" and options.is_detached:
        raise ServeError("--detached needs --address or RAY_ADDRESS: a Ray of our own ends with this command")
    private: dict[str, Any] = {}
    if address == "local":
        wanted_cpus = options.engines * (options.threads or 1)
        private = {"num_cpus": max(_num_cores(), wanted_cpus), "include_dashboard": True}
        private |= _object_store_of_our_own(options.kv_store_bytes)
    _check_that_somebody_listens(address)
    try:
        context = ray.init(address=address, logging_level=logging.WARNING, **private)
    except Exception as error:  # a bare one too, when a process of a Ray of our own does not start
        if address == "local":
            raise ServeError(f"Ray does not start here ({_reason(error)})") from error
        raise ServeError(f"no Ray at {address} ({_reason(error)}): check --address or RAY_ADDRESS") from error
    try:
        yield context.dashboard_url
    finally:
        ray.shutdown()


def _address(options: ServeOptions) -> str:
    return options.address or os.environ.get("RAY_ADDRESS") or "local"


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
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_DEADLINE_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServeError(f"no Ray at {address} ({reason}): check --address or RAY_ADDRESS") from error


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Set by SIGINT or SIGTERM. Installed after ray.init, which takes SIGTERM for itself."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one engine gets of the machines."""

    threads: int
    memory_bytes: int


def _share_of_an_engine(options: ServeOptions, running: ClusterSpec | None, *, is_ours: bool) -> _Share:
    """What is not said stays as it is, where a cluster is changed."""
    for deployment in running.deployments if running else ():
        before = deployment.engine
        return _Share(
            threads=options.threads or before.threads,
            memory_bytes=options.memory_bytes or before.memory_bytes,
        )
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    num_cpus, ray_memory = int(free.get("CPU", 0)), int(free.get("memory", 0))
    threads = options.threads or max(1, min(num_cpus, _num_cores()) // options.engines)
    memory_bytes = options.memory_bytes or int(DEFAULT_MEMORY_SHARE * ray_memory / options.engines)
    if options.threads and options.memory_bytes and not is_ours:
        return _Share(threads=threads, memory_bytes=memory_bytes)  # nodes may come; who waits says for what
    if threads * options.engines > num_cpus:
        raise ServeError(
            f"{options.engines} engines of {threads} threads need {threads * options.engines} CPUs; "
            f"Ray has {num_cpus} free: lower --engines or --threads"
        )
    if memory_bytes * options.engines > ray_memory:
        raise ServeError(
            f"{options.engines} engines of {format_size(memory_bytes)} need "
            f"{format_size(memory_bytes * options.engines)}; Ray has {format_size(ray_memory)} free: "
            "lower --engines or --memory"
        )
    return _Share(threads=threads, memory_bytes=memory_bytes)


def _spec(
    options: ServeOptions,
    model: ModelCard,
    lean: LeanModel | None,
    share: _Share,
    running: ClusterSpec | None = None,
) -> ClusterSpec:
    deployment = DeploymentSpec(
        model=model,
        num_engines=options.engines,
        autoscaling=options.autoscaling,
        routing_policy=options.routing_policy,
        start_timeout_s=options.start_timeout_s,
        engine=EngineConfig(
            checkpoint=model.checkpoint,
            max_model_len=model.max_model_len,
            memory_bytes=share.memory_bytes,
            threads=share.threads,
            block_size=options.block_size,
            kv_cache_dtype=options.kv_cache_dtype,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            prefix_cache=options.prefix_cache,
            num_dropped_layers=options.num_dropped_layers,
            kv_write_policy=options.kv_write_policy,
            require_kernels=options.require_kernels,
            lean=lean,
        ),
    )
    return ClusterSpec(
        name=options.name,
        deployments=(deployment,),
        kv_store_bytes=options.kv_store_bytes,
        http=_listeners(options.http, options.ingresses, running.http if running else ()),
        stop_grace_s=options.stop_grace_s,
        drain_s=options.drain_s,
        is_detached=options.is_detached,
    )


def _listeners(first: HttpConfig, num: int, running: Sequence[HttpConfig] = ()) -> tuple[HttpConfig, ...]:
    """Ports are chosen once, so that an ingress that is replaced comes back where its clients expect it."""
    if not first.port and len(running) == num:
        return tuple(replace(first, port=http.port) for http in running)
    ports = range(first.port, first.port + num) if first.port else _free_ports(first.host, num)
    if ports[-1] > MAX_PORT:
        raise ValueError(f"--port {first.port} leaves no room for --ingresses {num}: lower one of them")
    return tuple(replace(first, port=port) for port in ports)


def _free_ports(host: str, num: int) -> list[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        try:
            probes = [stack.enter_context(socket.socket(family)) for _ in range(num)]
            for probe in probes:
                probe.bind((host, 0))
        except OSError as error:
            reason = error.strerror or str(error)
            fix = "choose --host" if num == 1 else "choose --host or lower --ingresses"
            raise ServeError(f"cannot listen on {host}: {reason}; {fix}") from error
        return [int(probe.getsockname()[1]) for probe in probes]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
