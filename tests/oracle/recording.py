"""A real engine whose every logit can be looked at: scheduler, pools, runner and kernels as they serve."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from shoal.actors.engine.build import DEVICE, LoadedModel
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.drafts import Drafts
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.memory_plan import num_state_slots
from shoal.actors.engine.models.decoder import Decoder
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.runner import ModelRunner, PackedStep, TokenRows
from shoal.actors.engine.scheduler import Scheduler, SchedulerConfig
from shoal.actors.engine.step import SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.messages import (
    DraftCounts,
    EngineRequest,
    IngressId,
    RequestId,
    SamplingParams,
    TokenLogprob,
)
from shoal.kernels.backend import Backend
from shoal.kvstore.layout import KVDtype
from tests.fake_store import Carrier, Stores, view
from tests.oracle.stepping import poison

MAX_LOGITS = 64
INGRESS = IngressId("test")

Look = Callable[[SequenceId, int, Tensor], None]
"""Called with (sequence, position, logits float32 [vocab]) for every row of a watched sequence."""


class LookingRunner:
    """Runs a plan on a ModelRunner, and shows the logits of every position, not only the drawn ones.

    But for those that are computed only for the sake of layers that are not stored, and for those of wrong
    drafts: they are not the model's.
    """

    def __init__(
        self, runner: ModelRunner, decoder: Decoder, look: Look, watched: Container[SequenceId]
    ) -> None:
        self._runner = runner
        self._decoder = decoder
        self._look = look
        self._watched = watched

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._run, plan, self._runner.pack(plan))

    @torch.inference_mode()
    def _run(self, plan: StepPlan, step: PackedStep) -> StepResult:
        hidden = self._runner.hidden_states(step)
        result = self._runner.draw(step, hidden)
        rows = [(s, position) for s in plan.sequences for position in range(s.start, s.end)]
        watched = [
            i
            for i, (s, p) in enumerate(rows)
            if s.sequence_id in self._watched and s.store_from <= p < _right_before(s, result)
        ]
        for first in range(0, len(watched), MAX_LOGITS):
            some = watched[first : first + MAX_LOGITS]
            for row, logits in zip(some, self._decoder.logits(hidden[some]), strict=True):
                of, position = rows[row]
                self._look(of.sequence_id, position, logits)
        return result


def _right_before(step: SequenceStep, result: StepResult) -> int:
    """From this position on its rows are of drafts that were wrong."""
    if step.draw is None:
        return step.end
    return step.end - len(step.drafts) + len(result.drawn[step.sequence_id]) - 1


@dataclass
class Recording:
    """What a run computed: the bits of every position's logits, and the tokens that came out."""

    digests: dict[SequenceId, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    """Of the prompt, then of the output, where they are asked for."""
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def look(self, sequence: SequenceId, position: int, logits: Tensor) -> None:
        bits = digest(logits)
        earlier = self.digests[sequence].setdefault(position, bits)
        assert earlier == bits, f"position {position} was computed twice, with other bits"


def digest(logits: Tensor) -> bytes:
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is served; every choice must lead to the same bits."""

    backend: Backend
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    num_blocks: int | None = None
    """None: as many as the requests can need together."""
    block_size: int = 128
    kv_cache_dtype: KVDtype = "float32"
    prefix_cache: PrefixCacheName = "naive"
    max_model_len: int = 2048
    num_dropped_layers: int = 0
    snapshot_every: int = 1
    drafts: Drafts | None = None
    num_draft_tokens: int = 0


class Served:
    """One engine that serves request after request; sequences are numbered as they come, from 1."""

    def __init__(
        self,
        loaded: LoadedModel,
        setup: Setup,
        *,
        watch: Sequence[int],
        look: Look | None = None,
        stores: Stores | None = None,
        executor: Executor | None = None,
    ) -> None:
        """stores: where what is cached goes, to its OWN, and where requests' sources are found."""
        config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            vocab_size=loaded.config.vocab_size,
        )
        assert setup.num_blocks is not None
        self.recording = Recording()
        layout = loaded.config.layout(
            block_size=setup.block_size,
            dtype=setup.kv_cache_dtype,
            max_model_len=setup.max_model_len,
            num_dropped_layers=setup.num_dropped_layers,
            num_draft_tokens=setup.num_draft_tokens,
        )
        num_slots = num_state_slots(setup.max_num_seqs) if layout.slots.num_bytes else 0
        memory = DeviceMemory(
            layout,
            num_blocks=setup.num_blocks,
            num_slots=num_slots,
            num_segments=setup.num_blocks,
            max_rows=setup.max_num_batched_tokens,
            device=DEVICE,
        )
        poison(memory)
        decoder = loaded.decoder(setup.backend, max_rows=setup.max_num_batched_tokens, max_logits=MAX_LOGITS)
        rows = TokenRows(
            num_rows=config.num_rows,
            max_model_len=setup.max_model_len,
            block_size=setup.block_size,
            device=DEVICE,
        )
        runner = ModelRunner(
            *(decoder, memory, rows, setup.backend, DEVICE),
            max_logits=MAX_LOGITS,
            vocab_size=loaded.config.vocab_size,
        )
        pools = Pools(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            num_rows=config.num_rows,
            num_slots=num_slots,
            num_segments=setup.num_blocks if layout.segments.num_bytes else 0,
            cache=setup.prefix_cache,
        )
        store_view = replace(
            view(),
            bytes_per_block=layout.blocks.num_bytes,
            bytes_per_segment=layout.segments.num_bytes,
        )
        self._scheduler = Scheduler(
            config,
            pools,
            rule=layout.rule,
            snapshot_every=setup.snapshot_every,
            stores=store_view if stores else None,
            drafts=setup.drafts,
        )
        self._carrier = Carrier(self._scheduler, memory, stores or Stores())
        self._num_submitted = 0
        self._watched = {SequenceId(number) for number in watch}
        self.engine = Engine(
            self._scheduler,
            LookingRunner(runner, decoder, look or self.recording.look, self._watched),
            executor,
        )

    def submit(self, request: EngineRequest, *, watch: bool = False) -> SequenceId:
        self._num_submitted += 1
        sequence = SequenceId(self._num_submitted)
        if watch:
            self._watched.add(sequence)
        assert not self.engine.submit([request], INGRESS)
        return sequence

    def serve(self, requests: Sequence[EngineRequest] = ()) -> Recording:
        """Run all requests to their end; the recording holds all since the engine was built."""
        for request in requests:
            self.submit(request)
        while self.engine.has_work:
            self.step()
        self._carrier.run()
        self.engine.check()
        return self.recording

    @property
    def num_forked(self) -> int:
        return self._scheduler.num_forked

    def preempt(self, sequence_id: SequenceId) -> None:
        """As if somebody before it had needed its blocks; its step may be in flight."""
        (sequence,) = (s for s in self._scheduler._running if s.sequence_id == sequence_id)
        self._scheduler._preempt(sequence)

    def step(self) -> None:
        self._carrier.run()
        for reply in self.engine.step():
            chunk = reply.chunk
            assert chunk.error is None, chunk.error
            self.recording.tokens[chunk.request_id] += chunk.token_ids
            self.recording.logprobs[chunk.request_id] += [*chunk.prompt_logprobs, *chunk.logprobs]
            if chunk.cached_tokens is not None:
                self.recording.num_cached_tokens[chunk.request_id] = chunk.cached_tokens.total
        self.recording.num_preemptions = self._scheduler.num_preemptions
        self.recording.drafts = self._scheduler.draft_counts()


def serve(
    loaded: LoadedModel,
    setup: Setup,
    requests: Sequence[EngineRequest],
    *,
    watch: Sequence[int] = (1,),
    look: Look | None = None,
) -> Recording:
    """Run the requests to their end. They are sequences 1, 2, ... in order; `watch` says which to look at."""
    num_blocks = setup.num_blocks or _blocks_needed(requests, setup.block_size)
    return Served(loaded, replace(setup, num_blocks=num_blocks), watch=watch, look=look).serve(requests)


def _blocks_needed(requests: Sequence[EngineRequest], block_size: int) -> int:
    """A pool is filled with NaN for every run, so one far too large costs more than the run."""
    lengths = [len(request.prompt_token_ids) + request.max_tokens for request in requests]
    return 1 + sum(-(-length // block_size) for length in lengths)  # block 0 is never issued


def greedy(name: str, prompt: Sequence[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=1,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        sampling=SamplingParams(temperature=0.0),
    )
