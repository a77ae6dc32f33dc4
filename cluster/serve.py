"""`shoal serve`: from what was said to what a cluster is to be, in a Ray that is joined or started."""

import errno
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from rich.console import Console

from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.models.decoder_config import LeanModel, load_config, longest_length, usual_length
from shoal.actors.messages import HttpConfig, ModelCard
from shoal.cluster.connection import LOCAL, connected, num_cores, ray_address
from shoal.cluster.console import PLAIN
from shoal.cluster.driver import POLL_S, Account, watch
from shoal.cluster.host_memory import check_store_budget
from shoal.cluster.launcher import object_store_bytes
from shoal.cluster.lifecycle import ServeError, changed, find_running, new_cluster
from shoal.cluster.options import MAX_PORT, ModelOptions, ServeOptions
from shoal.cluster.readings import Reading, Readings
from shoal.cluster.signals import stop_signal
from shoal.cluster.sources import Part, resolve_model
from shoal.cluster.spec import ClusterSpec, DeploymentSpec
from shoal.cluster.start_time import StartTime, process_age_s
from shoal.cluster.work import Work, beside
from shoal.kvstore.sizes import format_size

LISTENED_ON = range(20_000, 32_768)

PREDECESSOR_DEADLINE_S = 45.0
"""A lease is 15 s, and its cluster then takes as long as any to end."""

DEFAULT_MEMORY_SHARE = 0.6
"""Of the memory that Ray has free, for all engines together; the rest is for ingress, Ray, page cache."""


def serve(options: ServeOptions, console: Console, work: Work | None = None) -> None:
    """Run until SIGINT or SIGTERM, or until work is done that is begun when the cluster is ready; what that
    raises is raised. Raises ServeError or ValueError with a line for the operator."""
    took = StartTime(time.monotonic, before_s=process_age_s())
    took.until_here("command")
    _check_door(options)
    models = [_read(model, is_ours=ray_address(options) == LOCAL) for model in options.models]
    # A wrong limit is refused before Ray is started.
    _spec(options, models, [_Share(threads=1, memory_bytes=1)] * len(models))
    took.until_here("model")
    with connected(options) as dashboard_url, stop_signal() as stop:
        took.until_here("Ray")
        if options.kv_store_bytes:
            check_store_budget(options.kv_store_bytes, max(object_store_bytes().values()))
        if work is not None and ray_address(options) != LOCAL:
            _wait_for_room(options, models, stop, console)
        running = find_running(options.name, is_detached=options.is_detached)
        before = running.spec if running else None
        shares = _shares(options, models, before)
        spec = _spec(options, models, shares, before)
        names = ", ".join(model.card.name for model in models)
        num_engines = sum(model.engines for model in options.models)
        console.print(
            f"{'changing to' if running else 'starting'} {names} on {num_engines} engine(s) "
            f"in Ray namespace {spec.namespace}",
            **PLAIN,
        )
        with (
            changed(running, spec) if running else new_cluster(spec) as supervisor,
            beside(work, stop) as begin,
        ):
            account = Account(spec, dashboard_url, took, console, begin)
            watch(supervisor, spec.namespace, stop, account, until_ready=options.is_detached)
            if options.is_detached and not account.was_ready:
                raise ServeError("stopped before it was ready")
            if not options.is_detached:
                console.print("stopping")


