"""From a configuration to an engine that can step: weights, a measured step, a memory plan, pools."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.drafts import PromptLookupDrafts
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.fingerprint import WeightsDigest, digest_content, fingerprint
from shoal.actors.engine.memory_plan import MemoryPlan, plan_memory
from shoal.actors.engine.model_layout import ModelLayout
from shoal.actors.engine.models.choose import lean_model, numerics
from shoal.actors.engine.models.decoder import MakeDecoder, ModelShape, Weights
from shoal.actors.engine.models.decoder_config import LeanModel, load_config
from shoal.actors.engine.models.lean_decoder import LeanDecoder
from shoal.actors.engine.models.lean_weights import DecoderWeights
from shoal.actors.engine.models.library_config import library_config
from shoal.actors.engine.models.library_decoder import LibraryDecoder, LibraryModel
from shoal.actors.engine.models.rope import rotary_tables
from shoal.actors.engine.models.weights import CheckpointTensors
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.prompt_lookup import PromptLookup
from shoal.actors.engine.rates import Rates
from shoal.actors.engine.runner import ModelRunner, TokenRows
from shoal.actors.engine.scheduler import Scheduler
from shoal.actors.engine.step import Draw, SequenceId, SequenceStep, StepPlan
from shoal.actors.engine.stopwatch import Stopwatch
from shoal.actors.engine.timed_runner import TimedRunner
from shoal.actors.engine.transfers import Place, StoreView
from shoal.actors.messages import SamplingParams
from shoal.kernels.backend import Backend
from shoal.kernels.choose import choose_backend
from shoal.kernels.library import KernelsUnavailable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory, before it is known how many KV blocks fit beside it."""

    config: ModelShape
    weights: Weights
    decoder: MakeDecoder
    numerics: str
    """See models.choose.numerics."""
    num_rehearsed_layers: int
    """Enough of the first layers to have one of each kind: they take turns, and need the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    engine: Engine
    runner: TimedRunner
    memory: MemoryPlan
    layout: ModelLayout
    device: DeviceMemory
    backend: Backend
    largest_step_s: float
    """What a step of max_num_batched_tokens takes here, by the layers of it that were rehearsed."""
    fingerprint: bytes
    """Names the root of all block keys."""
    content: bytes
    """Of the checkpoint."""
    scheduler: Scheduler
    rates: Rates
    """Of the stores. Fed by whoever fetches, asked by the scheduler."""
    took_s: tuple[tuple[str, float], ...]
    """(phase, seconds) of the build, in order."""

    def fetch_tokens_per_s(self, place: Place) -> float:
        """0 if a token of a prompt has no rows in blocks."""
        bytes_per_token = self.layout.bytes_per_token
        return self.rates.bytes_per_s(place) / bytes_per_token if bytes_per_token else 0.0


def load_model(
    checkpoint: Path, backend: Backend, *, max_model_len: int, lean: LeanModel | None = None
) -> LoadedModel:
    """On the lean path if that can compute it, else on the library path; else raises UnsupportedModel.

    lean: what `models.choose.lean_model` says of the checkpoint and this length, if that is known.
    """
    if lean is None:
        hf = load_config(checkpoint)
        lean = lean_model(hf, max_model_len)
        if lean is None:
            return _load_library(checkpoint, backend, hf, max_model_len=max_model_len)
    return _load_lean(checkpoint, backend, lean, max_model_len=max_model_len)


def _load_lean(checkpoint: Path, backend: Backend, lean: LeanModel, *, max_model_len: int) -> LoadedModel:
    with CheckpointTensors(checkpoint) as tensors:
        weights = DecoderWeights.load(tensors, lean.config, backend)
    rotaries = rotary_tables(lean.ropes, max_model_len, DEVICE)
    decoder = partial(LeanDecoder, lean.config, weights, rotaries)
    return LoadedModel(
        config=lean.config,
        weights=weights,
        decoder=decoder,
        numerics=lean.numerics,
        num_rehearsed_layers=_num_of_each_kind(lean.config.windows),
    )


def _num_of_each_kind(windows: Sequence[int | None]) -> int:
    """So many of the first layers have all windows that there are."""
    return 1 + max(windows.index(window) for window in set(windows))


def _load_library(
    checkpoint: Path, backend: Backend, hf: "PretrainedConfig", *, max_model_len: int
) -> LoadedModel:
    library = LibraryModel.load(checkpoint, library_config(hf), backend, max_model_len=max_model_len)
    return LoadedModel(
        config=library,
        weights=library,
        decoder=partial(LibraryDecoder, library),
        numerics=numerics(hf, max_model_len),
        num_rehearsed_layers=len(library.kept),
    )


def build_engine(config: EngineConfig, digest: "Future[WeightsDigest] | None" = None) -> BuiltEngine:
    """Load the checkpoint and divide the memory.

    digest: what `digest_weights` says, if somebody asks it meanwhile.

    Raises ValueError (UnsupportedModel, NotEnoughMemory) with a message for the operator.
    """
    stopwatch = Stopwatch(time.monotonic)
    torch.set_num_threads(config.threads)
    try:
        backend = choose_backend(config.threads, require_kernels=config.require_kernels)
    except KernelsUnavailable as error:
        raise ValueError(f"--require-kernels, but {error}") from error
    loaded = load_model(
        Path(config.checkpoint), backend, max_model_len=config.max_model_len, lean=config.lean
    )
    layout = loaded.config.layout(
        block_size=config.block_size,
        dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        num_dropped_layers=config.num_dropped_layers,
        num_draft_tokens=config.num_drafts,
    )
    layout.check_drafts(config.num_drafts)
    decoder = loaded.decoder(backend, max_rows=config.max_num_batched_tokens, max_logits=config.max_logits)
    device_memory = partial(DeviceMemory, layout, max_rows=config.max_num_batched_tokens, device=DEVICE)
    limits = config.scheduler(vocab_size=loaded.config.vocab_size)
    rows = TokenRows(
        num_rows=limits.num_rows,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        device=DEVICE,
    )

    def runner_of(memory: DeviceMemory, num_layers: int) -> ModelRunner:
        return ModelRunner(
            *(decoder, memory, rows, backend, DEVICE),
            num_layers=num_layers,
            max_logits=config.max_logits,
            vocab_size=loaded.config.vocab_size,
        )

    stopwatch.lap("weights")
    weights = None if digest is None else digest.result()  # it reads no more where memory is measured
    stopwatch.lap("fingerprint")
    num_layers, num_rehearsed = len(layout.layers), loaded.num_rehearsed_layers
    rehearse = partial(
        _rehearse,
        runner_of(device_memory(num_blocks=1), num_rehearsed),
        shortened=num_layers / num_rehearsed,
    )
    step_peak_bytes, largest_step_s = _peak_bytes(partial(rehearse, _largest_step(config)))
    step_peak_bytes += _peak_bytes(partial(rehearse, _longest_step(config)))[0]  # beyond what the first left
    stopwatch.lap("rehearsal")
    memory = plan_memory(
        total_bytes=config.memory_bytes,
        weights_bytes=loaded.weights.num_bytes,
        step_peak_bytes=step_peak_bytes + rows.num_bytes + _lookup_bytes(config),
        state_bytes_per_slot=layout.slots.num_bytes,
        block_bytes=layout.blocks.num_bytes,
        block_size=config.block_size,
        segment_bytes=layout.segments.num_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    logger.info("%s", memory.describe())
    device = device_memory(
        num_blocks=memory.num_blocks, num_slots=memory.num_slots, num_segments=memory.num_segments
    )
    runner = TimedRunner(runner_of(device, num_layers))
    pools = Pools(
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        num_rows=limits.num_rows,
        num_slots=memory.num_slots,
        num_segments=memory.num_segments,
        cache=config.prefix_cache,
    )
    content = digest_content(config, weights)
    root = fingerprint(
        config,
        numerics_id=f"{backend.numerics_id}, {loaded.numerics}{layout.identity}",
        content=content,
    )
    rates = Rates(lambda: runner.tokens_per_s, time.monotonic)
    stores = StoreView(
        bytes_per_block=layout.blocks.num_bytes,
        bytes_per_segment=layout.segments.num_bytes,
        worth=rates.worth,
        write_policy=config.kv_write_policy,
    )
    scheduler = Scheduler(
        limits,
        pools,
        fingerprint=root,
        rule=layout.rule,
        snapshot_every=config.state_snapshot_every if layout.whole_states else 1,
        stores=stores,
        drafts=PromptLookupDrafts(config.num_drafts) if config.speculative else None,
    )
    stopwatch.lap("pools")
    return BuiltEngine(
        engine=Engine(scheduler, runner),
        runner=runner,
        memory=memory,
        layout=layout,
        device=device,
        backend=backend,
        largest_step_s=largest_step_s,
        fingerprint=root,
        content=content,
        scheduler=scheduler,
        rates=rates,
        took_s=stopwatch.laps,
    )


def _lookup_bytes(config: EngineConfig) -> int:
    """Of what is known of the tokens of all that run, to draft what comes next."""
    return config.max_num_seqs * PromptLookup.num_bytes(config.max_model_len) if config.speculative else 0


def _largest_step(config: EngineConfig) -> StepPlan:
    """As many sequences and tokens as a step may have. One token less than a sequence may have, since it
    draws one."""
    each, rest = divmod(config.max_num_batched_tokens, config.max_num_seqs)
    longest = config.max_model_len - 1
    return _rehearsal(config, [(0, min(longest, each + (i < rest))) for i in range(config.max_num_seqs)])


def _longest_step(config: EngineConfig) -> StepPlan:
    """As many sequences as a step may have, each at its last rows: attention's own memory grows with that."""
    end = config.max_model_len - 1
    each, rest = divmod(config.max_logits, config.max_num_seqs)
    return _rehearsal(config, [(end - min(end, each + (i < rest)), end) for i in range(config.max_num_seqs)])


