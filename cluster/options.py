"""What a command line, or a file and the flags beside it, come to."""

from dataclasses import dataclass, field

from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.messages import HttpConfig
from shoal.actors.router.policies import RoutingPolicyName
from shoal.kvstore.layout import KVDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """None is "choose for me". The defaults here are those of the flags and of the YAML."""

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
    stop_grace_s: float = 3.0
    """How long open streams may go on when the cluster is stopped."""
    address: str | None = None
    name: str = "default"