def _wait_for_room(
    options: ServeOptions, models: "Sequence[_Model]", stop: threading.Event, console: Console
) -> None:
    """What another has left that was killed goes within its lease; until then it may hold our name, and CPUs
    and memory."""
    deadline, said = time.monotonic() + PREDECESSOR_DEADLINE_S, False
    while time.monotonic() < deadline and not stop.is_set():
        try:
            find_running(options.name, is_detached=False)
            _shares(options, models, None)
            return
        except ServeError as error:
            if not said:
                console.print(f"{error}; waiting for {PREDECESSOR_DEADLINE_S:.0f} s", **PLAIN)
            said = True
        stop.wait(POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What is known of one before Ray is there."""

    options: ModelOptions
    card: ModelCard
    lean: LeanModel | None


def _read(options: ModelOptions, *, is_ours: bool) -> _Model:
    """is_ours: the Ray, so that this node is its only one. Else each that hosts an engine gets the weights
    itself."""
    part = Part.WHOLE if is_ours else Part.TEXT
    checkpoint = resolve_model(options.model, revision=options.revision, part=part)
    max_model_len, lean = _read_config(checkpoint.directory, options)
    card = ModelCard(
        name=options.served_model_name or checkpoint.name,
        checkpoint=str(checkpoint.directory) if is_ours else checkpoint.source,
        max_model_len=max_model_len,
        block_size=options.block_size,
        fingerprint=b"",  # which kernels the nodes have is known when the first engine is ready
        max_num_seqs=options.max_num_seqs,
    )
    return _Model(options=options, card=card, lean=lean)


def _check_door(options: ServeOptions) -> None:
    """What an ingress would say of its files, unless they are on its node alone."""
    http = options.http
    paths = [path for path in (http.api_keys, http.ssl_certfile, http.ssl_keyfile) if path is not None]
    if paths and (ray_address(options) == LOCAL or all(Path(path).exists() for path in paths)):
        from shoal.actors.ingress.door_files import DoorFiles  # noqa: PLC0415  (brings a web framework)

        DoorFiles(http, time.monotonic)


def _read_config(checkpoint: Path, options: ModelOptions) -> tuple[int, LeanModel | None]:
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
    lean = lean_model(hf, max_model_len)
    if options.num_dropped_layers or (options.speculative and lean is None):
        limits = Limits(
            max_model_len=max_model_len,
            num_dropped_layers=options.num_dropped_layers,
            num_draft_tokens=options.num_draft_tokens if options.speculative else 0,
        )
        footprint(hf, limits)
    if lean is not None:
        kept.keep(checkpoint, wanted, Reading(max_model_len=max_model_len, lean=lean))
    return max_model_len, lean


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one engine gets of the machines."""

    threads: int
    memory_bytes: int


def _shares(options: ServeOptions, models: Sequence[_Model], running: ClusterSpec | None) -> list[_Share]:
    """Of an engine of each model. What is not said is an even share of what is free, or stays as it is where
    a cluster is changed. Raises ServeError for more than there is, where nobody waits for more."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    num_cpus, ray_memory = int(free.get("CPU", 0)), int(free.get("memory", 0))
    num_engines = max(1, sum(model.engines for model in options.models))
    even = _Share(
        threads=max(1, min(num_cpus, num_cores()) // num_engines),
        memory_bytes=int(DEFAULT_MEMORY_SHARE * ray_memory / num_engines),
    )
    before = (
        {deployment.model.name: deployment.engine for deployment in running.deployments} if running else {}
    )
    shares = []
    for model in models:
        unsaid = before.get(model.card.name, even)
        shares.append(
            _Share(
                threads=model.options.threads or unsaid.threads,
                memory_bytes=model.options.memory_bytes or unsaid.memory_bytes,
            )
        )
    may_wait = options.is_detached or any(model.autoscaling for model in options.models)
    if not running and not may_wait:  # else nodes may come, and who waits says for what
        _check_that_they_fit(options, shares, num_cpus, ray_memory)
    return shares


def _check_that_they_fit(
    options: ServeOptions, shares: Sequence[_Share], num_cpus: int, ray_memory: int
) -> None:
    engines = [model.engines for model in options.models]
    cpus = sum(n * share.threads for n, share in zip(engines, shares, strict=True))
    memory = sum(n * share.memory_bytes for n, share in zip(engines, shares, strict=True))
    each = len(set(shares)) == 1
    if cpus > num_cpus:
        of_each = f" of {shares[0].threads} threads" if each else ""
        raise ServeError(
            f"{sum(engines)} engines{of_each} need {cpus} CPUs; Ray has {num_cpus} free: "
            "lower --engines or --threads"
        )
    if memory > ray_memory:
        of_each = f" of {format_size(shares[0].memory_bytes)}" if each else ""
        raise ServeError(
            f"{sum(engines)} engines{of_each} need {format_size(memory)}; Ray has {format_size(ray_memory)} "
            "free: lower --engines or --memory"
        )


def _spec(
    options: ServeOptions,
    models: Sequence[_Model],
    shares: Sequence[_Share],
    running: ClusterSpec | None = None,
) -> ClusterSpec:
    return ClusterSpec(
        name=options.name,
        deployments=tuple(
            _deployment(options, model, share) for model, share in zip(models, shares, strict=True)
        ),
        kv_store_bytes=options.kv_store_bytes,
        http=_listeners(options.http, options.ingresses, running.http if running else ()),
        ingress_labels=options.ingress_labels,
        stop_grace_s=options.stop_grace_s,
        drain_s=options.drain_s,
        is_detached=options.is_detached,
    )


def _deployment(options: ServeOptions, model: _Model, share: _Share) -> DeploymentSpec:
    said = model.options
    return DeploymentSpec(
        model=model.card,
        num_engines=said.engines,
        autoscaling=said.autoscaling,
        labels=said.node_labels,
        routing_policy=options.routing_policy,
        start_timeout_s=said.start_timeout_s,
        engine=EngineConfig(
            checkpoint=model.card.checkpoint,
            max_model_len=model.card.max_model_len,
            memory_bytes=share.memory_bytes,
            threads=share.threads,
            block_size=said.block_size,
            kv_cache_dtype=said.kv_cache_dtype,
            max_num_seqs=said.max_num_seqs,
            max_num_batched_tokens=said.max_num_batched_tokens,
            max_queued_requests=said.max_queued_requests,
            max_queued_tokens=said.max_queued_tokens,
            prefix_cache=said.prefix_cache,
            num_dropped_layers=said.num_dropped_layers,
            state_snapshot_every=said.state_snapshot_every,
            kv_write_policy=said.kv_write_policy,
            speculative=said.speculative,
            num_draft_tokens=said.num_draft_tokens,
            require_kernels=said.require_kernels,
            lean=model.lean,
        ),
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
    """Below those that the system gives to whoever connects somewhere: one of these might be taken again
    before an ingress listens on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(LISTENED_ON, len(LISTENED_ON)):
            probe = stack.enter_context(socket.socket(family))
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    probe.close()
                    continue
                reason = error.strerror or str(error)
                fix = "choose --host" if num == 1 else "choose --host or lower --ingresses"
                raise ServeError(f"cannot listen on {host}: {reason}; {fix}") from error
            ports.append(port)
            if len(ports) == num:
                return ports
    raise ServeError(f"cannot listen on {host}: too few ports are free; choose --host or lower --ingresses")
