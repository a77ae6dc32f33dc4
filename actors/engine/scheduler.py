"""Which tokens the next step computes: continuous batching under a token budget.

Plain Python over integers. It never sees a tensor, so every decision can be replayed in a test.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.actors.engine.block_pool import Admission
from shoal.actors.engine.pools import Pools, blocks_needed
from shoal.actors.engine.sequence import Sequence
from shoal.actors.engine.step import SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.messages import (
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    RequestError,
    RequestId,
    TokenChunk,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens one step computes, decode and prefill together."""
    vocab_size: int
    """Token ids below it can be computed. One that cannot would fail the whole step, its neighbours too."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or a full decode step would not fit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    to: IngressId
    chunk: TokenChunk


class Scheduler:
    """Waiting and running sequences, and the pools they draw from.

    Order of a step: decodes, oldest first; then chunks of prompts already begun; then new arrivals in order.
    Decode comes first so that a long prompt delays nobody's next token by more than one step's budget.

    A prompt claims the blocks of its whole length at its first chunk, so only decoding can run out of blocks.
    Then the youngest running sequence is preempted: it gives everything back and waits, in its place by
    arrival, to be computed again. The oldest is never the victim while another runs, so somebody always ends.
    """

    def __init__(self, config: SchedulerConfig, pools: Pools) -> None:
        self._config = config
        self._pools = pools
        self._waiting: deque[Sequence] = deque()  # by arrival, as is _running
        self._running: list[Sequence] = []
        self._next_sequence = 1
        self._next_step = 1
        self.num_preemptions = 0

    @property
    def num_sequences(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: EngineRequest, reply_to: IngressId) -> list[Reply]:
        """Queue a request, or answer at once that it can never run."""
        error = self._refusal(request)
        if error is not None:
            return [Reply(to=reply_to, chunk=_error_chunk(request, error))]
        self._waiting.append(
            Sequence(sequence_id=SequenceId(self._next_sequence), request=request, reply_to=reply_to)
        )
        self._next_sequence += 1
        return []

    def _refusal(self, request: EngineRequest) -> RequestError | None:
        prompt, vocab_size = request.prompt_token_ids, self._config.vocab_size
        if not prompt or request.max_tokens < 1:
            message = "a request needs at least one prompt token and max_tokens of at least 1"
            return RequestError(kind=ErrorKind.INVALID, message=message)
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            message = f"prompt token ids must be from 0 to {vocab_size - 1}"
            return RequestError(kind=ErrorKind.INVALID, message=message)
        positions = len(prompt) + request.max_tokens - 1  # the last drawn token is never computed
        if self._pools.admission(positions) is not Admission.NEVER:
            return None
        needed = blocks_needed(history=positions, block_size=self._pools.block_size)
        message = (
            f"{len(prompt)} prompt tokens and {request.max_tokens} output tokens need {needed} KV blocks of "
            f"{self._pools.block_size} tokens; this engine has {self._pools.blocks.num_usable} in all"
        )
        return RequestError(kind=ErrorKind.NEVER_FITS, message=message)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Forget a request and free what it owns. One that already ended is none of our business."""
        for sequence in self._sequences():
            if sequence.request.request_id == request_id and sequence.request.attempt == attempt:
                self._remove(sequence)

    def abort_all(self, reply_to: IngressId) -> None:
        """An ingress is gone: nobody is left to hear its requests' tokens."""
        for sequence in self._sequences():
            if sequence.reply_to == reply_to:
                self._remove(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run."""
        budget = self._config.max_num_batched_tokens
        steps: list[SequenceStep] = []
        preempted_before = self.num_preemptions
        for sequence in self._decodes():
            steps.append(self._take(sequence, 1))
            budget -= 1
        for sequence in self._running:
            if budget > 0 and sequence.num_uncomputed > 1:
                steps.append(self._take(sequence, budget))
                budget -= len(steps[-1].token_ids)
        if self.num_preemptions == preempted_before:  # else what was just freed would be taken back at once
            while budget > 0 and (arrival := self._admit()):
                steps.append(self._take(arrival, budget))
                budget -= len(steps[-1].token_ids)
        if not steps:
            return None
        plan = StepPlan(step_id=self._next_step, sequences=tuple(steps))
        self._next_step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Reply]:
        """Advance every sequence of the plan that still runs by what was computed and drawn."""
        running = {sequence.sequence_id: sequence for sequence in self._running}
        replies: list[Reply] = []
        for step in plan.sequences:
            sequence = running.get(step.sequence_id)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.num_computed = step.end
            if step.draw is None:
                continue
            token = result.tokens[step.sequence_id]
            reason = sequence.append(token)
            if reason is not None:
                self._remove(sequence)
            chunk = TokenChunk(
                request_id=sequence.request.request_id,
                attempt=sequence.request.attempt,
                token_ids=(token,),
                finish_reason=reason,
            )
            replies.append(Reply(to=sequence.reply_to, chunk=chunk))
        return replies

    def fail(self, plan: StepPlan, message: str) -> list[Reply]:
        """The step could not be computed: its requests end with an error, the others go on."""
        error = RequestError(kind=ErrorKind.INTERNAL, message=message)
        failed = {step.sequence_id for step in plan.sequences}
        replies: list[Reply] = []
        for sequence in [s for s in self._running if s.sequence_id in failed]:
            self._remove(sequence)
            replies.append(Reply(to=sequence.reply_to, chunk=_error_chunk(sequence.request, error)))
        return replies

    def check(self) -> None:
        """Every invariant of the sequences and their pools (DESIGN, "What a sequence owns")."""
        self._pools.check(sequence.holding for sequence in self._running)
        assert len(self._running) <= self._config.max_num_seqs
        for queue in (list(self._waiting), self._running):
            ids = [sequence.sequence_id for sequence in queue]
            assert ids == sorted(ids), f"not in order of arrival: {ids}"
        for sequence in self._waiting:
            assert not sequence.holding.block_table and sequence.num_computed == 0
        for sequence in self._running:
            covered = len(sequence.holding.block_table) * self._pools.block_size
            assert sequence.num_computed <= min(covered, len(sequence.tokens))

    def _sequences(self) -> list[Sequence]:
        return [*self._waiting, *self._running]

    def _decodes(self) -> Iterator[Sequence]:
        """Sequences with one token to compute, each with room for it; makes room by preemption."""
        for sequence in [s for s in self._running if s.num_uncomputed == 1]:
            if sequence in self._running and self._make_room(sequence):
                yield sequence

    def _make_room(self, sequence: Sequence) -> bool:
        """Fit the table to the history; False if `sequence` itself had to give way."""
        needed = blocks_needed(history=len(sequence.tokens), block_size=self._pools.block_size)
        while not self._pools.resize(sequence.holding, needed):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pools.release(sequence.holding)
        sequence.num_computed = 0
        self.num_preemptions += 1
        position = sum(1 for other in self._waiting if other.sequence_id < sequence.sequence_id)
        self._waiting.insert(position, sequence)

    def _admit(self) -> Sequence | None:
        """Start the oldest arrival if it fits. One that must wait holds back those behind it.

        A block for each running sequence stays free, so that an arrival is not preempted at once.
        """
        if not self._waiting or len(self._running) >= self._config.max_num_seqs:
            return None
        sequence = self._waiting[0]
        answer = self._pools.admission(len(sequence.tokens), headroom=len(self._running))
        if answer is not Admission.OK:
            return None
        self._waiting.popleft()
        sequence.holding = self._pools.claim(len(sequence.tokens))
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.sequence_id)  # one preempted earlier takes its place again
        return sequence

    def _take(self, sequence: Sequence, budget: int) -> SequenceStep:
        start = sequence.num_computed
        end = min(start + budget, len(sequence.tokens))
        return SequenceStep(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=tuple(sequence.tokens[start:end]),
            block_table=tuple(sequence.holding.block_table),
            slot=sequence.holding.slot,
            draw=sequence.request.sampling if end == len(sequence.tokens) else None,
        )

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._pools.release(sequence.holding)


def _error_chunk(request: EngineRequest, error: RequestError) -> TokenChunk:
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error=error,
    )
