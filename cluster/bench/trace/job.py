"""One request on its way through simulated engines, and what became of it."""

from dataclasses import dataclass, field

from shoal.actors.engine.pools import Holding
from shoal.actors.engine.transfers import Place
from shoal.actors.messages import CachedTokens, EngineId, PrefixSource, RequestId
from shoal.cluster.bench.trace.traces import TracedRequest
from shoal.kvstore.block_hash import BlockKey


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One attempt at one request, as its engine sees it."""

    request: TracedRequest
    request_id: RequestId
    attempt: int = 1
    num_drawn: int = 0
    """Tokens that earlier attempts have drawn: they are computed like a prompt."""
    first_token_at: float | None = None
    hits: CachedTokens | None = None
    """When the first attempt was admitted."""
    engine_id: EngineId | None = None
    sources: tuple[PrefixSource, ...] = ()

    is_fetching: bool = False
    num_promised: int = 0
    """Tokens that it need not compute if what it fetches comes."""
    kept: Holding = field(default_factory=Holding)
    """What is there of its prefix, until it is admitted."""
    fetched: dict[BlockKey, Place] = field(default_factory=dict)
    holding: Holding = field(default_factory=Holding)
    num_shared: int = 0
    """Blocks of its table that the prefix cache had when it was admitted."""

    @property
    def num_prompt(self) -> int:
        """Tokens to be there before the next one is drawn."""
        return self.request.num_prompt_tokens + self.num_drawn

    @property
    def num_left(self) -> int:
        """To be drawn."""
        return self.request.num_output_tokens - self.num_drawn

    @property
    def num_uncomputed(self) -> int:
        return self.num_prompt - self.num_promised

    def again(self, num_drawn: int) -> "Job":
        """The next attempt, after so many tokens in all."""
        return Job(
            request=self.request,
            request_id=self.request_id,
            attempt=self.attempt + 1,
            num_drawn=num_drawn,
            first_token_at=self.first_token_at,
            hits=self.hits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request that has been answered."""

    arrived_s: float
    first_token_s: float
    """After its arrival, as is the next."""
    end_s: float
    num_prompt_tokens: int
    hits: CachedTokens
    attempts: int


def served(job: Job, now: float) -> Served:
    assert job.first_token_at is not None and job.hits is not None
    arrived_s = job.request.arrives_s
    return Served(
        arrived_s=arrived_s,
        first_token_s=job.first_token_at - arrived_s,
        end_s=now - arrived_s,
        num_prompt_tokens=job.request.num_prompt_tokens,
        hits=job.hits,
        attempts=job.attempt,
    )
