"""What an engine is started with."""

from dataclasses import dataclass

from shoal.actors.engine.drafts import Speculative
from shoal.actors.engine.models.decoder_config import LeanModel
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.scheduler import SchedulerConfig
from shoal.actors.engine.transfers import WritePolicy
from shoal.kvstore.layout import KVDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    checkpoint: str
    """A directory on the engine's node, or what whoever made the engine lets it get one by."""
    max_model_len: int
    memory_bytes: int
    """Weights, state and KV blocks together."""
    threads: int
    block_size: int = 128
    kv_cache_dtype: KVDtype = "float32"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    num_dropped_layers: int = 0
    """So many sliding-window layers, the last ones, are not stored with a prefix but computed again."""
    state_snapshot_every: int = 16
    """Recurrent state is kept so many blocks apart, beside the ends of prompts and turns and where prompts
    part; 0: there alone. Other state is kept at every boundary."""
    kv_write_policy: WritePolicy = "write_through"
    """A cached prefix is saved at once; only if it was seen twice or ends a turn; or before it is evicted."""
    prefix_cache: PrefixCacheName = "radix"
    speculative: Speculative | None = None
    """Where drafts of next tokens come from; None is that there are none."""
    num_draft_tokens: int = 5
    """Then: the most that a step verifies of a sequence."""
    require_kernels: bool = False
    """Refuse to start on the slow torch reference."""
    lean: LeanModel | None = None
    """The checkpoint's, where somebody has read its config.json already; else the engine does."""

    def __post_init__(self) -> None:
        least_values = {"max_model_len": 2, "memory_bytes": 1, "threads": 1, "num_draft_tokens": 1}
        least_values |= {"num_dropped_layers": 0, "state_snapshot_every": 0}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, got {self.block_size}")
        self.scheduler(vocab_size=1)  # validates its own
        if self.num_drafts and self.num_drafts + self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"num_draft_tokens ({self.num_draft_tokens}) and max_num_seqs ({self.max_num_seqs}) must "
                f"together be at most max_num_batched_tokens ({self.max_num_batched_tokens}): a step has "
                "drafts beside a token of each sequence"
            )

    @property
    def num_drafts(self) -> int:
        """The most that a step has of a sequence."""
        return self.num_draft_tokens if self.speculative else 0

    @property
    def max_logits(self) -> int:
        """Rows that a step draws from: drafts, and one for each sequence, forks included."""
        return min(self.max_num_seqs * (1 + self.num_drafts), self.max_num_batched_tokens)

    def scheduler(self, *, vocab_size: int) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
        )
