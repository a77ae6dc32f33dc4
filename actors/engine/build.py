"""From a configuration to an engine that can step: weights, a measured step, a memory plan, pools."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.memory_plan import MemoryPlan, plan_memory
from shoal.actors.engine.models.decoder_config import decoder_config, load_config
from shoal.actors.engine.models.lean_decoder import DecoderWeights, LeanDecoder
from shoal.actors.engine.models.rope import rotary_tables
from shoal.actors.engine.models.weights import CheckpointTensors
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.runner import ModelRunner, PagedPool
from shoal.actors.engine.scheduler import Scheduler
from shoal.actors.engine.step import SequenceId, SequenceStep, StepPlan
from shoal.actors.messages import SamplingParams
from shoal.kernels.backend import Backend
from shoal.kernels.choose import choose_backend
from shoal.kvstore.layout import BlockLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    engine: Engine
    memory: MemoryPlan
    backend: Backend


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Load the checkpoint and divide the memory.

    Raises UnsupportedModel or NotEnoughMemory (both ValueError) with a message for the operator.
    """
    device = torch.device("cpu")
    torch.set_num_threads(config.threads)
    backend = choose_backend(config.threads, require_kernels=config.require_kernels)
    hf = load_config(Path(config.checkpoint))
    decoder = decoder_config(hf)
    with CheckpointTensors(Path(config.checkpoint)) as tensors:
        weights = DecoderWeights.load(tensors, decoder, backend)
    model = LeanDecoder(
        decoder,
        weights,
        rotary_tables(hf, config.max_model_len, decoder.head_dim, device),
        backend,
        max_rows=config.max_num_batched_tokens,
        max_logits=config.max_num_seqs,
    )
    layout = BlockLayout(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        block_size=config.block_size,
        dtype=config.kv_cache_dtype,
    )
    rehearsal = ModelRunner(model, PagedPool(layout, 1, device), backend, device)
    memory = plan_memory(
        total_bytes=config.memory_bytes,
        weights_bytes=weights.num_bytes,
        step_peak_bytes=_peak_bytes(lambda: rehearsal.run(_largest_step(config))),
        state_bytes_per_slot=0,
        block_bytes=layout.bytes_per_block,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    logger.info("%s", memory.describe())
    runner = ModelRunner(model, PagedPool(layout, memory.num_blocks, device), backend, device)
    pools = Pools(num_blocks=memory.num_blocks, block_size=config.block_size)
    engine = Engine(Scheduler(config.scheduler, pools), runner)
    return BuiltEngine(engine=engine, memory=memory, backend=backend)


def _largest_step(config: EngineConfig) -> StepPlan:
    """As many sequences and tokens as a step may have, all on block 0, where nothing of value lies."""
    lengths = [
        min(
            config.max_model_len,
            config.max_num_batched_tokens // config.max_num_seqs
            + (i < config.max_num_batched_tokens % config.max_num_seqs),
        )
        for i in range(config.max_num_seqs)
    ]
    return StepPlan(
        step_id=0,
        sequences=tuple(
            SequenceStep(
                sequence_id=SequenceId(i),
                start=0,
                token_ids=(0,) * length,
                block_table=(NO_BLOCK,) * -(-length // config.block_size),
                draw=SamplingParams(),
            )
            for i, length in enumerate(lengths)
        ),
    )


def _peak_bytes(run: Callable[[], object]) -> int:
    """Resident memory that `run` needs at its peak beyond what was resident before (Linux, see proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present VmRSS
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