def _rehearsal(config: EngineConfig, rows: Iterable[tuple[int, int]]) -> StepPlan:
    """Rows start, ..., end - 1 of each sequence, all on block 0 and slot 0, where nothing of value lies. As
    many of them as can be are drafts."""
    return StepPlan(
        step_id=0,
        sequences=tuple(
            SequenceStep(
                sequence_id=SequenceId(i),
                row=BlockId(i + 1),
                start=start,
                end=end,
                block_table=(NO_BLOCK,) * -(-end // config.block_size),
                draw=Draw(sampling=SamplingParams(), num_prompt_tokens=end),
                drafts=(0,) * min(config.num_drafts, end - start - 1),
            )
            for i, (start, end) in enumerate(rows)
        ),
    )


@torch.inference_mode()
def _rehearse(runner: ModelRunner, plan: StepPlan, *, shortened: float) -> float:
    """Seconds that a step takes of whose layers only each `shortened`th is computed."""
    began = time.monotonic()
    step = runner.pack(plan)
    hidden_TN = runner.hidden_states(step)
    computed = time.monotonic()
    runner.draw(step, hidden_TN)
    return (computed - began) * shortened + time.monotonic() - computed


def _peak_bytes(run: Callable[[], T]) -> tuple[int, T]:
    """Resident memory that `run` needs at its peak beyond what was resident before (Linux, see proc(5)), and
    what it returns."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present VmRSS
    before = _status_bytes("VmRSS")
    result = run()
    return max(0, _status_bytes("VmHWM") - before), result


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
