"""One attempt at one request, as its engine sees it."""

from dataclasses import dataclass, field

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.pools import Holding
from shoal.actors.engine.prompt_lookup import PromptLookup
from shoal.actors.engine.step import Draw, SequenceId
from shoal.actors.engine.transfers import FetchId, Place, tokens_by_place
from shoal.actors.messages import (
    CachedTokens,
    EngineRequest,
    FinishReason,
    IngressId,
    PrefixSource,
    TokenLogprob,
)
from shoal.kvstore.block_hash import BlockKey, extend_keys
from shoal.kvstore.boundary import Resume

Rank = tuple[int, bool, SequenceId]
"""Who comes first: by priority; then those that have begun elsewhere, whose clients wait for a next word and
not for a first one; then by arrival."""


@dataclass(slots=True, eq=False)
class Sequence:
    """History, progress, and what it owns.

    0 ............ num_computed ............ num_planned ............ num_tokens
    rows committed               steps in flight           no row yet

    A step is planned before the one before it has been committed, so num_planned runs ahead, and the last
    `num_drawing` of num_tokens are those that steps in flight will draw: only the runner has them. A step
    with drafts will draw one, and perhaps more; nothing is planned behind it, and num_planned is ahead of
    num_tokens until it is known how many drafts were right.
    """

    sequence_id: SequenceId
    request: EngineRequest
    reply_to: IngressId
    keys: list[BlockKey]
    """[root, key of block 0, key of block 1, ...], as far as they were asked for: keys[i] is the parent of
    block i."""
    arrived: float = 0.0
    """By the scheduler's clock."""
    tokens: list[int] = field(init=False)
    """Prompt and output, as far as committed."""
    draw: Draw = field(init=False)
    rank: Rank = field(init=False)

    num_drawing: int = 0
    num_drafts: int = 0
    """Of the step in flight."""
    num_planned: int = 0
    num_computed: int = 0
    lookup: PromptLookup | None = None
    """If its tokens are looked up for drafts."""
    last_step: int = 0
    """The last step that uses what it owns."""
    holding: Holding = field(default_factory=Holding)
    is_new_to_runner: bool = True
    num_shared_blocks: int = 0
    """Of its table, from the first: they are the prefix cache's too."""
    may_share: bool = True
    """False if the prefix cache keeps nothing, and once it has been reset under it: what it computed must not
    be offered again."""
    is_outdated: bool = False
    """That has happened: nor must anybody be forked from it."""
    cached_tokens: CachedTokens | None = None
    """Of the prompt, found when the sequence was first admitted."""
    resume: Resume = field(default_factory=Resume)
    """Where it was taken up when it was last admitted, in blocks."""
    restore: tuple[BlockId, ...] = ()
    """Segments of the state there, for its first step."""
    segments_to_keep: frozenset[int] = frozenset()
    """Blocks whose segments are needed where somebody is likely to come back to its prompt."""
    passing_state: BlockKey | None = None
    """The block of its output whose segment is cached only until there is a later one."""

    sources: tuple[PrefixSource, ...] = field(init=False)
    """Stores that are said to have its blocks."""
    fetching: FetchId | None = None
    """What it waits for, be it on behalf of another sequence."""
    may_fetch: bool = True
    """Whether it is to be asked, before it is admitted, if something should be fetched."""
    num_promised: int = 0
    """Tokens that need not be computed if what is being fetched for it comes, and stays."""
    fetched: dict[BlockKey, Place] = field(default_factory=dict)
    """Where blocks came from that were fetched for it."""
    num_prompt_logprobs: int = field(init=False)
    """Reported so far: one for each row of the prompt, of the token after it."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The same, as far as this attempt has reported them: for whoever is forked from it."""
    inherited_logprobs: tuple[TokenLogprob, ...] = ()
    """What a fork has to report that was computed before it was one."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_logprobs = request.num_prompt_logprobs
        self.rank = (request.priority, not request.has_begun, self.sequence_id)
        self.sources = request.sources
        self.draw = Draw(
            sampling=request.sampling,
            num_prompt_tokens=len(request.prompt_token_ids),
            stop_token_ids=request.stop_token_ids,
            logprobs=request.logprobs,
        )

    @property
    def was_admitted(self) -> bool:
        """At least once."""
        return self.cached_tokens is not None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Also of earlier attempts."""
        return len(self.tokens) - self.num_prompt

    @property
    def has_drawn(self) -> bool:
        """Whether this attempt has."""
        return len(self.tokens) > self.request.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_drawing

    @property
    def num_left(self) -> int:
        """Tokens that may be drawn beside those that steps in flight will draw."""
        return self.request.max_tokens - self.num_output - self.num_drawing

    @property
    def num_unplanned(self) -> int:
        """Tokens whose rows are to be computed. The last token that may be drawn needs none."""
        if self.num_left <= 0:
            return 0
        return self.num_tokens - self.num_planned

    @property
    def num_uncomputed(self) -> int:
        """Of the tokens that came with the request."""
        return max(0, self.request.num_tokens - max(self.num_planned, self.num_promised))

    def block_keys(self, first: int, end: int, block_size: int) -> list[BlockKey]:
        """Of blocks first, ..., end - 1, whose tokens must be known."""
        if len(self.keys) <= end:
            hashed = (len(self.keys) - 1) * block_size
            self.keys += extend_keys(self.keys[-1], self.tokens[hashed:], block_size)
        return self.keys[first + 1 : end + 1]

    @property
    def num_skippable(self) -> int:
        """Rows that need not be computed if they are cached.

        All but the last, whose logits give the next token; if the prompt's own logprobs are asked for, only
        those whose logprob has been reported.
        """
        if self.request.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1:
            return self.num_prompt_logprobs
        return len(self.tokens) - 1

    def admit(
        self, holding: Holding, resume: Resume, block_size: int, *, first_token: int, may_share: bool
    ) -> None:
        self.holding = holding
        self.resume = resume
        self.num_shared_blocks = resume.boundary
        self.may_share, self.is_new_to_runner, self.is_outdated = may_share, True, False
        self.num_planned = self.num_computed = first_token
        self.num_promised = 0
        if not self.was_admitted:
            places = [self.fetched.get(key) for key in self.keys[1 : resume.start + 1]]
            self.cached_tokens = tokens_by_place(places, block_size, first_token)

    def has_same_tokens(self, other: "Sequence") -> bool:
        """Whether it can be forked from the other: of one prompt, and of the same answer so far, if any."""
        return (
            self.request.group is not None
            and self.request.group == other.request.group
            and self.request.cache_salt == other.request.cache_salt
            and self.num_drawing == 0
            and self.num_prompt_logprobs >= other.request.num_prompt_logprobs
            and self.tokens == other.tokens
        )

    def fork(self, parent: "Sequence", holding: Holding) -> None:
        """Go on with what the parent has as of its last step, in which both draw."""
        self.holding = holding
        self.keys = list(parent.keys)
        self.resume = parent.resume
        self.may_share, self.is_new_to_runner, self.is_outdated = parent.may_share, False, False
        self.num_shared_blocks = parent.num_shared_blocks
        self.num_planned, self.num_computed = parent.num_planned, parent.num_computed
        self.num_drawing, self.last_step = 1, parent.last_step
        self.num_promised = 0
        self.inherited_logprobs = tuple(
            parent.prompt_logprobs[self.num_prompt_logprobs - parent.request.num_prompt_logprobs :]
        )
        self.num_prompt_logprobs += len(self.inherited_logprobs)
        if not self.was_admitted:
            self.cached_tokens = parent.cached_tokens

    def give_up(self) -> Holding:
        """Lose all progress, and what it owns."""
        holding, self.holding = self.holding, Holding()
        self.num_planned = self.num_computed = self.num_shared_blocks = self.num_drafts = 0
        self.resume, self.restore, self.passing_state, self.lookup = Resume(), (), None, None
        return holding

    def append(self, token: int) -> FinishReason | None:
        """Take a drawn token; why the sequence ends with it, if it does."""
        self.tokens.append(token)
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= self.request.max_tokens else None

    def wanted_prompt_logprobs(self, start: int, end: int) -> int | None:
        """What a step over rows start..end - 1 must report of them, if any still is to be reported."""
        wanted = max(start, self.num_prompt_logprobs) < min(end, self.num_prompt - 1)
        return self.request.prompt_logprobs if wanted else None

    def take_prompt_logprobs(
        self, start: int, computed: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Of what rows start, start + 1, ... gave, the part that is the prompt's and not reported yet."""
        new = computed[self.num_prompt_logprobs - start : self.num_prompt - 1 - start] if computed else ()
        self.num_prompt_logprobs += len(new)
        said, self.inherited_logprobs = self.inherited_logprobs + new, ()
        if self.request.group is not None:
            self.prompt_logprobs += said
        return said
