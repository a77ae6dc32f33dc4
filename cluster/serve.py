"""`shoal serve`: starts a cluster in Ray, keeps its lease, and tears it down when told to stop."""

import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors
from rich.console import Console

from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.models.choose import lean_model, model_config
from shoal.actors.engine.models.decoder_config import LeanModel, load_config, longest_length, usual_length
from shoal.actors.messages import HttpConfig, ModelCard
from shoal.cluster.footprint import Limits, footprint
from shoal.cluster.host_memory import check_shared_memory, check_store_budget, needed_object_store_bytes
from shoal.cluster.launcher import object_store_bytes
from shoal.cluster.options import ServeOptions
from shoal.cluster.sources import resolve_model
from shoal.cluster.spec import ClusterSpec
from shoal.cluster.supervisor import ClusterStatus
from shoal.cluster.supervisor_actor import SUPERVISOR, SupervisorActor
from shoal.kvstore.messages import StoreId
from shoal.kvstore.sizes import format_size

CALL_DEADLINE_S = 5.0
TEARDOWN_DEADLINE_S = 30.0
POLL_S = 0.5
SILENCE_DEADLINE_S = 60.0
HANG_DEADLINE_S = 15.0
"""A supervisor that does not answer for so long is ended, and Ray starts it anew."""

DEFAULT_MEMORY_SHARE = 0.6
"""Of the memory that Ray has free, for all engines together; the rest is for ingress, Ray, page cache."""


class ServeError(Exception):
    """The cluster cannot run; one line for the operator."""


def serve(options: ServeOptions, console: Console) -> None:
    """Run until SIGINT or SIGTERM. Raises ServeError or ValueError with a line for the operator."""
    checkpoint = resolve_model(options.model, revision=options.revision)
    max_model_len, lean = _read_config(checkpoint.directory, options)
    model = ModelCard(
        name=options.served_model_name or checkpoint.name,
        checkpoint=str(checkpoint.directory),
        max_model_len=max_model_len,
        block_size=options.block_size,
        fingerprint=b"",  # which kernels the nodes have is known when the first engine is ready
    )
    # A wrong limit is refused before Ray is started.
    _spec(options, model, lean, _Share(threads=1, memory_bytes=1))
    with _connected(options) as dashboard_url, _stop_signal() as stop:
        if options.kv_store_bytes:
            check_store_budget(options.kv_store_bytes, max(object_store_bytes().values()))
        spec = _spec(options, model, lean, _share_of_an_engine(options))
        console.print(
            f"starting {model.name} on {options.engines} engine(s) in Ray namespace {spec.namespace}"
        )
        with _cluster(spec) as supervisor:
            _watch(
                supervisor,
                stop,
                lambda trouble: console.print(trouble, highlight=False, soft_wrap=True),
                lambda status: _announce(status, spec, dashboard_url, console),
            )
            console.print("stopping")


def _read_config(checkpoint: Path, options: ServeOptions) -> tuple[int, LeanModel | None]:
    """How long a sequence may be, and what engines would read. Refuses here a model that none could load."""
    hf, wanted = load_config(checkpoint), options.max_model_len
    model_config(hf)
    limit = longest_length(hf)
    if wanted is not None and not 1 <= wanted <= limit:
        raise ValueError(f"--max-model-len {wanted} must be from 1 to the model's own {limit}")
    max_model_len = wanted or usual_length(hf)
    if options.num_dropped_layers:
        footprint(hf, Limits(max_model_len=max_model_len, num_dropped_layers=options.num_dropped_layers))
    return max_model_len, lean_model(hf, max_model_len)


