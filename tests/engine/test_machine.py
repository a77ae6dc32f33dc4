"""The whole engine without a model, driven at random: whoever reads a wrong row draws a wrong token."""

import gc
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.transfers import Fallback, StoreView
from shoal.actors.messages import EngineRequest, FinishReason, RequestId, SamplingParams
from shoal.kvstore.block_hash import BlockKey
from tests.engine.bench import Bench, a_request, benches
from tests.fake_drafts import FakeDrafts
from tests.fake_runner import generate, logprob
from tests.fake_store import view

STEMS = [list(range(first, first + 12)) for first in (0, 100)]
"""Prompts begin like these, so that they share blocks."""

prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.sampled_from([12, 9, 6, 3, 0]),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)


def expected(request: EngineRequest) -> list[int]:
    """What the request must get, up to its stop token."""
    tokens = generate(request.prompt_token_ids, request.max_tokens, request.sampling.seed)
    ends = [i + 1 for i, token in enumerate(tokens) if token in request.stop_token_ids]
    return tokens[: min(ends, default=len(tokens))]


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(prompts, min_size=1, max_size=8),
    max_tokens=st.integers(1, 12),
    bench=benches(cache=st.sampled_from(["naive", "radix"]), num_segments=st.integers(0, 20)),
)
def test_everybody_gets_what_they_would_get_alone(
    *, prompts: list[list[int]], max_tokens: int, bench: Bench
) -> None:
    for i, prompt in enumerate(prompts):
        bench.submit(a_request(str(i), prompt, max_tokens))
    bench.finish()
    for i, prompt in enumerate(prompts):
        if str(i) not in bench.errors:
            assert bench.tokens[str(i)] == generate(prompt, max_tokens)
    assert bench.drained()


