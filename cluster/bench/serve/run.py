"""A server under load: meet it, warm it up, play the workload, keep what happened."""

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from shoal.cluster.bench.serve.arrivals import ArrivalName, arrivals
from shoal.cluster.bench.serve.client import Failure, OpenAIClient, connected
from shoal.cluster.bench.serve.dialogue import Dialogue, Endpoint
from shoal.cluster.bench.serve.load import LoadGenerator, Record, WallClock
from shoal.cluster.bench.serve.workload import Lengths, Session, Workload, WorkloadConfig

DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 100
REFUSED = ("http_400", "http_422")


class BenchError(Exception):
    """Nothing can be measured; one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    url: str
    """With or without the /v1 at its end."""
    model: str | None = None
    """None is the one that the server lists first."""
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint | None = None
    """None is chat for text, completions for token ids."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    concurrency: int | None = None
    """Clients of a closed loop."""
    rate: float | None = None
    """Requests a second of an open loop."""
    arrivals: ArrivalName = "poisson"
    num_requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    timeout_s: float = 300.0
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {self.url} must begin with http:// or https://")
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("--rate is an open loop and --concurrency a closed one: choose one")
        for name in ("rate", "duration_s", "timeout_s", "concurrency", "num_requests"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.removesuffix('_s').replace('_', '-')} must be above 0")
        if self.workload.prompt_format == "token_ids" and self.endpoint == "chat":
            raise ValueError("chat takes text: --prompt-format token_ids needs --endpoint completions")

    @property
    def base_url(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def spoken_endpoint(self) -> Endpoint:
        return self.endpoint or ("chat" if self.workload.prompt_format == "text" else "completions")

    @property
    def num_clients(self) -> int | None:
        """Of a closed loop; None if the loop is open."""
        return None if self.rate is not None else self.concurrency or DEFAULT_CONCURRENCY

    @property
    def num_sessions(self) -> int | None:
        """None is "as many as the duration has room for"."""
        if self.num_requests is None and self.duration_s is not None:
            return None
        return -(-(self.num_requests or DEFAULT_NUM_REQUESTS) // self.workload.knob("turns"))

    @property
    def planned(self) -> int | None:
        """Requests; whole sessions only."""
        return None if self.num_sessions is None else self.num_sessions * self.workload.knob("turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server turned out to take."""

    model: str
    fields: dict[str, Any]
    """Sent in every request."""

    @property
    def ignores_eos(self) -> bool:
        return "ignore_eos" in self.fields


@dataclass(slots=True, kw_only=True)
class Run:
    """What was measured, or is being measured: an interrupted run is reported too."""

    config: ServeBenchConfig
    server: Server
    load: LoadGenerator
    started: float
    """Seconds since the epoch; everything else is monotonic."""
    started_at: float
    cpu_share: float = 0.0
    """Of one core, used by this process while it measured."""
    interrupted: bool = False


class Bench:
    def __init__(
        self,
        config: ServeBenchConfig,
        *,
        on_stage: Callable[[str], None],
        on_record: Callable[[Record], None],
    ) -> None:
        self._config = config
        self._on_stage = on_stage
        self._on_record = on_record
        self._clock = WallClock()
        self._workload = Workload(config.workload)
        self.run: Run | None = None
        """From when measuring begins."""

    async def play(self) -> None:
        """Raises BenchError if the server cannot be used at all."""
        config = self._config
        async with connected(
            config.base_url, api_key=config.api_key, timeout_s=config.timeout_s, clock=self._clock.now
        ) as client:
            self._on_stage("asking the server")
            server = await meet(client, config)
            self._on_stage("warming up")
            await self._generator(client, server).closed_loop(
                map(self._workload.session, range(config.warmup)), config.num_clients or DEFAULT_CONCURRENCY
            )
            self._on_stage("measuring")
            load = self._generator(client, server, self._on_record)
            self.run = Run(
                config=config,
                server=server,
                load=load,
                started=time.time(),
                started_at=self._clock.now(),
            )
            cpu_s = time.process_time()
            try:
                await self._measure(load, self.run.started_at)
            finally:
                wall_s = max(self._clock.now() - self.run.started_at, 1e-9)
                self.run.cpu_share = (time.process_time() - cpu_s) / wall_s

    def _generator(
        self, client: OpenAIClient, server: Server, on_record: Callable[[Record], None] = lambda record: None
    ) -> LoadGenerator:
        return LoadGenerator(
            client.ask,
            self._clock,
            endpoint=self._config.spoken_endpoint,
            fields=server.fields,
            on_record=on_record,
        )

    async def _measure(self, load: LoadGenerator, started_at: float) -> None:
        config = self._config
        sessions: Iterator[Session] = map(self._workload.session, count(config.warmup))
        if config.num_sessions is not None:
            sessions = islice(sessions, config.num_sessions)
        until = math.inf if config.duration_s is None else started_at + config.duration_s
        if config.rate is None:
            await load.closed_loop(sessions, config.num_clients or DEFAULT_CONCURRENCY, until=until)
        else:
            times = arrivals(config.arrivals, config.rate / self._workload.turns, config.workload.seed)
            await load.open_loop(sessions, times, until=until)


async def meet(client: OpenAIClient, config: ServeBenchConfig) -> Server:
    """Find out with short requests, on prompts that are not measured, what the server is called and takes."""
    model = config.model or await _first_model(client, config)
    required = {"model": model, "temperature": 0, "seed": config.workload.seed, "stream": True}
    optional: dict[str, Any] = {"ignore_eos": True} if config.ignore_eos else {}
    optional |= {"stream_options": {"include_usage": True}}
    workload = config.workload
    longest = replace(workload, seed=~workload.seed, input_len=Lengths(*[workload.input_len.high] * 2))
    session = Workload(longest).session(0)
    question = Dialogue(session, config.spoken_endpoint).ask(replace(session.turns[0], output_len=1))
    while True:
        fields = required | optional
        outcome = await client.ask(config.spoken_endpoint, json.dumps(fields | question).encode())
        if not isinstance(outcome, Failure):
            return Server(model=model, fields=fields)
        if outcome.kind not in REFUSED or not optional:
            raise _unusable(config, outcome)
        del optional[next(iter(optional))]


async def _first_model(client: OpenAIClient, config: ServeBenchConfig) -> str:
    models = await client.models()
    if isinstance(models, Failure):
        raise _unusable(config, models)
    if not models:
        raise BenchError(f"{config.base_url}/models lists no model: choose --model")
    return models[0]


def _unusable(config: ServeBenchConfig, failure: Failure) -> BenchError:
    match failure.kind:
        case "connect":
            return BenchError(f"no server at {config.base_url} ({failure.message}): check --url")
        case "http_401" | "http_403":
            return BenchError(f"{config.base_url} refuses the key ({failure.message}): check --api-key")
        case kind:
            return BenchError(f"{config.base_url}: {kind}: {failure.message}")


def run_bench(
    config: ServeBenchConfig,
    *,
    on_stage: Callable[[str], None],
    on_record: Callable[[Record], None],
) -> Run:
    """Ctrl-C ends it early; what was recorded until then is kept. Raises BenchError."""
    _allow_many_connections()
    bench = Bench(config, on_stage=on_stage, on_record=on_record)
    interrupted = False
    try:
        asyncio.run(bench.play())
    except KeyboardInterrupt:
        interrupted = True
    if bench.run is None:
        raise BenchError("interrupted before anything was measured")
    bench.run.interrupted = interrupted
    return bench.run


def _allow_many_connections() -> None:
    """Each open stream is a file; the usual soft limit of 1,024 would be the load's ceiling."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a hard limit of "infinity" that the kernel does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
