"""What a command line, or a file and the flags beside it, come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.actors.engine.drafts import Speculative
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.messages import HttpConfig
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.autoscaler import AutoscalingConfig
from shoal.cluster.watch import START_TIMEOUT_S
from shoal.kvstore.layout import KVDtype

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Of one model and its engines. None is "choose for me"."""

    model: str | None = None
    revision: str | None = None
    served_model_name: str | None = None
    engines: int = 1
    autoscaling: AutoscalingConfig | None = None
    """None: `engines`, whatever the load is."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """What a Ray node must be labelled with to host its engines."""
    start_timeout_s: float = START_TIMEOUT_S
    """How long an engine may take to get the model and to load it."""
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
    state_snapshot_every: int = 16
    kv_write_policy: WritePolicy = "write_through"
    prefix_cache: PrefixCacheName = "radix"
    speculative: Speculative | None = None
    num_draft_tokens: int = 5
    require_kernels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Of a cluster. The defaults here are those of the flags and of the YAML."""

    models: tuple[ModelOptions, ...] = (ModelOptions(),)
    ingresses: int = 1
    ingress_labels: Mapping[str, str] = field(default_factory=dict)
    """Instead: one on each Ray node that is labelled so."""
    http: HttpConfig = field(default_factory=HttpConfig)
    kv_store_bytes: int | None = None
    """Of each node; 0 is none."""
    routing_policy: RoutingPolicyName = "cost"
    address: str | None = None
    name: str = "default"
    is_detached: bool = False
    stop_grace_s: float = 3.0
    """How long open streams may go on when the cluster is stopped."""
    drain_s: float = 120.0
    """How long an engine that goes may take to finish what it has."""