@contextmanager
def _connected(options: ServeOptions) -> Iterator[str | None]:
    """Join the named Ray cluster, or start a private one that ends with us; yields its dashboard's address.

    Never joins whatever cluster happens to be found on the machine.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
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


def _share_of_an_engine(options: ServeOptions) -> _Share:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    num_cpus, ray_memory = int(free.get("CPU", 0)), int(free.get("memory", 0))
    threads = options.threads or max(1, min(num_cpus, _num_cores()) // options.engines)
    memory_bytes = options.memory_bytes or int(DEFAULT_MEMORY_SHARE * ray_memory / options.engines)
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


def _spec(options: ServeOptions, model: ModelCard, lean: LeanModel | None, share: _Share) -> ClusterSpec:
    return ClusterSpec(
        name=options.name,
        model=model,
        num_engines=options.engines,
        kv_store_bytes=options.kv_store_bytes,
        routing_policy=options.routing_policy,
        stop_grace_s=options.stop_grace_s,
        http=_listeners(options.http, options.ingresses),
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


def _listeners(first: HttpConfig, num: int) -> tuple[HttpConfig, ...]:
    """Ports are chosen once, so that an ingress that is replaced comes back where its clients expect it."""
    ports = range(first.port, first.port + num) if first.port else _free_ports(first.host, num)
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


@contextmanager
def _cluster(spec: ClusterSpec) -> Iterator[Any]:
    """A supervisor, and through it the cluster; on the way out no actor of it is left."""
    if any(actor["name"] == SUPERVISOR for actor in _named_actors(spec.namespace)):
        raise ServeError(f"a cluster named {spec.name!r} runs in this Ray already: stop it or choose --name")
    _end_all(spec.namespace)  # left behind without a supervisor, and serving who knows what
    supervisor = (
        ray.remote(SupervisorActor)
        .options(
            name=SUPERVISOR,
            namespace=spec.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=0,
        )
        .remote(spec)
    )
    try:
        yield supervisor
    finally:
        _teardown(supervisor, spec)


def _watch(
    supervisor: Any,
    stop: threading.Event,
    say: Callable[[str], None],
    on_ready: Callable[[ClusterStatus], None],
) -> None:
    """Renew the lease until told to stop; say what goes wrong, and when the cluster becomes ready.

    A supervisor that died is restarted by Ray and adopts what runs: a silence is waited out for a while. One
    that hangs is made to die.
    """
    announced = False
    said: tuple[str, ...] = ()
    stores: set[StoreId] = set()
    has_spoken, heard = False, time.monotonic()
    waiting_since = heard
    while not stop.wait(POLL_S):
        try:
            _call(supervisor.renew_lease)
            status: ClusterStatus = _call(supervisor.status)
        except (RayError, GetTimeoutError) as error:
            now = time.monotonic()
            if now - heard > SILENCE_DEADLINE_S:
                reason = str(error).strip().splitlines()[-1]
                raise ServeError(
                    f"the supervisor is silent for {SILENCE_DEADLINE_S:.0f} s: {reason}"
                ) from error
            if now - waiting_since > HANG_DEADLINE_S and has_spoken and isinstance(error, GetTimeoutError):
                say("the supervisor hangs; ending it")
                ray.kill(supervisor, no_restart=False)
                waiting_since = now  # its successor has as long
            continue
        has_spoken, heard = True, time.monotonic()
        waiting_since = heard
        if status.failed:
            raise ServeError(status.failed)
        for trouble in status.troubles:
            if trouble not in said:
                say(f"{trouble}; trying again")
        said = status.troubles
        for store in status.stores:
            if store.store_id not in stores:
                stores.add(store.store_id)
                say(f"{store.store_id}: {format_size(store.budget_bytes)} of host memory for prefixes")
        if status.ready and not announced:
            announced = True
            on_ready(status)


def _announce(status: ClusterStatus, spec: ClusterSpec, dashboard_url: str | None, console: Console) -> None:
    for engine in status.engines:
        assert engine is not None
        console.print(
            f"{engine.engine_id}: {engine.backend}, {engine.memory}", highlight=False, soft_wrap=True
        )
    if dashboard_url:
        console.print(f"Ray dashboard: http://{dashboard_url}", highlight=False, soft_wrap=True)
    console.print(
        f"model: {spec.model.name} (context {spec.model.max_model_len})", highlight=False, soft_wrap=True
    )
    for ingress in status.ingresses:
        assert ingress is not None
        console.print(f"ready: {ingress.url}/v1", highlight=False, soft_wrap=True, style="bold green")


def _call(method: Any, timeout_s: float = CALL_DEADLINE_S) -> Any:
    return ray.get(method.remote(), timeout=timeout_s)


def _teardown(supervisor: Any, spec: ClusterSpec) -> None:
    """End the cluster's actors, the supervisor last, and see that none is left."""
    with suppress(RayError, GetTimeoutError):  # without its help we do it ourselves, below
        _call(supervisor.teardown, TEARDOWN_DEADLINE_S + spec.stop_grace_s)
        ray.kill(supervisor)
    _end_all(spec.namespace)


def _end_all(namespace: str) -> None:
    """Kill every named actor of the namespace and wait until none is left."""
    deadline = time.monotonic() + TEARDOWN_DEADLINE_S
    while left := _named_actors(namespace):
        if time.monotonic() > deadline:
            names = ", ".join(sorted(actor["name"] for actor in left))
            raise ServeError(f"still running after {TEARDOWN_DEADLINE_S:.0f} s: {names}")
        for actor in left:
            with suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=namespace))
        time.sleep(0.1)


def _named_actors(namespace: str) -> list[dict[str, str]]:
    return [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
