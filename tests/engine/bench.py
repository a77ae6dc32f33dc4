"""An engine over a fake runner, and what each request has received from it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from shoal.actors.engine.drafts import Drafts
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.memory_plan import num_state_slots
from shoal.actors.engine.pools import Pools
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.scheduler import Reply, Scheduler, SchedulerConfig
from shoal.actors.engine.step import StepPlan
from shoal.actors.engine.transfers import StoreView
from shoal.actors.messages import (
    CachedTokens,
    EngineRequest,
    FinishReason,
    IngressId,
    RequestError,
    RequestId,
    TokenLogprob,
)
from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key
from shoal.kvstore.boundary import BoundaryRule
from tests.fake_runner import VOCABULARY, FakeDevice, FakeRunner, generate, sliding_layers
from tests.fake_store import Carrier, Stores

INGRESS = IngressId("ingress-1")


def a_request(name: str, prompt: Sequence[int], max_tokens: int = 3, **more: Any) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=1,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        **{"stop_token_ids": frozenset(), **more},
    )


@dataclass
class Bench:
    num_blocks: int = 20
    block_size: int = 4
    num_slots: int = 0
    window: int | None = None
    """Of sliding layers, below the paged one."""
    num_dropped: int = 0
    num_rewound: int = 0
    """Tokens that are computed again before every start, if segments have all rows of a block."""
    num_segments: int = 20
    rule: BoundaryRule | None = None
    """Instead of what these layers need."""
    snapshot_every: int = 1
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 300
    max_queued_requests: int = 1000
    max_queued_tokens: int = 100_000
    cache: PrefixCacheName = "radix"
    eager: bool = True
    """The fake device computes a step as soon as it is given it."""
    fingerprint: bytes = b""
    view: StoreView | None = None
    drafts: Drafts | None = None
    num_draft_tokens: int = 0
    """What rings have room for."""
    now: float = 0.0
    """Seconds, for the scheduler."""
    stores: Stores = field(default_factory=Stores)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    cached: dict[str, int] = field(default_factory=dict)
    cached_by_place: dict[str, CachedTokens] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)
    errors: dict[str, RequestError] = field(default_factory=dict)
    begun: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that have drawn a token."""

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            vocab_size=VOCABULARY,
        )
        state = None
        if self.window is not None:
            state = sliding_layers(
                self.window,
                self.block_size,
                num_dropped=self.num_dropped,
                num_draft_tokens=self.num_draft_tokens,
            )
            self.num_slots = self.num_slots or num_state_slots(self.max_num_seqs)
            reach = state.needed_rows + self.num_rewound
            rewinding = replace(
                state.rule, num_segments=-(-reach // self.block_size), num_rewound=self.num_rewound
            )
            self.rule = self.rule or (rewinding if self.num_rewound else state.rule)
        self.pools = Pools(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_rows=config.num_rows,
            num_slots=self.num_slots,
            num_segments=0 if state is None else self.num_segments,
            cache=self.cache,
        )
        self.scheduler = Scheduler(
            config,
            self.pools,
            fingerprint=self.fingerprint,
            rule=self.rule,
            snapshot_every=self.snapshot_every,
            stores=self.view,
            drafts=self.drafts,
            clock=lambda: self.now,
        )
        self.runner = FakeRunner(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            state=state,
            num_slots=self.num_slots,
            num_segments=self.num_segments,
        )
        self.carrier = Carrier(self.scheduler, self.runner, self.stores)
        self.device = FakeDevice(self.block_size, eager=self.eager)
        self.engine = Engine(self.scheduler, self.runner, self.device)

    def submit(self, *requests: EngineRequest) -> None:
        """One, or the choices of a prompt."""
        self._take(self.engine.submit(requests, INGRESS))

    def serve(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> int:
        """One request by itself, with all that is to be copied; how many tokens of its prompt were cached.

        The stores are asked for what they have of it.
        """
        so_far = more.get("output_token_ids", ())
        sources = self.stores.sources(self.keys([*prompt, *so_far], more.get("cache_salt", "")))
        self.submit(a_request(name, prompt, max_tokens, **{"sources": sources, **more}))
        while self.engine.has_work:
            self.carrier.run()
            self.step()
        self.carrier.run()
        assert [*so_far, *self.tokens[name]] == generate(prompt, max_tokens), "whatever was cached"
        return self.cached[name]

    def keys(self, tokens: Sequence[int], salt: str = "") -> list[BlockKey]:
        """Of their complete blocks."""
        return extend_keys(root_key(self.fingerprint, salt), tokens, self.block_size)

    def step(self) -> list[tuple[int, int]]:
        """Start a step, and take what the one before it says; its sequences as (start, number of tokens)."""
        num_plans = len(self.runner.plans)
        self.advance()
        self.engine.check()
        plans = self.runner.plans[num_plans:]
        assert all(num_drawn(plan) <= self.max_num_batched_tokens for plan in plans), "rows of logits"
        return [(s.start, s.end - s.start) for plan in plans for s in plan.sequences]

    def advance(self) -> None:
        """A step without its checks."""
        self._take(self.engine.step())
        if self.device.wrong is not None:
            raise self.device.wrong

    def finish(self, *, within: int = 2000) -> None:
        for _ in range(within):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not finished within {within} steps")

    def drained(self) -> bool:
        """Nothing is owned but by the prefix cache, and nothing at all once that is reset."""
        self.pools.check([])
        assert not any(self.engine.outstanding().values()), self.engine.outstanding()
        self.engine.reset_prefix_cache()
        self.pools.check([])
        pools = (self.pools.blocks, self.pools.rows, self.pools.slots, self.pools.segments)
        return all(pool.num_free == pool.num_usable for pool in pools if pool is not None)

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            name = reply.chunk.request_id
            assert name not in self.finished, "nothing follows the last chunk"
            attempt = (name, reply.chunk.attempt)
            if reply.chunk.token_ids and attempt not in self.begun:
                assert reply.chunk.cached_tokens is not None
                self.begun.add(attempt)
                self.cached[name] = reply.chunk.cached_tokens.total
                self.cached_by_place[name] = reply.chunk.cached_tokens
            else:
                assert reply.chunk.cached_tokens is None
            self.tokens[name] += reply.chunk.token_ids
            self.prompt_logprobs[name] += reply.chunk.prompt_logprobs
            if reply.chunk.finish_reason:
                self.finished[name] = reply.chunk.finish_reason
            if reply.chunk.error:
                self.errors[name] = reply.chunk.error


def num_drawn(plan: StepPlan) -> int:
    """Tokens that a step draws, those behind wrong drafts too."""
    drawing = [step for step in plan.sequences if step.draw is not None]
    return sum(1 + len(step.drafts) + len(step.forks) for step in drawing)


def benches(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Bench]:
    """Of any shape, and with so few blocks that they are fought for."""
    return st.builds(
        Bench,
        num_blocks=st.integers(10, 20),
        block_size=st.sampled_from([3, 4, 7]),
        max_num_batched_tokens=st.integers(4, 24),
        eager=st.booleans(),
        window=st.sampled_from([None, 1, 5, 9]),
        num_dropped=st.integers(0, 2),
        snapshot_every=st.sampled_from([1, 1, 0, 2]),
        **more,
    )
