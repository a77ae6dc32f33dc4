"""What this ingress counts and times. Each application has its registry, so a process exports each name once.

Labels are bounded: routes, statuses and error codes are ours, never what a client sent. Series whose labels
are known are shown from the start, so that a rate misses nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.errors import STOPPING, TIMED_OUT, Limit
from shoal.actors.ingress.protocol import Finish, Usage
from shoal.actors.ingress.vllm_names import VllmNames
from shoal.actors.messages import CachedTokens, EngineId, EngineLoad, ErrorKind
from shoal.kvstore.families import build_info, signs_of_life

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
_NEXT_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
PLACES = tuple(field.name for field in fields(CachedTokens))
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
ERRORS = (
    ErrorKind.OVERLOADED,
    ErrorKind.INTERNAL,
    ErrorKind.ENGINE_LOST,
    ErrorKind.NO_ENGINE,
    STOPPING,
    TIMED_OUT,
)


RELOADED = ("api_keys", "certificate")


class Outcome(StrEnum):
    """Of a request for an answer."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """What was asked for is wrong, or not allowed: 4xx."""
    OVERLOADED = "overloaded"
    FAILED = "failed"
    """Any other failure of the service, also in a stream that had begun with a 200."""
    ABANDONED = "abandoned"
    """Its client left."""


class Metrics:
    """Of the process; `of` has what is counted of one model's answers."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._registry = registry = CollectorRegistry()
        self._outcomes = Counter(
            "shoal_requests", "Requests for answers, by how they ended.", ["outcome"], registry=registry
        )
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
        self._errors = Counter(
            "shoal_request_errors",
            "Failures of the service by code, also inside of streams: overloaded, no_engine, timeout, ...",
            ["code"],
            registry=registry,
        )
        self._rate_limited = Counter(
            "shoal_rate_limited", "Requests refused for their key's limits.", ["limit"], registry=registry
        )
        for limit in get_args(Limit):
            self._rate_limited.labels(limit)
        self._reloads = Counter(
            "shoal_file_reloads",
            "Files that changed and were read again; of one that is refused what was before stays.",
            ["file", "outcome"],
            registry=registry,
        )
        _show_from_the_start((self._outcomes, Outcome), (self._errors, ERRORS))
        for file in RELOADED:
            for outcome in ("read", "refused"):
                self._reloads.labels(file, outcome)

    def of(self, model_name: str) -> "ModelMetrics":
        """Of one that is served here: there are only so many."""
        if model_name not in self._models:
            self._models[model_name] = ModelMetrics()
        return self._models[model_name]

    def set_sequence_slots(self, by_model: Mapping[str, int]) -> None:
        """A model that is served no longer has none."""
        for model_name in self._models.keys() | by_model.keys():
            self.of(model_name).sequence_slots.set(by_model.get(model_name, 0))

    def exposition(self, loads: Mapping[str, Mapping[EngineId, EngineLoad]]) -> bytes:
        """For Prometheus, with what engines say of this ingress's requests, by model."""
        aliases = VllmNames(self._of_models(), loads)
        sources = (self._registry, _Families(self._of_models()), _BuildInfo(), aliases)
        return b"".join(generate_latest(source) for source in sources)

    def families(self) -> Iterator[Metric]:
        """For Ray."""
        yield from signs_of_life("ingress")
        yield from self._registry.collect()
        yield from self._of_models()

    def _of_models(self) -> list[Metric]:
        """A family each, with a series for every model."""
        merged: dict[str, Metric] = {}
        for model_name, counted in self._models.items():
            for family in counted.registry.collect():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {"model_name": model_name, **sample.labels}, sample.value)
        return list(merged.values())

    def count_outcome(self, outcome: Outcome) -> None:
        self._outcomes.labels(outcome.value).inc()

    def count_request(self, endpoint: str, status: int, duration_s: float) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(duration_s)

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def count_rate_limited(self, limit: Limit) -> None:
        self._rate_limited.labels(limit).inc()

    def count_reload(self, file: str, *, succeeded: bool) -> None:
        self._reloads.labels(file, "read" if succeeded else "refused").inc()


class ModelMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.sequence_slots = Gauge(
            "shoal_sequence_slots",
            "Sequences that all engines together run at once: more requests than that wait.",
            registry=registry,
        )
        self._finished = Counter(
            "shoal_choices_finished", "Answers that were complete, by reason.", ["reason"], registry=registry
        )
        self._placements = Counter(
            "shoal_placements",
            "Attempts that got an engine, by what the choice went by: prefix or load, or blindly (no_keys, "
            "stale_index, router_away), so that a prefix may have been overlooked.",
            ["by"],
            registry=registry,
        )
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
        self._answer = Histogram(
            "shoal_e2e_request_latency_seconds",
            "From the arrival of a request to the last token of a choice that was completed.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._prompt_lengths = Histogram(
            "shoal_request_prompt_tokens",
            "Tokens of the prompt of a choice that was completed.",
            buckets=_TOKENS,
            registry=registry,
        )
        self._completion_lengths = Histogram(
            "shoal_request_generation_tokens",
            "Tokens of a choice that was completed.",
            buckets=_TOKENS,
            registry=registry,
        )
        _show_from_the_start(
            (self._finished, get_args(Finish)), (self._placements, PlacedBy), (self._cached_tokens, PLACES)
        )

    def count_finished(self, reason: Finish, usage: Usage, duration_s: float) -> None:
        """Of one choice."""
        self._finished.labels(reason).inc()
        self._answer.observe(duration_s)
        self._prompt_lengths.observe(usage.prompt_tokens)
        self._completion_lengths.observe(usage.completion_tokens)

    def count_placement(self, by: PlacedBy) -> None:
        self._placements.labels(by.value).inc()

    def count_continuation(self, num_recomputed_tokens: int) -> None:
        self._continuations.inc()
        self._recomputed_tokens.inc(num_recomputed_tokens)

    def count_tokens(self, usage: Usage) -> None:
        self._prompt_tokens.inc(usage.prompt_tokens)
        for place in PLACES:
            self._cached_tokens.labels(place).inc(getattr(usage.cached_tokens_by_place, place))
        self._completion_tokens.inc(usage.completion_tokens)


def _show_from_the_start(*counters: tuple[Counter, Iterable[str]]) -> None:
    for counter, labels in counters:
        for label in labels:
            counter.labels(str(label))


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class _BuildInfo:
    def collect(self) -> Iterator[Metric]:
        yield build_info("ingress")


class ChoiceMeter:
    """What is timed and counted of one choice while it is answered."""

    def __init__(self, metrics: ModelMetrics, arrived: float) -> None:
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
