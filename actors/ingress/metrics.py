"""What this ingress counts and times. Each application has its registry, so a process exports each name once.

Labels are bounded: routes, statuses and error codes are ours, never what a client sent.
"""

from dataclasses import fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.protocol import Finish, Usage
from shoal.actors.messages import CachedTokens

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
_NEXT_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
PLACES = tuple(field.name for field in fields(CachedTokens))
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "shoal_http_requests",
            "HTTP requests by route and status; a stream that failed after its beginning has status 200.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._duration = Histogram(
            "shoal_http_request_duration_seconds",
            "From the arrival of a request to the end of its answer.",
            ["endpoint"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.in_flight = Gauge("shoal_http_requests_in_flight", "Open HTTP requests.", registry=registry)
        self.sequence_slots = Gauge(
            "shoal_sequence_slots",
            "Sequences that all engines together run at once: more requests than that wait.",
            registry=registry,
        )
        self._errors = Counter(
            "shoal_request_errors",
            "Failures of the service by code, also inside of streams: overloaded, no_engine, timeout, ...",
            ["code"],
            registry=registry,
        )
        self._finished = Counter(
            "shoal_choices_finished", "Answers that were complete, by reason.", ["reason"], registry=registry
        )
        self._blind_placements = Counter(
            "shoal_blind_placements",
            "Placements that may have overlooked a prefix, by reason.",
            ["reason"],
            registry=registry,
        )
        for by in filter(lambda by: by.is_blind, PlacedBy):
            self._blind_placements.labels(by.value)
        self._continuations = Counter(
            "shoal_continuations",
            "Answers that had begun and went on on another engine, each time.",
            registry=registry,
        )
        self._recomputed_tokens = Counter(
            "shoal_recomputed_tokens",
            "Of prompt and answer, what was computed again when one went on.",
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "shoal_prompt_tokens",
            "Tokens of prompts that have had a first token of an answer, cached ones included.",
            registry=registry,
        )
        self._cached_tokens = Counter(
            "shoal_cached_prompt_tokens",
            "Tokens of prompts that were not computed again, by where they were found.",
            ["place"],
            registry=registry,
        )
        for place in PLACES:  # shown from the start, so that a rate misses nothing
            self._cached_tokens.labels(place)
        self._completion_tokens = Counter(
            "shoal_completion_tokens", "Tokens of answers, as in usage.", registry=registry
        )
        self.first_token = Histogram(
            "shoal_time_to_first_token_seconds",
            "From the arrival of a request to a choice's first token, tokenizing included.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.next_token = Histogram(
            "shoal_inter_token_latency_seconds",
            "Between two chunks of tokens, divided by the tokens of the second.",
            buckets=_NEXT_TOKEN_S,
            registry=registry,
        )

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def count_request(self, endpoint: str, status: int, duration_s: float) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def count_finished(self, reason: Finish) -> None:
        self._finished.labels(reason).inc()

    def count_placement(self, by: PlacedBy) -> None:
        if by.is_blind:
            self._blind_placements.labels(by.value).inc()

    def count_continuation(self, num_recomputed_tokens: int) -> None:
        self._continuations.inc()
        self._recomputed_tokens.inc(num_recomputed_tokens)

    def count_tokens(self, usage: Usage) -> None:
        self._prompt_tokens.inc(usage.prompt_tokens)
        for place in PLACES:
            self._cached_tokens.labels(place).inc(getattr(usage.cached_tokens_by_place, place))
        self._completion_tokens.inc(usage.completion_tokens)


class ChoiceMeter:
    """What is timed and counted of one choice while it is answered."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._last = arrived
        self._is_first = True

    def saw(self, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if self._is_first:
            self._metrics.first_token.observe(now - self._last)
        else:
            self._metrics.next_token.observe((now - self._last) / num_tokens)
        self._is_first = False
        self._last = now

    def went_on(self, num_computed_tokens: int) -> None:
        """Another engine has taken it up; of prompt and answer it had to compute so many again."""
        self._metrics.count_continuation(num_computed_tokens)
