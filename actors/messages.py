"""What crosses a process boundary: frozen data that the rooms share, and nothing else.

client ─HTTP─▶ ingress ──place()──▶ router
                 │  ▲                  ▲
    EngineRequest│  │TokenBatch        │EngineReport
                 ▼  │                  │
                engine ────────────────┘
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.messages import Extent, StoredEntry, StoreId, StoreInfo, StoreReport, StoreSnapshot

# What stores say is defined in their own room, which may not look into this one.
__all__ = ["Extent", "StoreId", "StoreInfo", "StoreReport", "StoreSnapshot", "StoredEntry"]

EngineId = NewType("EngineId", str)
IngressId = NewType("IngressId", str)
RequestId = NewType("RequestId", str)
DeploymentId = NewType("DeploymentId", str)
"""One model as one set of engines computes it, all of them to the same bits."""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token, or (decided by the ingress) a stop string."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(StrEnum):
    """Why a request has no (further) output, in terms of what its client may do about it."""

    INVALID = "invalid_request"
    """No engine of this model can compute the request: 400."""
    NEVER_FITS = "never_fits"
    """The request exceeds what this engine can ever hold: 400."""
    OVERLOADED = "overloaded"
    """The engine's queue is full: 503, may be sent again."""
    INTERNAL = "internal"
    """The engine failed while it computed: 500."""
    ENGINE_LOST = "engine_lost"
    """The engine's process is gone, hung or was removed: 503, may be sent again."""
    NO_ENGINE = "no_engine"
    """No engine is ready: 503, may be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. The seed is fixed on arrival, so every attempt draws the same tokens."""

    temperature: float = 1.0
    """>= 0; 0 is greedy"""
    top_k: int = 0
    """0 keeps every token; at most 2**31 - 1"""
    top_p: float = 1.0
    """in (0, 1]"""
    min_p: float = 0.0
    """in [0, 1]: drops tokens less likely than this share of the likeliest"""
    seed: int = 0
    """signed 64 bit"""
    presence_penalty: float = 0.0
    """taken once from the logit of every token of the output so far"""
    frequency_penalty: float = 0.0
    """taken from it as often as the token was drawn"""
    repetition_penalty: float = 1.0
    """> 0; divides the positive logits of prompt and output tokens, multiplies the negative ones"""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once"""
    min_tokens: int = 0
    """No stop token is drawn before the output has so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A store that has blocks first, first + 1, ..., end - 1 of a prompt, none if they are equal."""

    store_id: StoreId
    first: int
    end: int
    segments: tuple[int, ...] = ()
    """Blocks whose segments it has: within that range, or beside it if the range is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """How many tokens of a prompt were not computed for it, by where they were found."""

    device: int = 0
    own_store: int = 0
    """The engine's own node's."""
    other_store: int = 0

    @property
    def total(self) -> int:
        return self.device + self.own_store + self.other_store

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            device=self.device + other.device,
            own_store=self.own_store + other.own_store,
            other_store=self.other_store + other.other_store,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One attempt at one request, complete in itself: any engine of the model can serve it."""

    request_id: RequestId
    attempt: int
    """Counts from 1. An engine that hung and revived speaks under its old attempt and is not heard."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Of the whole answer, what earlier attempts have drawn included."""
    stop_token_ids: frozenset[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None
    """So many of the likeliest tokens are reported beside each drawn one; 0 reports the drawn ones only."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed in full: no cached prefix is used."""
    cache_salt: str = ""
    """Only requests of one salt share cached prefixes. Made of the tenant and of the client's own salt."""
    priority: int = 0
    """Lower is sooner. Of equal ones those that have begun go first, the others by arrival."""
    sources: tuple[PrefixSource, ...] = ()
    """Where the router believes the prompt's blocks to be, beside the engine's own device."""
    output_token_ids: tuple[int, ...] = ()
    """What earlier attempts have drawn and were heard of. It is computed like a prompt, and counts as output:
    the answer goes on behind it, drawn as if there had been one attempt. None of it is said again,"""
    num_prompt_logprobs: int = 0
    """nor are so many of the prompt's logprobs."""
    group: RequestId | None = None
    """The choices of one prompt have the same. They differ only in how they are drawn, and an engine that has
    several of them computes the prompt once."""

    @property
    def prompt_id(self) -> RequestId:
        """The same of all choices of one prompt."""
        return self.group or self.request_id

    @property
    def has_begun(self) -> bool:
        """Something of the answer was heard of an earlier attempt: its client waits for the rest of it."""
        return bool(self.output_token_ids or self.num_prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """That are there from the beginning."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of the model's own distribution, before temperature, penalties and bias."""

    logprob: float
    """Of the token that was drawn, or that the prompt has here."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request, in order; the last chunk carries why it ended.

    When an engine finishes with STOP, the last token is the stop token: counted in usage, never shown.
    """

    request_id: RequestId
    attempt: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of token_ids if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens from the second on, in pieces as they are computed: the first has none."""
    cached_tokens: CachedTokens | None = None
    """In the attempt's first chunk with a token."""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    """Set exactly when finish_reason is ERROR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All that one engine step says to one ingress: one item of their multiplexed stream, which an empty one
    opens."""

    chunks: tuple[TokenChunk, ...]
    store_id: StoreId | None = None
    """Where the engine saves what it computes: whoever outlives it finds that there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What the router must know to place one attempt."""

    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    """Of all that is to be computed before the attempt's first token: what earlier ones have drawn is too."""
    block_keys: tuple[BlockKey, ...] = ()
    """Of the complete blocks of these tokens, in order."""
    exclude: frozenset[EngineId] = frozenset()
    """Engines that this request has already failed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """An engine's own account of its work and of the prefixes it holds, pushed to the router in batches."""

    engine_id: EngineId
    sequence: int
    """Grows by one a report, so that a lost one is noticed: the prefixes are then asked for as a whole."""
    num_requests: int
    uncomputed_tokens: int
    """Of all its requests' prompts: work that stands before a new one's first token."""
    tokens_per_s: float
    """How fast it lately computed prompts; 0 before the first."""
    own_fetch_tokens_per_s: float = 0.0
    """How fast it fetches from its own node's store, by its own measure; 0 if it cannot tell."""
    other_fetch_tokens_per_s: float = 0.0
    """The same of other nodes' stores."""
    received: tuple[tuple[RequestId, int], ...]
    """(request, attempt) pairs that arrived since the report before; the router drops its notes of them."""
    stored: tuple[BlockKey, ...] = ()
    """Blocks that became a cached prefix since the report before, parents first,"""
    removed: tuple[BlockKey, ...] = ()
    """and those that were evicted. A key is in at most one of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSnapshot:
    """All the prefixes an engine held when it made its report `sequence`."""

    engine_id: EngineId
    sequence: int
    block_keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReply:
    """Where a request goes, where its prefix can be had, and what the choice went by."""

    engine_id: EngineId
    sources: tuple[PrefixSource, ...] = ()
    hit_tokens: int = 0
    """What the engine is believed to find of the prefix, on its device or in stores."""
    is_up_to_date: bool = True
    """Every engine's and every store's reports are followed: what was not found is nowhere."""
    fingerprints: frozenset[bytes] = frozenset()
    """Of all engines: block keys below one say nothing of what engines of another have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the front door must know of the served model."""

    name: str
    checkpoint: str
    """A directory on every node that runs an ingress, or what whoever made the ingress lets it get one by."""
    max_model_len: int
    """Prompt and output together, in tokens."""
    block_size: int
    """Tokens a block key covers."""
    fingerprint: bytes
    """What computed keys and values depend on beside the tokens: names the root of all block keys."""
    max_num_seqs: int = 0
    """Sequences that each of its engines runs at once. 0 is "not told"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCard:
    """What an ingress is told of a model as it is served now."""

    deployment_id: DeploymentId
    model: ModelCard
    """Without a fingerprint while no engine has said its own: then prompts have no block keys."""
    weight: int
    """Its share of the requests, beside others that are served under the same name."""
    draining: frozenset[EngineId] = frozenset()
    """Engines that finish what they have, and take nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a ready engine says of itself, for people."""

    engine_id: EngineId
    node: str
    backend: str
    memory: str
    fingerprint: bytes
    """The root of its block keys; what the ingresses ask for must be named below the same."""
    content: bytes = b""
    """Of the checkpoint's configuration and weights, wherever and by which kernels it computes with them."""
    rule: BoundaryRule = field(default_factory=BoundaryRule)
    """What it needs beside blocks to take up a prefix."""
    block_bytes: int = 0
    segment_bytes: int = 0
    """What a block and a state segment take."""
    took_s: tuple[tuple[str, float], ...] = ()
    """(phase, seconds) of its start, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What has come of guesses of next tokens."""

    num_drafts: int = 0
    """Runs of guesses, each verified by one step."""
    num_tokens: int = 0
    num_accepted: int = 0
    """Of these tokens, those that were right and used: so many steps of one token each were saved."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            num_drafts=self.num_drafts + other.num_drafts,
            num_tokens=self.num_tokens + other.num_tokens,
            num_accepted=self.num_accepted + other.num_accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Answers a ping. An engine whose step hangs still answers, and says so."""

    num_requests: int
    """Running and waiting."""
    stalled: bool
    uncomputed_tokens: int = 0
    """Of their prompts."""
    tokens_per_s: float = 0.0
    """How fast it lately computed prompts; 0 before the first."""
    drafts: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an ingress's requests do on an engine."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """Of the engine: the share of its blocks that sequences use, anybody's, from 0 to 1."""
    drafts: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and how an ingress listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    api_key_hash: str | None = field(default=None, repr=False)
    """Of one key that all clients share. Keys themselves would lie in whatever Ray keeps its actors in."""
    api_keys: str | None = None
    """A file of keys with tenants and limits; absolute, on the ingress's node, read again when it changes."""
    admin_key_hash: str | None = field(default=None, repr=False)
    ssl_certfile: str | None = None
    """With the chain that verifies it; absolute, on the ingress's node, read again on change."""
    ssl_keyfile: str | None = None
    """None: in ssl_certfile too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressAccount:
    """What an ingress answers when it is told who exists."""

    can_place: frozenset[DeploymentId]
    """Of these it knows an engine to place on, and can read what clients write."""
    unread: Mapping[DeploymentId, str]
    """Whose tokenizers it could not read, and why. It tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressInfo:
    ingress_id: IngressId
    url: str
    node: str = ""
