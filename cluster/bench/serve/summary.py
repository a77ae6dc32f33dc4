"""What the records of a run say. Plain: numbers in, numbers out."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from shoal.cluster.bench.serve.client import Failure, Reply
from shoal.cluster.bench.serve.load import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """None of nothing: an absent latency is not a latency of 0."""
        array = np.fromiter(values, float)
        if not array.size:
            return None
        p50, p90, p99 = np.percentile(array, (50, 90, 99))
        return cls(
            count=int(array.size),
            mean=float(array.mean()),
            p50=float(p50),
            p90=float(p90),
            p99=float(p99),
            max=float(array.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FullLoad:
    """The part of a closed loop in which every client had a reply running or was about to ask again.

    It begins when the last client has its first token and ends when the first has no more to ask, without
    ramp and tail. With as many requests as clients it is pure decode of the whole batch.
    """

    duration_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of completed requests; the failed are only counted. `None` is "not reported" or "does not apply"."""

    duration_s: float
    """From the start to the last end of a request."""
    planned: int | None
    sent: int
    completed: int
    failed: int
    unfinished: int
    """Sent, and not answered when the run was interrupted."""
    failures: dict[str, FailureCount]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    tokens_counted_by: Literal["usage", "events", "both"]
    """Where a server reports no usage, an event that carries text counts as one token."""
    tokens_per_event: float | None
    full_load: FullLoad | None
    ttft_s: Distribution | None
    """From when a request was due to its first text."""
    itl_s: Distribution | None
    """Between one event that carries text and the next, over all replies."""
    tpot_s: Distribution | None
    """(last text - first text) / (output tokens - 1), a value a reply."""
    e2e_s: Distribution | None
    """From when a request was due to the end of its stream."""
    late_s: Distribution | None
    """From when a request was due to when it was sent: what this client itself held up."""
    input_tokens_per_request: Distribution | None
    output_tokens_per_request: Distribution | None
    cached_tokens_per_request: Distribution | None


Completed = tuple[Record, Reply]


def completed(records: Iterable[Record]) -> list[Completed]:
    return [(record, record.outcome) for record in records if isinstance(record.outcome, Reply)]


def output_tokens(reply: Reply) -> int:
    return reply.usage.output_tokens if reply.usage else len(reply.text_at)


def summarize(
    records: Sequence[Record],
    *,
    started_at: float,
    num_sent: int,
    planned: int | None = None,
    num_clients: int | None = None,
) -> Summary:
    """`num_clients` of a closed loop."""
    done = completed(records)
    replies = [reply for _, reply in done]
    usages = [reply.usage for reply in replies if reply.usage]
    whole = bool(usages) and len(usages) == len(replies)
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    total_in = sum(usage.input_tokens for usage in usages) if whole else None
    total_out = sum(map(output_tokens, replies))
    num_events = sum(len(reply.text_at) for reply in replies)
    duration_s = max((record.outcome.ended_at for record in records), default=started_at) - started_at
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        duration_s=duration_s,
        planned=planned,
        sent=num_sent,
        completed=len(done),
        failed=len(records) - len(done),
        unfinished=num_sent - len(records),
        failures=_failures(records),
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=total_out * per_s,
        total_tokens_per_s=None if total_in is None else (total_in + total_out) * per_s,
        input_tokens=total_in,
        output_tokens=total_out,
        cached_tokens=sum(cached) if cached else None,
        tokens_counted_by="usage" if whole else "both" if usages else "events",
        tokens_per_event=total_out / num_events if num_events else None,
        full_load=None if num_clients is None else _full_load(done, num_clients),
        ttft_s=Distribution.of(reply.text_at[0] - record.due_at for record, reply in done if reply.text_at),
        itl_s=Distribution.of(inter_token_s(replies)),
        tpot_s=Distribution.of(_tpot_s(replies)),
        e2e_s=Distribution.of(reply.ended_at - record.due_at for record, reply in done),
        late_s=Distribution.of(record.sent_at - record.due_at for record in records),
        input_tokens_per_request=Distribution.of(usage.input_tokens for usage in usages),
        output_tokens_per_request=Distribution.of(map(output_tokens, replies)),
        cached_tokens_per_request=Distribution.of(cached),
    )


def inter_token_s(replies: Iterable[Reply]) -> Iterable[float]:
    return (later - earlier for reply in replies for earlier, later in pairwise(reply.text_at))


def token_times(reply: Reply) -> Iterable[tuple[float, float]]:
    """(when, how many): which event carried which tokens is not told, so each carries an equal share."""
    share = output_tokens(reply) / len(reply.text_at) if reply.text_at else 0.0
    return ((at, share) for at in reply.text_at)


def _tpot_s(replies: Iterable[Reply]) -> Iterable[float]:
    for reply in replies:
        if len(reply.text_at) > 1 and (tokens := output_tokens(reply)) > 1:
            yield (reply.text_at[-1] - reply.text_at[0]) / (tokens - 1)


def _failures(records: Iterable[Record]) -> dict[str, FailureCount]:
    messages = defaultdict[str, list[str]](list)
    for record in records:
        if isinstance(record.outcome, Failure):
            messages[record.outcome.kind].append(record.outcome.message)
    return {kind: FailureCount(count=len(said), example=said[0]) for kind, said in sorted(messages.items())}


def _full_load(done: Sequence[Completed], num_clients: int) -> FullLoad | None:
    first_text, last_end = dict[int | None, float](), dict[int | None, float]()
    for record, reply in done:
        if reply.text_at:
            first_text.setdefault(record.client, reply.text_at[0])
            last_end[record.client] = reply.ended_at
    if len(first_text) < num_clients:
        return None
    begin, end = max(first_text.values()), min(last_end.values())
    if begin >= end:
        return None
    tokens = sum(share for _, reply in done for at, share in token_times(reply) if begin < at <= end)
    return FullLoad(duration_s=end - begin, output_tokens_per_s=tokens / (end - begin))
