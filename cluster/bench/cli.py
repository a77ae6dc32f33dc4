"""`shoal bench`: one engine beside peers, a server under load, a trace on simulated engines."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.bench.contender import Dtype, PeerError, PeerName
from shoal.cluster.bench.rust_routers import RouterName
from shoal.cluster.bench.serve.arrivals import ArrivalName
from shoal.cluster.bench.serve.dialogue import Endpoint
from shoal.cluster.bench.serve.workload import Lengths, PromptFormat, WorkloadConfig, WorkloadName
from shoal.cluster.console import PLAIN, one_line_errors, write

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

app = typer.Typer(help="Measure speed.", no_args_is_help=True)


@app.command()
def engine(
    model: Annotated[str | None, typer.Argument(help="As for `shoal serve`.")] = None,
    *,
    vs: Annotated[
        list[PeerName] | None, typer.Option(help="A peer; may be given several times. Default: transformers.")
    ] = None,
    peer_dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of the peers' weights. Default: transformers float32, llama.cpp float16, vllm as saved."
        ),
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="The interpreter of an environment that has vLLM.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of all sides.")] = None,
) -> None:
    """Decode at batch 1, 8 and 32, and prefill of 128 and 1,024 tokens, beside peers in the same run."""
    from shoal.cluster.bench import peers  # noqa: PLC0415  (torch takes seconds)
    from shoal.cluster.bench.engine import bench_engine, report  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError, resolve_model  # noqa: PLC0415

    console = Console()
    names = list(dict.fromkeys(vs or [PeerName.TRANSFORMERS]))
    with one_line_errors(ModelSourceError, PeerError):
        _check_writable(json_file)
        _check_plot(plot)
        peers.check(names, peer_python)
        checkpoint = resolve_model(model)
        threads = threads or len(os.sched_getaffinity(0))
        options = peers.PeerOptions(
            checkpoint=checkpoint.directory, threads=threads, dtype=peer_dtype, python=peer_python
        )
        with peers.started(names, options) as contenders:
            rows = bench_engine(checkpoint.directory, threads, contenders, console)
    report(rows, json_file, console)
    if plot is not None:
        from shoal.cluster.bench.engine_plot import draw  # noqa: PLC0415  (matplotlib is an extra)

        draw(rows, f"{checkpoint.name}, {threads} threads", plot)
        console.print(f"drawn to {plot}", **PLAIN)


@app.command()
def store(
    model: Annotated[str | None, typer.Argument(help="As for `shoal serve`.")] = None,
    *,
    decode: Annotated[
        bool, typer.Option(help="Also what saving costs an engine that decodes meanwhile.")
    ] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of that engine.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Save to and fetch from a KV store, on two nodes of a private Ray, beside memcpy and TCP."""
    from shoal.actors.engine.config import EngineConfig  # noqa: PLC0415  (torch takes seconds)
    from shoal.cluster.bench.engine_stream import EngineFailed  # noqa: PLC0415
    from shoal.cluster.bench.store import bench_store, report  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError, resolve_model  # noqa: PLC0415

    console = Console()
    with one_line_errors(ModelSourceError, EngineFailed):
        _check_writable(json_file)
        config = None
        if decode:
            config = EngineConfig(
                checkpoint=str(resolve_model(model).directory),
                max_model_len=1024,
                memory_bytes=2 << 30,
                threads=threads or len(os.sched_getaffinity(0)),
                max_num_seqs=8,
                max_num_batched_tokens=128,
            )
        result = bench_store(config, console)
    report(result, json_file, console)


