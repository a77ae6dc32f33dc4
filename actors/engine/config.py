"""What an engine is started with."""

from dataclasses import dataclass

from shoal.actors.engine.scheduler import SchedulerConfig
from shoal.kvstore.layout import KVDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    checkpoint: str
    """A directory on the engine's node."""
    max_model_len: int
    memory_bytes: int
    """Weights, state and KV blocks together."""
    threads: int
    block_size: int = 128
    kv_cache_dtype: KVDtype = "float32"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    require_kernels: bool = False
    """Refuse to start on the slow torch reference."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "memory_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, got {self.block_size}")
        self.scheduler(vocab_size=1)  # validates its own two

    def scheduler(self, *, vocab_size: int) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=vocab_size,
        )
