"""Which tokens the next step computes: continuous batching under a token budget.

Plain Python over integers. It never sees a tensor, so every decision can be replayed in a test.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import Any

from shoal.actors.engine.block_pool import Admission, BlockId
from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.drafts import Drafts
from shoal.actors.engine.fetches import Fetches
from shoal.actors.engine.forks import Forks
from shoal.actors.engine.load import Load
from shoal.actors.engine.pools import Holding, Pools, blocks_needed
from shoal.actors.engine.prefix_cache import PrefixCache
from shoal.actors.engine.refusals import Refusals
from shoal.actors.engine.saves import Saves
from shoal.actors.engine.sequence import Rank, Sequence
from shoal.actors.engine.sharing import Hit, Sharing
from shoal.actors.engine.step import Drawn, Fork, SequenceId, SequenceStep, StepPlan, StepResult
from shoal.actors.engine.transfers import Fallback, Fetch, FetchId, Piece, StoreView, TransferCounts
from shoal.actors.messages import (
    DraftCounts,
    EngineRequest,
    ErrorKind,
    FinishReason,
    IngressId,
    RequestError,
    RequestId,
    StoreId,
    TokenChunk,
)
from shoal.kvstore.block_hash import BlockKey, root_key
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.histogram import Histogram

QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens one step computes, decode and prefill together."""
    max_model_len: int
    """Prompt and output of one sequence together."""
    vocab_size: int
    """Token ids below it can be computed. One that cannot would fail the whole step, its neighbours too."""
    max_queued_requests: int = 1024
    """Requests that wait beside max_num_seqs that run. One more is told at once to come again."""
    max_queued_tokens: int = 1 << 20
    """Tokens that those which wait have together. One more that waits is told so too, if that would be more:
    a token takes some fifty bytes, and a queue of long prompts is more work than its length tells."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or a full decode step would not fit"
            )
        for name in ("max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def num_rows(self) -> int:
        """Of the token pool: of those that run, of those that ended while a step is in flight, and row 0."""
        return 2 * self.max_num_seqs + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    to: IngressId
    chunk: TokenChunk


class Scheduler:
    """Waiting and running sequences, and the pools they draw from.

    Order of a step: decodes; then prompts, those already begun and those that wait alike. Decode comes first
    so that a long prompt delays nobody's next token by more than one step's budget. Within each, lower
    priority values come first, and equal ones by arrival.

    A prompt claims the blocks of its whole length at its first chunk, so only decoding can run out of blocks.
    Then the last in that order is preempted: it gives everything back and waits, in its place, to be computed
    again, but for what the prefix cache still has of it. The first is never the victim while another runs, so
    somebody always ends. An arrival preempts nobody, whatever its priority.

    One whose prefix is being fetched is passed over until it has come, or has failed to.

    Those that wait next and have the same tokens as one that is about to draw, the choices of one prompt, are
    forked from it: they share its complete blocks, get copies of what they will write, and draw from the same
    row of logits. From then on they are sequences like any other. Those for which there is no room go on
    waiting, and find the prefix cached.

    A step may be scheduled while the one before it is in flight; they are committed in order. A sequence that
    turns out to have ended is then in one step too many: that step's result for it is dropped, and what it
    owns is released when that step has finished.

    Drafts need the tokens before them. A sequence that has good ones is left out of a step for that, and of
    the step behind the one that verifies them; the others are not held up by it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: Pools,
        *,
        fingerprint: bytes = b"",
        rule: BoundaryRule | None = None,
        snapshot_every: int = 1,
        stores: StoreView | None = None,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """fingerprint: what K/V depend on beside the tokens. rule: what a boundary needs beside blocks.

        snapshot_every: see `Sharing`.
        The clock decides nothing: it only says how long requests wait.
        """
        self._config = config
        self._clock = clock
        self._pools = pools
        self._fingerprint = fingerprint
        rule = rule or BoundaryRule()
        self._deferred = DeferredRelease(pools)
        self._drafts = drafts
        self._saves = Saves(pools, stores)
        self._sharing = Sharing(pools, self._deferred, rule, self._saves, snapshot_every=snapshot_every)
        self._fetches = Fetches(pools, rule, self._saves, stores)
        self._forks = Forks(pools, self._deferred)
        self._refusals = Refusals(
            pools,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            max_requests=config.max_num_seqs + config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
        )
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank, as is _running
        self._running: list[Sequence] = []
        self._next_sequence = 1
        self._next_step = 1
        self.num_preemptions = 0
        self._draft_counts: dict[IngressId, DraftCounts] = {}
        self.queue_seconds = Histogram(QUEUE_S)
        """From arrival to the first admission."""

    def load(self, asked_by: IngressId | None = None) -> Load:
        """What the requests do, all or one ingress's. Any thread may ask: lists are copied in one piece."""
        return Load.of(list(self._running), list(self._waiting), asked_by)

    def draft_counts(self, asked_by: IngressId | None = None) -> DraftCounts:
        """Of all requests there have been, or of one ingress's. Any thread may ask."""
        if asked_by is not None:
            return self._draft_counts.get(asked_by, DraftCounts())
        return sum(list(self._draft_counts.values()), DraftCounts())

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def pools(self) -> Pools:
        return self._pools

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._pools.prefix_cache

    @property
    def num_forked(self) -> int:
        """Sequences whose prompt was computed for another."""
        return self._forks.num_forked

    @property
    def num_fetches(self) -> int:
        """Those that have not ended. What a request was to have of them may have been given up."""
        return len(self._fetches)

    @property
    def may_run(self) -> bool:
        """Whether there is a sequence that does not wait for a fetch."""
        return bool(self._running) or any(sequence.fetching is None for sequence in self._waiting)

    @property
    def transfers(self) -> TransferCounts:
        return TransferCounts(
            fallbacks=dict(self._fetches.fallbacks),
            fetched_tokens=dict(self._fetches.fetched_tokens),
            num_unsaved=self._saves.num_lost,
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of what came with all requests together; of the choices of one prompt only once."""
        alone, least = 0, dict[RequestId, int]()
        for sequence in self._sequences.values():
            group, uncomputed = sequence.request.group, sequence.num_uncomputed
            if group is None:
                alone += uncomputed
            else:
                least[group] = min(uncomputed, least.get(group, uncomputed))
        return alone + sum(least.values())

    def add(self, requests: Series[EngineRequest], reply_to: IngressId) -> list[Reply]:
        """Queue requests, or answer at once that they cannot run.

        requests: one, or the choices of one prompt, which differ in names and seeds alone. They are judged,
        and let in, together: what came before them is what counts.
        """
        first = requests[0]
        error = self._refusals.refusal(
            first,
            num_requests=sum(s.request.prompt_id != first.prompt_id for s in self._sequences.values()),
            num_queued_tokens=self._num_queued_tokens(first.prompt_id),
        )
        if error is not None:
            return [Reply(to=reply_to, chunk=_error_chunk(request, error)) for request in requests]
        keys = [root_key(self._fingerprint, first.cache_salt)]
        for request in requests:
            sequence = Sequence(
                sequence_id=SequenceId(self._next_sequence),
                request=request,
                reply_to=reply_to,
                keys=list(keys),
                arrived=self._clock(),
            )
            self._next_sequence += 1
            self._sequences[sequence.sequence_id] = sequence
            insort(self._waiting, sequence, key=_rank)
            sequence.may_fetch = not self._fetches.begin(sequence)  # what it finds here may be gone by then
            keys = sequence.keys  # named once for all of them
        return []

    def _num_queued_tokens(self, besides: RequestId) -> int:
        """Of the prompts of all that wait, but for one: the choices of a prompt share it."""
        queued = {sequence.request.prompt_id: len(sequence.tokens) for sequence in self._waiting}
        return sum(queued.values()) - queued.get(besides, 0)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Forget a request and free what it owns. One that already ended is none of our business."""
        for sequence in list(self._sequences.values()):
            if sequence.request.request_id == request_id and sequence.request.attempt == attempt:
                self._remove(sequence)

    def abort_all(self, reply_to: IngressId) -> None:
        """An ingress is gone: nobody is left to hear its requests' tokens."""
        for sequence in list(self._sequences.values()):
            if sequence.reply_to == reply_to:
                self._remove(sequence)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is a hit any more, nor will be what running sequences build upon it."""
        self._pools.prefix_cache.reset()
        self._saves.forget()
        self._fetches.reset()
        for sequence in self._running:
            self._sharing.stop(sequence)
        for sequence in self._sequences.values():
            sequence.may_fetch, sequence.sources = False, ()  # nor will they fetch when they are preempted

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run, be it only until the step in flight is committed."""
        budget = self._config.max_num_batched_tokens
        steps: list[SequenceStep] = []
        preempted_before = self.num_preemptions
        decoding = [
            sequence
            for sequence in self._running  # it loses its last when one is preempted
            if sequence.num_unplanned == 1 and not self._awaits_drafts(sequence) and self._make_room(sequence)
        ]
        spare = budget - self._config.max_num_seqs  # who is forked draws without a row of its own
        for sequence in decoding:
            drafts = self._draft(sequence, spare)
            spare -= len(drafts)
            steps.append(self._take(sequence, 1, drafts))
        budget -= sum(step.end - step.start for step in steps)
        begun = [sequence for sequence in self._running if sequence.num_unplanned > 1]
        may_admit = self.num_preemptions == preempted_before  # else what was just freed would be taken back
        if may_admit and self._waiting:
            steps = [self._with_forks(step) for step in steps]
        while budget > 0:
            before = begun[0] if begun else None
            prompt = (self._admit(before) if may_admit else None) or before
            if prompt is None:
                break
            if prompt is before:
                del begun[0]
            step = self._take(prompt, budget)
            budget -= step.end - step.start
            steps.append(self._with_forks(step) if may_admit else step)
        if not steps:
            return None
        plan = StepPlan(step_id=self._next_step, sequences=tuple(steps))
        self._next_step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Reply]:
        """Take what a step has computed and drawn, for every sequence of it that has not ended meanwhile."""
        self._deferred.step_finished(plan.step_id)
        replies: list[Reply] = []
        for step in plan.sequences:
            for sequence, row in self._computed_in(step):
                if (chunk := self._advance(sequence, row, step, result)) is not None:
                    replies.append(Reply(to=sequence.reply_to, chunk=chunk))
        self._forks.end(plan)
        return replies

    def _computed_in(self, step: SequenceStep) -> Iterator[tuple[Sequence, BlockId]]:
        """Those of them that have not ended, with the row that they had then."""
        for sequence_id, row in self._forks.computed_in(step):
            if (sequence := self._sequences.get(sequence_id)) is not None:
                yield sequence, row

    def fail(self, plan: StepPlan, message: str) -> list[Reply]:
        """The step could not be computed: its requests end with an error, the others go on."""
        self._deferred.step_finished(plan.step_id)
        error = RequestError(kind=ErrorKind.INTERNAL, message=message)
        replies: list[Reply] = []
        for step in plan.sequences:
            for sequence, _ in self._computed_in(step):
                self._remove(sequence)
                replies.append(Reply(to=sequence.reply_to, chunk=_error_chunk(sequence.request, error)))
        self._forks.end(plan)
        return replies

    def use_store(self, own: StoreId | None) -> None:
        """The store of the engine's own node from now on, which has nothing of what another had."""
        self._saves.use_store(own)

    def take_saves(self, max_bytes: int) -> list[Piece]:
        """What to copy for the own node's store. Nothing of it is overwritten until it is `saved`."""
        return self._saves.take(max_bytes)

    def saved(self, pieces: Iterable[Piece]) -> None:
        """Nobody reads these pieces on the device any more."""
        self._saves.end(pieces)

    def not_saved(self, names: Iterable[BlockKey]) -> None:
        """Of pieces that were taken: no store has them. If they are still cached, they may be taken again."""
        self._saves.not_stored(names)

    def take_fetches(self) -> list[Fetch]:
        """What is to be fetched, each once."""
        return self._fetches.take()

    def land(self, fetch_id: FetchId, keys: Iterable[BlockKey]) -> list[Piece]:
        """Memory for what has come of a fetch, to be filled before `landed`. Nothing is read of it before."""
        return self._fetches.land(fetch_id, keys, headroom=len(self._running))

    def landed(self, fetch_id: FetchId) -> None:
        self._fetches.landed(fetch_id)

    def fetch_failed(self, fetch_id: FetchId, reason: Fallback) -> None:
        """No copy to its pieces, if it has any, is under way any more."""
        self._fetches.failed(fetch_id, reason)

    def outstanding(self) -> dict[str, int]:
        """What is under way, and what is owned for it: all 0 when idle."""
        return {"requests": self.num_sequences, **self._pools.outstanding(), "fetches": self.num_fetches}

    def check(self) -> None:
        """Every invariant of the sequences and their pools (DESIGN, "What a sequence owns")."""
        running = [sequence.holding for sequence in self._running]
        self._pools.check([*running, *self._deferred.holdings(), *self._fetches.holdings()])
        self._fetches.check()
        self._saves.check()
        assert len(self._running) <= self._config.max_num_seqs
        for queue in (self._waiting, self._running):
            ranks = [sequence.rank for sequence in queue]
            assert ranks == sorted(ranks), f"not in order: {ranks}"
        queued = {sequence.sequence_id for sequence in [*self._waiting, *self._running]}
        assert queued == self._sequences.keys()
        for sequence in self._waiting:
            assert sequence.holding == Holding()
            assert sequence.num_planned == sequence.num_computed == sequence.num_shared_blocks == 0
        for sequence in self._running:
            table, block_size = sequence.holding.block_table, self._pools.block_size
            assert sequence.num_computed <= sequence.num_planned <= len(table) * block_size
            assert sequence.num_planned <= sequence.num_tokens + max(0, sequence.num_drafts - 1)
            assert not sequence.num_drafts or sequence.num_drawing == 1
            shared = sequence.num_shared_blocks
            assert shared * block_size <= max(sequence.num_computed, sequence.resume.boundary * block_size)
            assert sequence.fetching is None
            cached = self._pools.prefix_cache.match(sequence.block_keys(0, shared, block_size))
            assert cached in (table[:shared], [])
        self._forks.check(self._running)

    def _make_room(self, sequence: Sequence) -> bool:
        """Fit the table to the history; False if `sequence` has to wait for that, running or preempted."""
        needed = blocks_needed(
            history=len(sequence.tokens), in_flight=sequence.num_drawing, block_size=self._pools.block_size
        )
        while not self._pools.resize(sequence.holding, needed):
            if self._deferred.holds_blocks:  # they come back when the step in flight has finished
                return False
            if self._fetches.give_way():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _awaits_drafts(self, sequence: Sequence) -> bool:
        """Whether it is left out of this step, so that it can have drafts in the next."""
        if self._drafts is None or not sequence.num_drawing or sequence.num_left < 2:
            return False
        return self._drafts.wait(sequence, num_running=len(self._running))

    def _draft(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Guesses behind its last token, and blocks for them: as far as one is left for each that runs. For
        the sake of drafts nobody is preempted. None at a prompt's end: others may be forked there."""
        if self._drafts is None or sequence.num_drawing or not sequence.has_drawn:
            return ()
        most, num_running = min(budget, sequence.num_left - 1), len(self._running)
        drafts = self._drafts.propose(sequence, num_running=num_running, most=most)
        if not drafts:
            return ()
        history, block_size = len(sequence.tokens), self._pools.block_size
        needed = blocks_needed(history=history, drafts=len(drafts), block_size=block_size)
        if not self._pools.resize(sequence.holding, needed, headroom=num_running):
            drafts = drafts[: len(sequence.holding.block_table) * block_size - history]
        return drafts

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        if sequence.may_share:
            saved = self._saves.source(sequence.keys[1 : sequence.num_shared_blocks + 1])
            sequence.sources = tuple(dict.fromkeys((*sequence.sources, *saved)))  # it may be preempted often
            sequence.may_fetch = True
        self._release(sequence)
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_rank)

    def _admit(self, before: Sequence | None) -> Sequence | None:
        """Start the first that waits if it fits, and comes before `before`. One that must go on waiting holds
        back those behind it, but for what is on its way to it. A hit that grows by a step in flight is waited
        for: requests that arrive together would else each compute what they share, as far as a step reaches.

        A block for each running sequence stays available, so that an arrival is not preempted at once.
        """
        if len(self._running) >= self._config.max_num_seqs:
            return None
        for sequence in self._waiting:
            if sequence.fetching is not None:
                continue
            if before is not None and before.rank < sequence.rank:
                return None
            if sequence.num_drawing:  # preempted in a step whose token is not known yet
                return None
            hit = self._sharing.hit(sequence)
            if self._sharing.is_growing(sequence, hit, self._running) or not self._fits(sequence, hit):
                return None
            if not (sequence.may_fetch and self._fetches.begin(sequence)):
                return self._start(sequence, hit)
        return None

    def _fits(self, sequence: Sequence, hit: Hit) -> bool:
        length, headroom = len(sequence.tokens), len(self._running)
        could_give_way = self._fetches.num_kept_blocks(besides=sequence)
        if not self._pools.has_blocks(length, hit=hit.blocks, headroom=headroom - could_give_way):
            return False
        while not self._pools.has_blocks(length, hit=hit.blocks, headroom=headroom):
            if not self._fetches.give_way(besides=sequence):
                return False
        return self._pools.admission(length, hit=hit.blocks, headroom=headroom) is Admission.OK

    def _start(self, sequence: Sequence, hit: Hit) -> Sequence:
        self._run(sequence, lambda admitted: self._sharing.admit(admitted, hit, first_step=self._next_step))
        return sequence

    def _run(self, sequence: Sequence, admit: Callable[[Sequence], None]) -> None:
        """It waits no longer, with what `admit` gives it."""
        self._waiting.remove(sequence)
        if not sequence.was_admitted:
            self.queue_seconds.observe(self._clock() - sequence.arrived)
        promised = sequence.num_promised
        admit(sequence)
        self._fetches.admitted(sequence, num_promised=promised)
        insort(self._running, sequence, key=_rank)

    def _with_forks(self, step: SequenceStep) -> SequenceStep:
        """The step, with those that wait next and have its tokens, as far as there is room for them."""
        parent, forks = self._sequences[step.sequence_id], list[Fork]()
        if step.draw is None or step.end != len(parent.tokens):
            return step  # inside its tokens, or behind one that is being drawn
        while (headroom := len(self._running)) < self._config.max_num_seqs:
            sequence = self._forks.next(parent, self._waiting, headroom=headroom)
            if sequence is None:
                break
            self._run(sequence, lambda forked: forks.append(self._forks.fork(parent, forked)))
        return self._forks.begin(step, forks)

    def _take(self, sequence: Sequence, budget: int, drafts: tuple[int, ...] = ()) -> SequenceStep:
        """Plan a sequence's next rows, drafts included, as if they were computed and drawn already."""
        start, block_size = sequence.num_planned, self._pools.block_size
        end = min(start + budget, sequence.num_tokens)
        draws = end == sequence.num_tokens
        end += len(drafts)
        step = SequenceStep(
            sequence_id=sequence.sequence_id,
            row=sequence.holding.row,
            start=start,
            end=end,
            block_table=sequence.holding.frozen_table(),
            slot=sequence.holding.slot,
            known_tokens=tuple(sequence.tokens) if sequence.is_new_to_runner else (),
            draw=sequence.draw if draws else None,
            drafts=drafts,
            prompt_logprobs=sequence.wanted_prompt_logprobs(start, end),
            restore=sequence.restore,
            captures=self._sharing.captures(sequence, start, end),
            valid_from=self._sharing.first_token(sequence),
            store_from=sequence.resume.boundary * block_size,
        )
        sequence.is_new_to_runner, sequence.restore = False, ()
        sequence.num_planned = end
        sequence.num_drawing += draws
        sequence.num_drafts = len(drafts)
        sequence.last_step = self._next_step
        return step

    def _advance(
        self, sequence: Sequence, row: BlockId, step: SequenceStep, result: StepResult
    ) -> TokenChunk | None:
        """What a step has done for a sequence; None if there is nothing to say of it."""
        still_runs = sequence.holding.row == row  # else it was preempted, and only what was drawn counts
        if still_runs:
            sequence.num_computed = step.end
        prompt_logprobs = sequence.take_prompt_logprobs(
            step.start, result.prompt_logprobs.get(step.sequence_id, ())
        )
        if sequence.sequence_id not in result.drawn:
            self._sharing.share(sequence)
            return _chunk(sequence, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        cached_tokens = None if sequence.has_drawn else sequence.cached_tokens
        drawn, reason = self._append(sequence, result.drawn[sequence.sequence_id])
        if step.drafts:
            counted = DraftCounts(num_drafts=1, num_tokens=len(step.drafts), num_accepted=len(drawn) - 1)
            self._draft_counts[sequence.reply_to] = self.draft_counts(sequence.reply_to) + counted
            if still_runs:
                self._take_back(sequence, step.start + len(drawn))
        self._sharing.share(sequence)
        if reason is not None:
            self._sharing.end_turn(sequence)
            self._remove(sequence)
        return _chunk(
            sequence,
            token_ids=tuple([each.token_id for each in drawn]),
            logprobs=tuple([each.logprob for each in drawn if each.logprob is not None]),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
            finish_reason=reason,
        )

    @staticmethod
    def _append(
        sequence: Sequence, drawn: tuple[Drawn, ...]
    ) -> tuple[tuple[Drawn, ...], FinishReason | None]:
        """What a step has drawn, up to where the sequence ends; why it does, if it does."""
        sequence.num_drawing -= 1
        for num, each in enumerate(drawn, start=1):
            if (reason := sequence.append(each.token_id)) is not None:
                return drawn[:num], reason
        return drawn, None

    def _take_back(self, sequence: Sequence, end: int) -> None:
        """Of a step with drafts only rows before `end` are the sequence's; nothing is planned behind it."""
        sequence.num_planned = sequence.num_computed = end
        sequence.num_drafts = 0
        needed = blocks_needed(history=len(sequence.tokens), block_size=self._pools.block_size)
        self._pools.resize(sequence.holding, min(needed, len(sequence.holding.block_table)))

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self._fetches.forget(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._deferred.release(sequence.give_up(), after_step=sequence.last_step)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _chunk(sequence: Sequence, **said: Any) -> TokenChunk:
    return TokenChunk(request_id=sequence.request.request_id, attempt=sequence.request.attempt, **said)


def _error_chunk(request: EngineRequest, error: RequestError) -> TokenChunk:
    return TokenChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error=error,
    )
