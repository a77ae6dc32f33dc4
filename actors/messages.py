"""What crosses a process boundary: frozen data that the rooms share, and nothing else.

client ─HTTP─▶ ingress ──place()──▶ router
                 │  ▲                  ▲
    EngineRequest│  │TokenBatch        │EngineLoad
                 ▼  │                  │
                engine ────────────────┘
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", str)
IngressId = NewType("IngressId", str)
RequestId = NewType("RequestId", str)


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
    seed: int = 0
    """signed 64 bit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One attempt at one request, complete in itself: any engine of the model can serve it."""

    request_id: RequestId
    attempt: int
    """Counts from 1. An engine that hung and revived speaks under its old attempt and is not heard."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request, in order; the last chunk carries why it ended.

    When an engine finishes with STOP, the last token is the stop token: counted in usage, never shown.
    """

    request_id: RequestId
    attempt: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    """Set exactly when finish_reason is ERROR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All that one engine step says to one ingress: one item of their multiplexed stream."""

    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    engine_id: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's own account of its work, pushed to the router when it changes."""

    engine_id: EngineId
    sequence: int
    """Grows by one a report, so that a late one is recognised."""
    num_requests: int
    received: tuple[tuple[RequestId, int], ...]
    """(request, attempt) pairs that arrived since the report before; the router drops its notes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the front door must know of the served model."""

    name: str
    checkpoint: str
    """A directory readable on every node that runs an ingress."""
    max_model_len: int
    """Prompt and output together, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a ready engine says of itself, for people."""

    engine_id: EngineId
    node: str
    backend: str
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Answers a ping. An engine whose step hangs still answers, and says so."""

    num_requests: int
    stalled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and how an ingress listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressInfo:
    ingress_id: IngressId
    url: str