@app.command()
def reuse(
    model: Annotated[str | None, typer.Argument(help="As for `shoal serve`.")] = None,
    *,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Are reused; made up to whole blocks.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Each with a fresh prompt.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine; one works at a time.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Time to first token with a prefix nowhere, on the device, in its node's store, in another node's."""
    from shoal.actors.engine.config import EngineConfig  # noqa: PLC0415  (torch takes seconds)
    from shoal.actors.engine.models.decoder_config import load_config, longest_length  # noqa: PLC0415
    from shoal.cluster.bench.engine_stream import EngineFailed  # noqa: PLC0415
    from shoal.cluster.bench.reuse import ReuseError, measure, report  # noqa: PLC0415
    from shoal.cluster.bench.reuse_nodes import OUTPUT_TOKENS, started  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError, resolve_model  # noqa: PLC0415

    console = Console()
    block_size = 128
    prefix_tokens = -(-prefix_tokens // block_size) * block_size
    prompt_tokens = prefix_tokens + block_size
    with one_line_errors(ModelSourceError, ReuseError, EngineFailed):
        _check_writable(json_file)
        checkpoint = resolve_model(model)
        limit = longest_length(load_config(checkpoint.directory))
        if prompt_tokens + OUTPUT_TOKENS > limit:
            raise ValueError(f"--prefix-tokens {prefix_tokens} is too long: the model ends at {limit} tokens")
        config = EngineConfig(
            checkpoint=str(checkpoint.directory),
            max_model_len=prompt_tokens + OUTPUT_TOKENS,
            memory_bytes=2 << 30,
            threads=threads or len(os.sched_getaffinity(0)),
            block_size=block_size,
            max_num_seqs=4,
        )
        with started(config, prompt_tokens) as nodes:
            measured = measure(nodes, prefix_tokens, block_size=block_size, rounds=rounds, console=console)
    about = {"model": checkpoint.name, "threads": config.threads, "prompt_tokens": prompt_tokens}
    report(measured, about, json_file, console)


@app.command()
def overhead(
    model: Annotated[
        str | None, typer.Argument(help="Whose tokenizer is used; as for `shoal serve`.")
    ] = None,
    *,
    vs: Annotated[
        list[RouterName] | None, typer.Option(help="Another router, in front of an equal server.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="The interpreter of an environment that has those routers.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Of ours, that answer at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="The best of each server's counts.")] = 3,
    requests: Annotated[int, typer.Option(help="Of one client, one after the other, in a round.")] = 300,
    concurrency: Annotated[int, typer.Option(help="Clients at once, for the requests a second.")] = 32,
    requests_at_once: Annotated[int, typer.Option(help="Of all of these in a round.")] = 1500,
    input_len: Annotated[int, typer.Option(help="Words of a prompt, about as many tokens.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """What front door, router and Ray add to an engine that answers at once."""
    from shoal.cluster.bench import overhead_servers, rust_routers  # noqa: PLC0415  (Ray takes a second)
    from shoal.cluster.bench.overhead import OverheadError, Plan, measure, report  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError, resolve_model  # noqa: PLC0415

    console = Console()
    names = list(dict.fromkeys(vs or []))
    with one_line_errors(ModelSourceError, PeerError, OverheadError):
        _check_writable(json_file)
        rust_routers.check(names, peer_python)
        plan = Plan(
            rounds=rounds,
            requests=requests,
            concurrency=concurrency,
            requests_at_once=requests_at_once,
            input_len=input_len,
        )
        checkpoint = resolve_model(model)
        with overhead_servers.started(checkpoint, engines, names, peer_python) as servers:
            rows = measure(servers, checkpoint.name, plan, console)
    report(rows, plan, json_file, console)


@app.command()
def serve(
    *,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the one that the server lists first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SHOAL_API_KEY", help="Sent as a bearer token.")
    ] = None,
    endpoint: Annotated[
        Endpoint | None, typer.Option(help="Default: chat for text, completions for token ids.")
    ] = None,
    workload: Annotated[
        WorkloadName,
        typer.Option(help="Independent requests, groups that share a prefix, or conversations."),
    ] = "random",
    prompt_format: Annotated[PromptFormat, typer.Option(help="What prompts are made of.")] = "text",
    input_len: Annotated[str, typer.Option(help="Tokens of each turn: N, or MIN:MAX drawn evenly.")] = "256",
    output_len: Annotated[str, typer.Option(help="Tokens of each reply: N, or MIN:MAX drawn evenly.")] = "64",
    groups: Annotated[int | None, typer.Option(help="Prefixes. Default: 4; multi-turn: 1.")] = None,
    prefix_len: Annotated[
        int | None, typer.Option(help="Tokens of a shared prefix. Default: 512; multi-turn: 0.")
    ] = None,
    turns: Annotated[int | None, typer.Option(help="Of a multi-turn conversation. Default: 4.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: clients. Default: 8.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second.")] = None,
    arrivals: Annotated[ArrivalName, typer.Option(help="Of an open loop.")] = "poisson",
    num_requests: Annotated[
        int | None,
        typer.Option(help="In whole conversations. Default: 100, or what --duration has room for."),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds after which nothing more is sent.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Sessions played before, not counted.")] = 0,
    seed: Annotated[
        int, typer.Option(help="Of prompts, lengths and arrivals: the same seed sends the same.")
    ] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole reply.")] = 300.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for replies of full length, if the server can.")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="One row a request in the JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here.")] = None,
) -> None:
    """Load any OpenAI-compatible server; measure throughput, latencies and cached tokens."""
    from shoal.cluster.bench.serve.progress import watched  # noqa: PLC0415
    from shoal.cluster.bench.serve.report import as_json, show, summary_of  # noqa: PLC0415
    from shoal.cluster.bench.serve.run import BenchError, ServeBenchConfig  # noqa: PLC0415

    console = Console()
    with one_line_errors(BenchError):
        _check_writable(json_file)
        _check_plot(plot)
        if rows and json_file is None:
            raise ValueError("--rows go into a file: choose --json")
        config = ServeBenchConfig(
            url=url,
            model=model,
            api_key=api_key,
            endpoint=endpoint,
            workload=WorkloadConfig(
                name=workload,
                prompt_format=prompt_format,
                input_len=Lengths.parse(input_len),
                output_len=Lengths.parse(output_len),
                groups=groups,
                prefix_len=prefix_len,
                turns=turns,
                seed=seed,
            ),
            concurrency=concurrency,
            rate=rate,
            arrivals=arrivals,
            num_requests=num_requests,
            duration_s=duration,
            warmup=warmup,
            timeout_s=timeout,
            ignore_eos=ignore_eos,
        )
        run = watched(config, Console(stderr=True))
    summary = summary_of(run)
    show(run, summary, console)
    if json_file is not None:
        write(json_file, as_json(run, summary, with_requests=rows), console)
    if plot is not None:
        from shoal.cluster.bench.serve.plot import draw  # noqa: PLC0415  (matplotlib is an extra)

        draw(run, summary, plot)
        console.print(f"drawn to {plot}", **PLAIN)
    if not summary.completed:
        raise typer.Exit(1)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="JSON lines in Mooncake's format.")],
    *,
    policy: Annotated[
        Literal[RoutingPolicyName, "all"], typer.Option(help="How requests are placed; all: side by side.")
    ] = "cost",
    engines: Annotated[int, typer.Option(min=1, help="Simulated engines.")] = 8,
    engines_per_node: Annotated[int, typer.Option(min=1, help="That share a store and a network link.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens that a hash id stands for.")] = 512,
    blocks: Annotated[int, typer.Option(min=0, help="That an engine holds; 0: all of the trace.")] = 450,
    store_blocks: Annotated[
        int, typer.Option(min=-1, help="That a node's store holds; 0: no stores, -1: all of the trace.")
    ] = 4000,
    kv_write_policy: Annotated[WritePolicy, typer.Option(help="As of `shoal serve`.")] = "write_through",
    bytes_per_token: Annotated[int, typer.Option(min=1, help="Of keys and values.")] = 262_144,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="Of a prompt, by one engine.")] = 8000.0,
    step_ms: Annotated[float, typer.Option(help="A step that only draws, with one short sequence.")] = 16.0,
    row_ms: Annotated[float, typer.Option(help="Each sequence more in a step.")] = 0.05,
    context_us: Annotated[float, typer.Option(help="Each thousand tokens of context in a step.")] = 65.0,
    own_link: Annotated[float, typer.Option(help="GB/s from the own node's store.")] = 6.0,
    own_latency_ms: Annotated[float, typer.Option(help="Of such a fetch.")] = 3.0,
    other_link: Annotated[float, typer.Option(help="GB/s into a node from the other nodes' stores.")] = 0.9,
    other_latency_ms: Annotated[float, typer.Option(help="Of such a fetch.")] = 5.0,
    rate: Annotated[float, typer.Option(help="Requests arrive so many times as fast as in the trace.")] = 1.0,
    schedule: Annotated[
        str, typer.Option(help="A file, or such as '600 join 2; 900 die 3; 1200 drain 0': seconds first.")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here.")] = None,
) -> None:
    """Replay a trace through the real router, prefix caches and stores, on simulated engines."""
    from shoal.cluster.bench.trace.config import EngineSpeed, Link, TraceConfig  # noqa: PLC0415
    from shoal.cluster.bench.trace.report import as_json, show  # noqa: PLC0415
    from shoal.cluster.bench.trace.run import replay_all  # noqa: PLC0415
    from shoal.cluster.bench.trace.schedule import read_schedule  # noqa: PLC0415
    from shoal.cluster.bench.trace.traces import at_rate, read_trace  # noqa: PLC0415

    console = Console()
    with one_line_errors(OSError):
        _check_writable(json_file)
        _check_plot(plot)
        if rate <= 0:
            raise ValueError(f"--rate must be positive, got {rate:g}")
        events = read_schedule(schedule)
        config = TraceConfig(
            num_engines=engines,
            engines_per_node=engines_per_node,
            block_size=block_size,
            bytes_per_token=bytes_per_token,
            num_blocks=blocks or None,
            num_store_blocks=None if store_blocks < 0 else store_blocks,
            write_policy=kv_write_policy,
            speed=EngineSpeed(
                prefill_tokens_per_s=prefill_tokens_per_s,
                step_s=step_ms / 1e3,
                row_s=row_ms / 1e3,
                context_token_s=context_us / 1e9,
            ),
            own_link=Link(bytes_per_s=own_link * 1e9, latency_s=own_latency_ms / 1e3),
            other_link=Link(bytes_per_s=other_link * 1e9, latency_s=other_latency_ms / 1e3),
        )
        requests = at_rate(read_trace(file, block_size), rate)
        policies = get_args(RoutingPolicyName) if policy == "all" else (policy,)
        outcomes = replay_all(requests, config, events, policies, Console(stderr=True))
    show(outcomes, config, console)
    if json_file is not None:
        write(json_file, as_json(outcomes, config, file.name), console)
    if plot is not None:
        from shoal.cluster.bench.trace.plot import draw  # noqa: PLC0415  (matplotlib is an extra)

        draw(outcomes, f"{file.stem}: {len(requests):,} requests on {engines} engines", events, plot)
        console.print(f"drawn to {plot}", **PLAIN)


def _check_writable(path: Path | None) -> None:
    """Before, not after, minutes of measuring."""
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"cannot write {path}")


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    _check_writable(plot)
    if plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {plot} must end in one of {', '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'shoal[bench]'")
