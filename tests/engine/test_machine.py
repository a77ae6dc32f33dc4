"""The whole engine without a model, driven at random: whoever reads a wrong row draws a wrong token."""

import gc
import random
import tracemalloc
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shoal.actors.engine.engine import MAX_FAILED_STEPS
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.messages import EngineRequest, FinishReason, RequestId
from shoal.kvstore.block_hash import BlockKey
from tests.engine.bench import Bench, a_request
from tests.fake_runner import generate, logprob

STEMS = [list(range(first, first + 12)) for first in (0, 100)]
"""Prompts begin like these, so that they share blocks."""

prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.integers(0, 12),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)


def expected(request: EngineRequest) -> list[int]:
    """What the request must get, up to its stop token."""
    tokens = generate(request.prompt_token_ids, request.max_tokens)
    ends = [i + 1 for i, token in enumerate(tokens) if token in request.stop_token_ids]
    return tokens[: min(ends, default=len(tokens))]


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(prompts, min_size=1, max_size=8),
    max_tokens=st.integers(1, 12),
    num_blocks=st.integers(10, 20),
    block_size=st.sampled_from([3, 4, 7]),
    budget=st.integers(4, 24),
    eager=st.booleans(),
    cache=st.sampled_from(["naive", "radix"]),
)
def test_everybody_gets_what_they_would_get_alone(
    *,
    prompts: list[list[int]],
    max_tokens: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    eager: bool,
    cache: PrefixCacheName,
) -> None:
    bench = Bench(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=budget, cache=cache)
    bench.device.eager = eager
    for i, prompt in enumerate(prompts):
        bench.submit(a_request(str(i), prompt, max_tokens))
    bench.finish()
    for i, prompt in enumerate(prompts):
        if str(i) not in bench.errors:
            assert bench.tokens[str(i)] == generate(prompt, max_tokens)
    assert bench.drained()


class EngineMachine(RuleBasedStateMachine):
    """Requests, steps, aborts, resets and failures in any order, over so few blocks that all are fought for.

    After each, every invariant holds, the tokens so far are the right ones, and no two salts share a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=11, block_size=3, num_slots=4, max_num_seqs=3, max_num_batched_tokens=7)
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.reported: set[BlockKey] = set()
        self.num_failures = 0

    @initialize(eager=st.booleans())
    def choose_device(self, eager: bool) -> None:
        self.bench.device.eager = eager

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 9),
        stops_at=st.none() | st.integers(0, 8),
        salt=st.sampled_from(["", "", "salt"]),
        priority=st.sampled_from([0, 0, 1]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
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
    ) -> None:
        stop = frozenset() if stops_at is None else frozenset(generate(prompt, 9)[stops_at : stops_at + 1])
        request = a_request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            stop_token_ids=stop,
            cache_salt=salt,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
        )
        self.requests[request.request_id] = request
        self.bench.submit(request)

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule()
    def steps(self) -> None:
        for _ in range(5):
            self.bench.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.bench.engine.abort(RequestId(name), 1)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.bench.engine.reset_prefix_cache()
        assert self.bench.engine.prefix_keys() == ()

    @precondition(lambda self: self.bench.engine.num_requests)
    @rule()
    def fail(self) -> None:
        """One step, be it the one in flight. Those after it go well, or the engine would give up."""
        self.bench.runner.failures = 1
        for _ in range(MAX_FAILED_STEPS):
            self.bench.step()
        self.bench.runner.failures = 0

    @rule()
    def report(self) -> None:
        changes = self.bench.engine.take_prefix_changes()
        self.reported = (self.reported - set(changes.removed)) | set(changes.stored)
        assert self.reported == set(self.bench.engine.prefix_keys())

    @invariant()
    def consistent(self) -> None:
        self.bench.engine.check()

    @invariant()
    def every_token_is_right(self) -> None:
        for name, tokens in self.bench.tokens.items():
            whole = expected(self.requests[name])
            assert tokens == whole[: len(tokens)], name
            if self.bench.finished.get(name) in (FinishReason.STOP, FinishReason.LENGTH):
                assert len(tokens) == len(whole), name

    @invariant()
    def every_prompt_logprob_is_right(self) -> None:
        for name, said in self.bench.prompt_logprobs.items():
            request = self.requests[name]
            wanted = [] if request.prompt_logprobs is None else request.prompt_token_ids[1:]
            assert said == [logprob(token) for token in wanted[: len(said)]], name
            assert len(said) == len(wanted) or not self.bench.tokens[name], name

    @invariant()
    def no_salt_reads_anothers_blocks(self) -> None:
        readers: defaultdict[int, set[str]] = defaultdict(set)
        for plan in self.bench.runner.plans[-1:]:
            for step in plan.sequences:
                for block in step.block_table:
                    readers[block].add(self.requests[f"r{step.sequence_id - 1}"].cache_salt)
        assert all(len(salts) == 1 for salts in readers.values())

    def teardown(self) -> None:
        self.bench.finish()
        ended = self.bench.finished.keys() | self.aborted
        assert ended == self.requests.keys(), "nobody is forgotten"
        assert self.bench.drained()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_2000_requests_of_all_lengths_that_stop_and_disconnect_as_they_like() -> None:
    choose = random.Random(0)
    bench = Bench(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=32)
    requests: dict[str, EngineRequest] = {}
    gone: set[str] = set()
    while len(requests) < 2000 or bench.engine.has_work:
        while len(requests) < 2000 and bench.engine.num_requests < 20:
            prompt = choose.choice(STEMS)[: choose.randrange(13)] + choose.choices(
                range(50), k=choose.randrange(1, 20)
            )
            stop = frozenset(generate(prompt, 10)[choose.randrange(10) :][:1])
            request = a_request(str(len(requests)), prompt, choose.randrange(1, 25), stop_token_ids=stop)
            requests[request.request_id] = request
            bench.submit(request)
        if choose.random() < 0.1:
            name = str(choose.randrange(max(0, len(requests) - 20), len(requests)))
            if name not in bench.finished:
                gone.add(name)
            bench.engine.abort(RequestId(name), 1)
        bench.advance()
    bench.engine.check()
    assert not bench.errors and bench.finished.keys() == requests.keys() - gone
    for name in bench.finished:
        assert bench.tokens[name] == expected(requests[name])
    assert sum(bench.cached.values()) > 2000, "on average some tokens of each were cached"
    assert bench.drained()


def test_81_memory_does_not_grow_with_the_number_of_requests() -> None:
    """5,000 short requests: what is alive after them is what was alive after the first thousand."""
    bench = Bench(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64)

    def serve(first: int, last: int) -> None:
        for i in range(first, last):
            bench.submit(a_request(str(i), [i % 1000, i // 1000, *range(10)], max_tokens=2))
            if i % 10 == 9:
                while bench.engine.has_work:
                    bench.advance()
                for received in (
                    bench.tokens,
                    bench.prompt_logprobs,
                    bench.cached,
                    bench.finished,
                    bench.runner.plans,
                ):
                    received.clear()
        gc.collect()

    serve(0, 1000)
    objects = len(gc.get_objects())
    tracemalloc.start()
    serve(1000, 2000)
    before, _ = tracemalloc.get_traced_memory()
    serve(2000, 5000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(gc.get_objects()) < objects + 100
    assert after - before < 20_000, "bytes"
