"""The `shoal` command. It parses and reports; the work is elsewhere, imported when a command needs it."""

import json
from typing import Annotated, Literal

import typer
from rich.console import Console

from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.admin_cli import app as admin_app
from shoal.cluster.bench.cli import app as bench_app
from shoal.cluster.console import one_line_errors
from shoal.kvstore.layout import KVDtype, RowDtype

app = typer.Typer(
    help="Shoal: a Ray-distributed LLM serving cluster.", no_args_is_help=True, add_completion=False
)


app.add_typer(bench_app, name="bench")
app.add_typer(admin_app)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a .gguf file, a hub id (org/name), s3:// or gs://. "
            "Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    *,
    engines: Annotated[
        int, typer.Option("--engines", "--data-parallel-size", min=1, help="Engine actors to run.")
    ] = 1,
    ingresses: Annotated[
        int, typer.Option(min=1, help="Front doors to run, on this port and those that follow it.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="SHOAL_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients ask for.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together, in tokens.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that an engine runs at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens that one engine step computes.")] = 512,
    max_queued_requests: Annotated[
        int, typer.Option(help="Requests that wait on an engine beside those that it runs.")
    ] = 1024,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Tokens of all that wait on an engine together; one that waits alone may.")
    ] = 1 << 20,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 128,
    prefix_cache: Annotated[
        Literal["naive", "radix"], typer.Option(help="How computed prefixes are kept for later requests.")
    ] = "radix",
    kv_cache_dtype: Annotated[KVDtype, typer.Option(help="Type of stored keys and values.")] = "float32",
    memory: Annotated[str | None, typer.Option(help="Memory of one engine, such as 4GiB.")] = None,
    num_dropped_layers: Annotated[
        int, typer.Option(min=0, help="The last sliding-window layers that are not stored but recomputed.")
    ] = 0,
    kv_store_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each node for prefixes; 0 is none. Default: 30% of Ray's objects'."
        ),
    ] = None,
    kv_write_policy: Annotated[
        WritePolicy, typer.Option(help="What engines save in their node's store, and when.")
    ] = "write_through",
    routing_policy: Annotated[
        RoutingPolicyName, typer.Option(help="How the router chooses an engine for a request.")
    ] = "cost",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of one engine.")] = None,
    require_kernels: Annotated[
        bool, typer.Option("--require-kernels", help="Refuse to start on the slow torch reference.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join. Default: RAY_ADDRESS, else a private local Ray."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this cluster within Ray.")] = "default",
    max_engines: Annotated[
        int | None,
        typer.Option(min=1, help="Start and end engines as the load asks, from --engines to so many."),
    ] = None,
    target_ongoing_requests: Annotated[
        float, typer.Option(min=0, help="Then: requests that an engine has on average.")
    ] = 16.0,
    target_ttft: Annotated[
        float, typer.Option(min=0, help="Seconds that the prompts which stand on an engine may take it.")
    ] = 2.0,
    upscale_delay: Annotated[
        float, typer.Option(min=0, help="Seconds for which more must be needed before there are more.")
    ] = 10.0,
    downscale_delay: Annotated[
        float, typer.Option(min=0, help="Seconds for which fewer must suffice before there are fewer.")
    ] = 300.0,
    detached: Annotated[
        bool,
        typer.Option(
            "--detached",
            help="Return when it is ready and leave it running; one that runs already becomes this.",
        ),
    ] = False,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that an engine may take to get its model and to load it.")
    ] = 900.0,
    stop_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that open streams may go on when the cluster is stopped.")
    ] = 3.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that an engine which goes may take to finish what it has."),
    ] = 120.0,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until interrupted."""
    from shoal.actors.messages import HttpConfig  # noqa: PLC0415
    from shoal.cluster.autoscaler import AutoscalingConfig  # noqa: PLC0415
    from shoal.cluster.lifecycle import ServeError  # noqa: PLC0415
    from shoal.cluster.serve import ServeOptions, serve  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError  # noqa: PLC0415
    from shoal.kvstore.sizes import parse_size  # noqa: PLC0415

    with one_line_errors(ServeError, ModelSourceError):
        serve(
            ServeOptions(
                model=model,
                revision=revision,
                served_model_name=served_model_name,
                engines=engines,
                ingresses=ingresses,
                threads=threads,
                memory_bytes=None if memory is None else parse_size(memory),
                num_dropped_layers=num_dropped_layers,
                kv_store_bytes=None if kv_store_memory is None else parse_size(kv_store_memory, or_none=True),
                kv_write_policy=kv_write_policy,
                max_model_len=max_model_len,
                max_queued_requests=max_queued_requests,
                max_queued_tokens=max_queued_tokens,
                block_size=block_size,
                prefix_cache=prefix_cache,
                kv_cache_dtype=kv_cache_dtype,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                routing_policy=routing_policy,
                require_kernels=require_kernels,
                http=HttpConfig(host=host, port=port, api_key=api_key),
                address=address,
                name=name,
                autoscaling=None
                if max_engines is None
                else AutoscalingConfig(
                    min_replicas=engines,
                    max_replicas=max_engines,
                    target_ongoing_requests=target_ongoing_requests,
                    target_ttft_s=target_ttft,
                    upscale_delay_s=upscale_delay,
                    downscale_delay_s=downscale_delay,
                ),
                is_detached=detached,
                stop_grace_s=stop_grace,
                drain_s=drain_timeout,
                start_timeout_s=start_timeout,
            ),
            Console(),
        )


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a directory that has one, or a hub id (org/name).")
    ],
    *,
    memory: Annotated[
        str | None, typer.Option(help="What an engine has beside weights and a step, such as 80GiB.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output together, in tokens.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that an engine runs at once.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 128,
    kv_cache_dtype: Annotated[
        RowDtype | None, typer.Option(help="Type of stored keys and values. Default: as it would be served.")
    ] = None,
    num_dropped_layers: Annotated[
        int, typer.Option(min=0, help="The last sliding-window layers that are not stored but recomputed.")
    ] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what a model's sequences take in memory and how many fit. Reads its config.json, no weights."""
    from shoal.cluster.planner import PlanOptions, make_plan, show  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError, resolve_config  # noqa: PLC0415
    from shoal.kvstore.sizes import parse_size  # noqa: PLC0415

    console = Console()
    with one_line_errors(ModelSourceError):
        made = make_plan(
            resolve_config(model, revision=revision),
            PlanOptions(
                memory_bytes=None if memory is None else parse_size(memory),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                num_dropped_layers=num_dropped_layers,
            ),
        )
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    else:
        show(made, console)


def main() -> None:
    app()