@dataclass
class Watched:
    """A bench, the requests it was given, and what must always hold of both."""

    bench: Bench
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    reported: set[BlockKey] = field(default_factory=set)
    written_by: dict[BlockId, str] = field(default_factory=dict)
    """The salt whose rows a block has."""
    salt_of: dict[BlockKey, str] = field(default_factory=dict)
    salts: list[str] = field(default_factory=list)
    """Of sequences, in the order of their ids."""
    num_plans: int = 0

    def submit(self, prompt: Sequence[int], max_tokens: int, num_choices: int = 1, **more: Any) -> None:
        first, choices = len(self.requests) + 1, list[EngineRequest]()
        for number in range(first, first + num_choices):
            sampling = SamplingParams(seed=number - first)
            request = a_request(
                str(number), prompt, max_tokens, sampling=sampling, group=RequestId(f"of {first}"), **more
            )
            self.requests[request.request_id] = request
            salt = request.cache_salt
            self.salt_of |= dict.fromkeys(self.bench.keys([*prompt, *expected(request)], salt), salt)
            choices.append(request)
        self._submit(*choices)

    def _submit(self, *requests: EngineRequest) -> None:
        self.salts += [request.cache_salt for request in requests]
        self.bench.submit(*requests)

    def abort(self, name: str) -> None:
        if name not in self.bench.finished:
            self.aborted.add(name)
        self.bench.engine.abort(RequestId(name), self.requests[name].attempt)

    def go_on(self, name: str) -> None:
        """As if another engine had begun the request and was lost."""
        if name in self.bench.finished or name in self.aborted:
            return
        request = self.requests[name]
        self.bench.engine.abort(RequestId(name), request.attempt)
        request = self.requests[name] = replace(
            request,
            attempt=request.attempt + 1,
            output_token_ids=tuple(self.bench.tokens[name]),
            num_prompt_logprobs=len(self.bench.prompt_logprobs[name]),
        )
        self._submit(request)

    def check(self, name: str) -> None:
        """What a request has received so far is right."""
        request, tokens, said = self.requests[name], self.bench.tokens[name], self.bench.prompt_logprobs[name]
        whole = expected(request)
        assert tokens == whole[: len(tokens)], name
        if self.bench.finished.get(name) in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(tokens) == len(whole), name
        wanted = () if request.prompt_logprobs is None else request.prompt_token_ids[1:]
        assert said == [logprob(token) for token in wanted[: len(said)]], name
        assert len(said) == len(wanted) or not tokens, name

    def check_salts(self) -> None:
        """Nobody reads what another salt has written."""
        plans = self.bench.runner.plans[self.num_plans :]
        for step in (step for plan in plans for step in plan.sequences):
            salt = self.salts[step.sequence_id - 1]
            first = max(step.start, step.store_from) // self.bench.block_size
            end = -(-step.end // self.bench.block_size)
            assert all(self.written_by[block] == salt for block in step.block_table[:first])
            self.written_by.update(dict.fromkeys(step.block_table[first:end], salt))
            for fork in step.forks:
                assert self.salts[fork.sequence_id - 1] == salt
                self.written_by.update({copy: salt for _, copy in fork.blocks})
        self.num_plans += len(plans)

    def copy(self, *, fails: bool = False) -> None:
        """What has come of a fetch goes to the device."""
        self.check_salts()
        pieces = self.bench.carrier.landing[0].pieces
        self.written_by |= {piece.block: self.salt_of[piece.key] for piece in pieces if piece.block}
        self.bench.carrier.copy(fails=fails)

    def carry(self, choose: random.Random) -> None:
        """Some of what is to be copied, in any order and not always with luck."""
        carrier = self.bench.carrier
        carrier.take(choose.randrange(4))
        if carrier.saving and choose.random() < 0.5:
            carrier.save(choose.randrange(len(carrier.saving)), lose=choose.random() < 0.1)
        if carrier.landing and choose.random() < 0.5:
            self.copy(fails=choose.random() < 0.1)
        if carrier.fetching and choose.random() < 0.5:
            index = choose.randrange(len(carrier.fetching))
            wanted = [key for read in carrier.fetching[index].reads for key in read.keys]
            carrier.land(index, without=choose.choices(wanted, k=choose.choice([0, 0, 1])))

    def check_reports(self) -> None:
        changes = self.bench.engine.take_prefix_changes()
        self.reported = (self.reported - set(changes.removed)) | set(changes.stored)
        assert self.reported == set(self.bench.engine.prefix_keys())

    def end(self) -> None:
        carrier = self.bench.carrier
        while carrier.landing:
            self.copy()
        for _ in range(2000):
            carrier.take()
            while carrier.saving:
                carrier.save()
            while carrier.fetching:
                carrier.land()
                self.copy()
            if not self.bench.engine.has_work:
                break
            self.bench.step()
        self.check_salts()
        self.check_reports()
        for name in self.requests:
            self.check(name)
        assert self.bench.finished.keys() | self.aborted == self.requests.keys(), "nobody is forgotten"
        assert self.bench.drained()


def stop_tokens(prompt: Sequence[int], index: int | None) -> frozenset[int]:
    """Such that the output ends with this token of it."""
    return frozenset() if index is None else frozenset(generate(prompt, index + 1)[index:])


class EngineMachine(RuleBasedStateMachine):
    """Requests, steps, aborts, resets and failures in any order; so few blocks that all are fought for."""

    view: StoreView | None = None

    def __init__(self) -> None:
        super().__init__()
        self.last_failure = -1

    @initialize(
        eager=st.booleans(),
        window=st.sampled_from([None, 3, 4, 6]),
        num_dropped=st.sampled_from([0, 0, 1, 2]),
        num_rewound=st.sampled_from([0, 2]),
        num_segments=st.sampled_from([2, 5, 11]),
        snapshot_every=st.sampled_from([1, 1, 0, 2]),
        num_draft_tokens=st.sampled_from([0, 1, 4]),
        right=st.sampled_from([0.3, 0.8, 1.0]),
    )
    def begin(
        self,
        *,
        eager: bool,
        window: int | None,
        num_dropped: int,
        num_rewound: int,
        num_segments: int,
        snapshot_every: int,
        num_draft_tokens: int,
        right: float,
    ) -> None:
        self.bench = Bench(
            num_blocks=11,
            block_size=3,
            num_slots=4,
            max_num_seqs=3,
            max_num_batched_tokens=7,
            window=window,
            num_dropped=num_dropped,
            num_rewound=num_rewound if window in {4, 6} else 0,
            num_segments=num_segments,
            snapshot_every=snapshot_every,
            eager=eager,
            view=self.view,
            drafts=FakeDrafts(num_draft_tokens, right=right, waits=0.6) if num_draft_tokens else None,
            num_draft_tokens=num_draft_tokens,
        )
        self.watched = Watched(self.bench)
        self.fill_stores()

    def fill_stores(self) -> None:
        """With what was computed before."""

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 9),
        stops_at=st.none() | st.integers(0, 8),
        salt=st.sampled_from(["", "", "salt"]),
        priority=st.sampled_from([0, 0, 1]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        num_choices=st.sampled_from([1, 1, 2, 5]),
    )
    def submit(
        self,
        *,
        prompt: list[int],
        max_tokens: int,
        stops_at: int | None,
        salt: str,
        priority: int,
        prompt_logprobs: int | None,
        num_choices: int,
    ) -> None:
        self.watched.submit(
            prompt,
            max_tokens,
            num_choices,
            stop_token_ids=stop_tokens(prompt, stops_at),
            cache_salt=salt,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            sources=self.bench.stores.sources(self.bench.keys(prompt, salt)),
        )

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule(num_steps=st.integers(2, 9))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    @precondition(lambda self: self.watched.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.watched.abort(data.draw(st.sampled_from(sorted(self.watched.requests))))

    @precondition(lambda self: self.watched.requests)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.watched.go_on(data.draw(st.sampled_from(sorted(self.watched.requests))))

    @precondition(lambda self: self.bench.engine.prefix_keys())
    @rule(really=st.sampled_from([False, False, True]))
    def reset_prefix_cache(self, really: bool) -> None:
        if not really:  # else little would ever be found in it
            return
        self.bench.engine.reset_prefix_cache()
        assert self.bench.engine.prefix_keys() == ()

    @precondition(lambda self: len(self.bench.runner.plans) > self.last_failure + 1)
    @rule()
    def fail(self) -> None:
        """The next step to be computed, be it in flight already; never three in a row."""
        self.last_failure = len(self.bench.runner.plans)
        self.bench.runner.failures = 1

    @rule()
    def report(self) -> None:
        self.watched.check_reports()

    @invariant()
    def consistent(self) -> None:
        self.bench.engine.check()
        self.watched.check_salts()
        for name in self.watched.requests:
            self.watched.check(name)

    def teardown(self) -> None:
        if hasattr(self, "watched"):
            self.watched.end()


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_2000_requests_of_all_kinds_that_stop_fail_and_disconnect_as_they_like() -> None:
    choose = random.Random(0)
    bench = Bench(
        num_blocks=20,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        window=4,
        view=view("write_through"),
        drafts=FakeDrafts(3, right=0.7, waits=0.5),
        num_draft_tokens=3,
    )
    watched = Watched(bench)
    while len(watched.requests) < 2000 or bench.engine.has_work:
        while len(watched.requests) < 2000 and bench.engine.num_requests < 20:
            stem, tail = choose.choice(STEMS), choose.choices(range(50), k=choose.randrange(1, 20))
            prompt, salt = stem[: choose.randrange(13)] + tail, choose.choice(["", "", "salt"])
            watched.submit(
                prompt,
                choose.randrange(1, 25),
                choose.choice([1, 1, 1, 4]),
                stop_token_ids=stop_tokens(prompt, choose.choice([None, *range(10)])),
                cache_salt=salt,
                priority=choose.choice([0, 0, 1]),
                prompt_logprobs=choose.choice([None, None, None, 0]),
                sources=bench.stores.sources(bench.keys(prompt, salt)),
            )
        if choose.random() < 0.1:
            watched.abort(str(choose.randrange(max(1, len(watched.requests) - 20), len(watched.requests))))
        if choose.random() < 0.05:
            watched.go_on(str(choose.randrange(max(1, len(watched.requests) - 20), len(watched.requests))))
        if choose.random() < 0.005:
            bench.engine.reset_prefix_cache()
        if choose.random() < 0.01:
            bench.runner.failures = 1
        bench.device.eager = choose.random() < 0.5
        watched.carry(choose)
        if choose.random() < 0.2:
            bench.engine.check()
        bench.advance()
        watched.check_salts()
    watched.end()
    assert len(bench.errors) < 200 and bench.scheduler.num_preemptions > 20
    assert bench.scheduler.num_forked > 200
    assert sum(bench.cached.values()) > 2000, "on average some tokens of each were cached"
    assert sum(bench.scheduler.transfers.fetched_tokens.values()) > 500
    assert {Fallback.MISSING, Fallback.EVICTED} < bench.scheduler.transfers.fallbacks.keys()


def test_81_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Short requests: what is alive after 2,500 of them is what was alive after the first thousand."""
    bench = Bench(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64)

    def serve(first: int, last: int) -> None:
        for i in range(first, last):
            bench.submit(a_request(str(i), [i % 1000, i // 1000, *range(10)], max_tokens=2))
            if i % 10 == 9:
                while bench.engine.has_work:
                    bench.advance()
                for received in (
                    bench.tokens,
                    bench.begun,
                    bench.prompt_logprobs,
                    bench.cached,
                    bench.cached_by_place,
                    bench.finished,
                    bench.runner.plans,
                ):
                    received.clear()
        gc.collect()

    serve(0, 500)
    objects = len(gc.get_objects())
    tracemalloc.start()
    serve(500, 1000)
    before, _ = tracemalloc.get_traced_memory()
    serve(1000, 2500)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(gc.get_objects()) < objects + 100
    assert after - before < 10_000, "bytes"
