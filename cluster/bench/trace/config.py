"""What is simulated: how fast engines and links are, how many there are, how much they hold."""

from dataclasses import dataclass, field

from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.router.policies import RoutingPolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How long a step takes. The defaults are one H200 with a dense 32B model in bfloat16 whose attention
    is grouped-query (64 layers, 8 KV heads of 128).

        drawing only:  step_s + rows · row_s + context · context_token_s
        with a prompt: chunk_tokens / prefill_tokens_per_s + rows · row_s + context · context_token_s

    64 GB of weights take some 16 ms to read at 4 TB/s, a token of context (256 KiB) 65 ns; 65 GFLOP a token
    and attention on top are some 8,000 tokens/s.
    """

    prefill_tokens_per_s: float = 8000.0
    step_s: float = 0.016
    row_s: float = 50e-6
    context_token_s: float = 65e-9
    chunk_tokens: int = 8192
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0 or self.step_s <= 0:
            raise ValueError("--prefill-tokens-per-s and --step-ms must be positive")

    @property
    def tokens_of_a_step(self) -> float:
        """A step takes as long as reading the weights, however few tokens of a prompt it computes."""
        return self.prefill_tokens_per_s * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What bytes travel by, one fetch after the other."""

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError("a link needs a positive speed, and a latency that is not negative")

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


REPORT_INTERVAL_S = 0.05
"""How often engines and stores report, as in `kvstore.reporter`, which would import Ray."""

OWN_LINK = Link(bytes_per_s=6.0e9, latency_s=0.003)
"""Ray's object store on the own node is mapped, not copied; verifying checksums is what takes time."""

OTHER_LINK = Link(bytes_per_s=0.9e9, latency_s=0.005)
"""Ray between two nodes: 1.4 MB in 5.3 ms, 14 MB in 19 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    policy: RoutingPolicyName = "cost"
    num_engines: int = 8
    engines_per_node: int = 8
    block_size: int = 512
    """Tokens that a hash id of the trace stands for."""
    bytes_per_token: int = 262_144
    num_blocks: int | None = 450
    """That an engine holds. None: as many as the trace has."""
    num_store_blocks: int | None = 4000
    """That a node's store holds; 0 is without stores. None: as many as the trace has."""
    write_policy: WritePolicy = "write_through"
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    own_link: Link = OWN_LINK
    other_link: Link = OTHER_LINK

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.engines_per_node < 1:
            raise ValueError("--engines and --engines-per-node must be at least 1")
        if self.block_size < 1 or self.bytes_per_token < 1:
            raise ValueError("--block-size and --bytes-per-token must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"--blocks must be at least 1, got {self.num_blocks}")
        if self.num_store_blocks is not None and self.num_store_blocks < 0:
            raise ValueError(f"--store-blocks must not be negative, got {self.num_store_blocks}")

    @property
    def has_stores(self) -> bool:
        return self.num_store_blocks != 0

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def break_even_bytes_per_s(self) -> float:
        """A link that is slower than this, latency aside, brings a token later than it can be computed."""
        return self.bytes_per_token * self.speed.prefill_tokens_per_s
