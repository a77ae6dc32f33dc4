"""What the dashboard shows: asked of Ray's endpoints, by the names of cluster/METRICS.md."""

from dataclasses import dataclass

CLUSTER = 'shoal_cluster="$cluster"'
MODEL = f'{CLUSTER}, model_name=~"$model"'
ENGINE = f'{MODEL}, process=~"$engine"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    unit: str
    """Grafana's name of it."""
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8
    min: float | None = 0.0


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def rate(name: str, where: str, by: str = "", *, window: str = WINDOW) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(ray_{name}{{{where}}}[{window}]))"


def quantiles(name: str, where: str) -> tuple[Query, ...]:
    """Median and tail; no line while there is nothing to count."""
    buckets = rate(f"{name}_bucket", where, "le")
    return tuple(
        Query(f"histogram_quantile({q}, {buckets})", legend)
        for q, legend in ((0.5, "median"), (0.9, "90%"), (0.99, "99%"))
    )


TRAFFIC = Row(
    "Traffic and latency",
    (
        Panel(
            "Requests",
            "Requests for answers a second, by how they ended. Refused ones were wrong (4xx); abandoned ones "
            "lost their client; failed and overloaded ones are ours.",
            "reqps",
            (Query(rate("shoal_requests_total", CLUSTER, "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Success",
            "Of the requests that were neither refused nor abandoned, the share that was completed.",
            "percentunit",
            (
                Query(
                    rate("shoal_requests_total", f'{CLUSTER}, outcome="completed"')
                    + " / "
                    + rate("shoal_requests_total", f'{CLUSTER}, outcome=~"completed|failed|overloaded"'),
                    "completed",
                ),
            ),
        ),
        Panel(
            "Errors",
            "Failures of the service a second, by code, also inside of streams that had begun.",
            "reqps",
            (Query(rate("shoal_request_errors_total", CLUSTER, "code"), "{{code}}"),),
        ),
        Panel(
            "Time to first token",
            "From the arrival of a request to the first token, tokenizing and queueing included.",
            "s",
            quantiles("shoal_time_to_first_token_seconds", MODEL),
        ),
        Panel(
            "Inter-token latency",
            "Between two chunks of a stream, divided by the tokens of the second.",
            "s",
            quantiles("shoal_inter_token_latency_seconds", MODEL),
        ),
        Panel(
            "End-to-end latency",
            "From the arrival of a request to the last token of an answer that was completed.",
            "s",
            quantiles("shoal_e2e_request_latency_seconds", MODEL),
        ),
        Panel(
            "Tokens",
            "Tokens of prompts (cached ones included) and of answers a second, as clients are told in usage.",
            "short",
            (
                Query(rate("shoal_prompt_tokens_total", MODEL), "prompts"),
                Query(rate("shoal_completion_tokens_total", MODEL), "answers"),
            ),
        ),
        Panel(
            "Lengths",
            "Tokens of prompts and of answers, of completed choices.",
            "short",
            (
                *(
                    Query(query.expr, f"prompt, {query.legend}")
                    for query in quantiles("shoal_request_prompt_tokens", MODEL)[:2]
                ),
                *(
                    Query(query.expr, f"answer, {query.legend}")
                    for query in quantiles("shoal_request_generation_tokens", MODEL)[:2]
                ),
            ),
        ),
        Panel(
            "Open requests",
            "HTTP requests that each ingress has open now.",
            "short",
            (Query(f"sum by (process) (ray_shoal_http_requests_in_flight{{{CLUSTER}}})", "{{process}}"),),
            stacked=True,
        ),
        Panel(
            "HTTP",
            "All requests a second by route and status, probes and scrapes included.",
            "reqps",
            (
                Query(
                    rate("shoal_http_requests_total", CLUSTER, "endpoint, status"), "{{endpoint}} {{status}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Why answers end",
            "Complete answers a second: by a stop token or string, or by length.",
            "reqps",
            (Query(rate("shoal_choices_finished_total", MODEL, "reason"), "{{reason}}"),),
            width=12,
        ),
    ),
)

CACHE = Row(
    "Cache",
    (
        Panel(
            "Prompt tokens by where they were found",
            "What of prompts was cached on the engine's device, came from its node's store or another's, and "
            "what had to be computed.",
            "short",
            (
                Query(rate("shoal_cached_prompt_tokens_total", MODEL, "place"), "{{place}}"),
                Query(
                    f"{rate('shoal_prompt_tokens_total', MODEL)} - "
                    f"{rate('shoal_cached_prompt_tokens_total', MODEL)}",
                    "computed",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Hit rate",
            "The share of prompt tokens that was not computed again, by where it was found.",
            "percentunit",
            (
                Query(
                    f"{rate('shoal_cached_prompt_tokens_total', MODEL, 'place')} / on () group_left "
                    f"{rate('shoal_prompt_tokens_total', MODEL)}",
                    "{{place}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Stores",
            "Host memory that each node's store uses of its budget.",
            "bytes",
            (
                Query(f"sum by (process) (ray_shoal_kv_store_used_bytes{{{CLUSTER}}})", "{{process}}"),
                Query(
                    f"sum by (process) (ray_shoal_kv_store_budget_bytes{{{CLUSTER}}})", "{{process}}: budget"
                ),
            ),
        ),
        Panel(
            "Saved and fetched",
            "Bytes a second from engines to stores, and back from their own node's store and from others.",
            "Bps",
            (
                Query(rate("shoal_kv_saved_bytes_total", ENGINE), "saved"),
                Query(rate("shoal_kv_fetched_bytes_total", ENGINE, "place"), "fetched, {{place}}"),
                Query(rate("shoal_kv_unsaved_bytes_total", ENGINE, "reason"), "copied in vain, {{reason}}"),
            ),
        ),
        Panel(
            "Fetches",
            "Fetches a second that brought something, and prefixes that were computed although a store was "
            "said to have them, by why.",
            "ops",
            (
                Query(rate("shoal_kv_fetches_total", ENGINE), "fetched"),
                Query(rate("shoal_kv_fallbacks_total", ENGINE, "reason"), "computed, {{reason}}"),
            ),
        ),
        Panel(
            "Time of a fetch",
            "Seconds that fetches spend a second: reading, verifying, copying. And reads that fail.",
            "short",
            (
                Query(rate("shoal_kv_fetch_seconds_total", ENGINE, "place"), "{{place}}"),
                Query(rate("shoal_kv_failed_reads_total", ENGINE, "reason"), "failed, {{reason}}"),
            ),
        ),
        Panel(
            "Offered to stores",
            "Extents a second that engines offer, by what becomes of them, and readings that find something.",
            "ops",
            (
                Query(rate("shoal_kv_store_extents_total", CLUSTER, "outcome"), "{{outcome}}"),
                Query(rate("shoal_kv_store_reads_total", CLUSTER), "read"),
            ),
        ),
        Panel(
            "Evicted from stores",
            "Bytes a second that make room. Always much: more is asked for again than the stores hold.",
            "Bps",
            (Query(rate("shoal_kv_store_evicted_bytes_total", CLUSTER, "process"), "{{process}}"),),
        ),
        Panel(
            "Evicted from devices",
            "Cached blocks a second that make room, and pieces that went before they could be saved.",
            "ops",
            (
                Query(rate("shoal_engine_evicted_blocks_total", ENGINE, "process"), "{{process}}"),
                Query(rate("shoal_kv_unsaved_pieces_total", ENGINE), "unsaved"),
            ),
        ),
    ),
)

ENGINES = Row(
    "Engines",
    (
        Panel(
            "Requests on engines",
            "Running, waiting for room, and fetching a prefix.",
            "short",
            (Query(f"sum by (state) (ray_shoal_engine_requests{{{ENGINE}}})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Load of each engine",
            "All requests of an engine: how evenly the router spreads them.",
            "short",
            (Query(f"sum by (process) (ray_shoal_engine_requests{{{ENGINE}}})", "{{process}}"),),
        ),
        Panel(
            "Queue time",
            "From a request's arrival at its engine to its admission.",
            "s",
            quantiles("shoal_engine_queue_seconds", ENGINE),
        ),
        Panel(
            "KV memory in use",
            "The share of an engine's blocks that sequences use. Near 100% requests wait or are preempted.",
            "percentunit",
            (
                Query(
                    f'sum by (process) (ray_shoal_engine_kv_blocks{{{ENGINE}, state="used"}}) / '
                    f"sum by (process) (ray_shoal_engine_kv_blocks{{{ENGINE}}})",
                    "{{process}}",
                ),
            ),
        ),
        Panel(
            "KV blocks",
            "Blocks in use, cached for later, and free.",
            "short",
            (Query(f"sum by (state) (ray_shoal_engine_kv_blocks{{{ENGINE}}})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "State segments",
            "Cached states of sliding windows; none for models without.",
            "short",
            (Query(f"sum by (state) (ray_shoal_engine_state_segments{{{ENGINE}}})", "{{state}}"),),
            stacked=True,
        ),
        Panel("Step time", "How long a step takes.", "s", quantiles("shoal_engine_step_seconds", ENGINE)),
        Panel(
            "At work",
            "The share of time in which an engine computes.",
            "percentunit",
            (Query(rate("shoal_engine_step_seconds_sum", ENGINE, "process"), "{{process}}"),),
        ),
        Panel(
            "Computed tokens",
            "Rows computed (prompts and answers) and tokens drawn, a second.",
            "short",
            (
                Query(rate("shoal_engine_computed_tokens_total", ENGINE, "process"), "{{process}}: computed"),
                Query(rate("shoal_engine_drawn_tokens_total", ENGINE, "process"), "{{process}}: drawn"),
            ),
        ),
        Panel(
            "Drafts",
            "Tokens guessed and verified, and those that were right, a second; none without --speculative.",
            "short",
            (
                Query(rate("shoal_engine_drafted_tokens_total", ENGINE, "process"), "{{process}}: drafted"),
                Query(rate("shoal_engine_accepted_tokens_total", ENGINE, "process"), "{{process}}: accepted"),
            ),
        ),
        Panel(
            "Preemptions and failed steps",
            "Sequences a second that gave way and are computed again; steps that raised.",
            "ops",
            (
                Query(rate("shoal_engine_preemptions_total", ENGINE, "process"), "{{process}}: preempted"),
                Query(
                    rate("shoal_engine_failed_steps_total", ENGINE, "process"), "{{process}}: failed steps"
                ),
            ),
            width=16,
        ),
    ),
)

ROUTER = Row(
    "Router and placement",
    (
        Panel(
            "Placements",
            "Attempts a second by what the choice of an engine went by. All but prefix and load are blind: a "
            "prefix may have been overlooked.",
            "reqps",
            (Query(rate("shoal_placements_total", MODEL, "by"), "{{by}}"),),
            stacked=True,
        ),
        Panel(
            "Continuations",
            "Answers a second that go on on another engine, and tokens that it has to compute again.",
            "short",
            (
                Query(rate("shoal_continuations_total", MODEL), "continuations"),
                Query(rate("shoal_recomputed_tokens_total", MODEL), "tokens computed again"),
            ),
        ),
        Panel(
            "Who may be placed on",
            "Engines and stores that the router knows; up to date is 1 if it knows all that they hold.",
            "short",
            (
                Query(f"sum by (kind) (ray_shoal_router_members{{{CLUSTER}}})", "{{kind}}"),
                Query(f"min(ray_shoal_router_up_to_date{{{CLUSTER}}})", "up to date"),
            ),
        ),
        Panel(
            "Index",
            "Blocks and segments that somebody holds, and the same once for each holder.",
            "short",
            (
                Query(f"sum(ray_shoal_router_index_keys{{{CLUSTER}}})", "keys"),
                Query(f"sum(ray_shoal_router_index_entries{{{CLUSTER}}})", "entries"),
            ),
        ),
        Panel(
            "Memory of the index",
            "About; it is bounded.",
            "bytes",
            (Query(f"sum(ray_shoal_router_index_bytes{{{CLUSTER}}})", "index"),),
        ),
        Panel(
            "Lost news",
            "Entries a second that the index had no room for, and snapshots that had to be asked for because "
            "a report was lost or somebody is new.",
            "ops",
            (
                Query(rate("shoal_router_index_dropped_total", CLUSTER), "dropped"),
                Query(rate("shoal_router_snapshots_total", CLUSTER), "snapshots"),
            ),
        ),
    ),
)

HEALTH = Row(
    "Health",
    (
        Panel(
            "Processes",
            "Of each role: ready, and wanted.",
            "short",
            (Query(f"max by (role, state) (ray_shoal_processes{{{CLUSTER}}})", "{{role}}: {{state}}"),),
        ),
        Panel(
            "Restarts",
            "Processes that were lost, hung or did not start, within the window of the graph's points.",
            "short",
            (
                Query(
                    f"sum by (role) (increase(ray_shoal_restarts_total{{{CLUSTER}}}[{WINDOW}]))", "{{role}}"
                ),
            ),
        ),
        Panel(
            "Silence",
            "Since each process last told its metrics, if it did within ten minutes. More than half a "
            "minute: it is gone, or hangs.",
            "s",
            (
                Query(
                    "time() - max by (process) "
                    f"(last_over_time(ray_shoal_heartbeat_timestamp_seconds{{{CLUSTER}}}[10m]))",
                    "{{process}}",
                ),
            ),
        ),
        Panel(
            "What runs",
            "Every process with its version and, of engines, what computes.",
            "short",
            (
                Query(
                    "max by (process, role, model_name, backend, version) "
                    f"(ray_shoal_build_info{{{CLUSTER}}})",
                    "{{process}}",
                ),
            ),
            kind="table",
            width=24,
            min=None,
        ),
    ),
)

ROWS = (TRAFFIC, CACHE, ENGINES, ROUTER, HEALTH)
