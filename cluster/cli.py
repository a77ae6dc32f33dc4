"""The `shoal` command. It parses and reports; the work is elsewhere, imported when a command needs it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.actors.engine.drafts import Speculative
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.admin_cli import app as admin_app
from shoal.cluster.batch.cli import batch
from shoal.cluster.bench.cli import app as bench_app
from shoal.cluster.config.cli import app as config_app
from shoal.cluster.config.flags import FIELD_OF
from shoal.cluster.config.quantities import format_duration
from shoal.cluster.console import one_line_errors
from shoal.cluster.keys import app as keys_app
from shoal.cluster.options import ModelOptions, ServeOptions
from shoal.kvstore.layout import KVDtype, RowDtype

app = typer.Typer(
    help="Shoal: a Ray-distributed LLM serving cluster.", no_args_is_help=True, add_completion=False
)


app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(admin_app)
app.add_typer(keys_app, name="keys")
app.command()(batch)

DEFAULT, MODEL = ServeOptions(), ModelOptions()


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a .gguf file, a hub id (org/name), s3:// or gs://. "
            "Default: SmolLM2-135M-Instruct."
        ),
    ] = MODEL.model,
    *,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file that says all this; flags override it.")
    ] = None,
    engines: Annotated[
        int, typer.Option("--engines", "--data-parallel-size", help="Engine actors to run.")
    ] = MODEL.engines,
    ingresses: Annotated[
        int, typer.Option(help="Front doors to run, on this port and those that follow it.")
    ] = DEFAULT.ingresses,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT.http.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = DEFAULT.http.port,
    api_key: Annotated[
        str | None, typer.Option(envvar="SHOAL_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(help="A file of several, with tenants and limits, as `shoal keys new` writes it."),
    ] = DEFAULT.http.api_keys,
    admin_key: Annotated[
        str | None, typer.Option(envvar="SHOAL_ADMIN_KEY", help="Operators must send it as a bearer token.")
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="Speak HTTPS with this certificate and its chain, as PEM.")
    ] = DEFAULT.http.ssl_certfile,
    ssl_keyfile: Annotated[
        str | None, typer.Option(help="Its private key, if that is not in the same file.")
    ] = DEFAULT.http.ssl_keyfile,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for.")
    ] = MODEL.served_model_name,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = MODEL.revision,
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output together, in tokens.")
    ] = MODEL.max_model_len,
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences that an engine runs at once.")
    ] = MODEL.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that one engine step computes.")
    ] = MODEL.max_num_batched_tokens,
    max_queued_requests: Annotated[
        int, typer.Option(help="Requests that wait on an engine beside those that it runs.")
    ] = MODEL.max_queued_requests,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Tokens of all that wait on an engine together; one that waits alone may.")
    ] = MODEL.max_queued_tokens,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = MODEL.block_size,
    prefix_cache: Annotated[
        PrefixCacheName, typer.Option(help="How computed prefixes are kept for later requests.")
    ] = MODEL.prefix_cache,
    kv_cache_dtype: Annotated[
        KVDtype, typer.Option(help="Type of stored keys and values.")
    ] = MODEL.kv_cache_dtype,
    memory: Annotated[str | None, typer.Option(help="Memory of one engine, such as 4GiB.")] = None,
    num_dropped_layers: Annotated[
        int, typer.Option(help="The last sliding-window layers that are not stored but recomputed.")
    ] = MODEL.num_dropped_layers,
    state_snapshot_every: Annotated[
        int, typer.Option(help="Blocks between kept recurrent states; 0 keeps those at ends and partings.")
    ] = MODEL.state_snapshot_every,
    kv_store_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each node for prefixes; 0 is none. Default: 30% of Ray's objects'."
        ),
    ] = None,
    kv_write_policy: Annotated[
        WritePolicy, typer.Option(help="What engines save in their node's store, and when.")
    ] = MODEL.kv_write_policy,
    speculative: Annotated[
        Speculative | None,
        typer.Option(help="Guess next tokens from what a sequence said before, and verify several at once."),
    ] = MODEL.speculative,
    num_draft_tokens: Annotated[
        int, typer.Option(help="Then: the most that a step verifies of a sequence.")
    ] = MODEL.num_draft_tokens,
    routing_policy: Annotated[
        RoutingPolicyName, typer.Option(help="How the router chooses an engine for a request.")
    ] = DEFAULT.routing_policy,
    threads: Annotated[int | None, typer.Option(help="Threads of one engine.")] = MODEL.threads,
    require_kernels: Annotated[
        bool, typer.Option("--require-kernels", help="Refuse to start on the slow torch reference.")
    ] = MODEL.require_kernels,
    min_engines: Annotated[
        int | None, typer.Option(help="Start and end engines as the load asks, from so many. Default: 1.")
    ] = None,
    max_engines: Annotated[int | None, typer.Option(help="The same, to so many.")] = None,
    target_ongoing_requests: Annotated[
        float | None, typer.Option(help="Then: requests that an engine has on average. Default: 16.")
    ] = None,
    target_ttft: Annotated[
        float | None,
        typer.Option(help="Seconds that the prompts which stand on an engine may take it. Default: 2."),
    ] = None,
    upscale_delay: Annotated[
        float | None,
        typer.Option(help="Seconds for which more must be needed before there are more. Default: 10."),
    ] = None,
    downscale_delay: Annotated[
        float | None,
        typer.Option(help="Seconds for which fewer must suffice before there are fewer. Default: 300."),
    ] = None,
    detached: Annotated[
        bool,
        typer.Option(
            "--detached",
            help="Return when it is ready and leave it running; one that runs already becomes this.",
        ),
    ] = DEFAULT.is_detached,
    drain_timeout: Annotated[
        str, typer.Option(help="How long an engine that goes may take to finish what it has.")
    ] = format_duration(DEFAULT.drain_s),
    start_timeout: Annotated[
        str, typer.Option(help="How long an engine may take to get its model and to load it.")
    ] = format_duration(MODEL.start_timeout_s),
    stop_grace: Annotated[
        str, typer.Option(help="How long open streams may go on when the cluster is stopped.")
    ] = format_duration(DEFAULT.stop_grace_s),
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join. Default: RAY_ADDRESS, else a private local Ray."),
    ] = DEFAULT.address,
    name: Annotated[str, typer.Option(help="Name of this cluster within Ray.")] = DEFAULT.name,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until interrupted."""
    from shoal.cluster.config import load_config  # noqa: PLC0415
    from shoal.cluster.lifecycle import ServeError  # noqa: PLC0415
    from shoal.cluster.serve import serve as run  # noqa: PLC0415
    from shoal.cluster.sources import ModelSourceError  # noqa: PLC0415

    with one_line_errors(ServeError, ModelSourceError):
        run(load_config(config, _said(context)).options(), Console())


def _said(context: typer.Context) -> dict[str, Any]:
    """What flags and the environment say, by the field of the YAML that each one is."""
    sources = {name: context.get_parameter_source(name) for name in FIELD_OF}
    return {
        FIELD_OF[name]: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
    }


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
    num_draft_tokens: Annotated[
        int,
        typer.Option(min=0, help="Drafts that a step may verify of a sequence: rings are longer for them."),
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
                num_draft_tokens=num_draft_tokens,
            ),
        )
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    else:
        show(made, console)


def main() -> None:
    app()
