"""Records with times that can be added up in the head."""

import pytest

from shoal.cluster.bench.serve.client import Failure, Outcome, Reply, Usage
from shoal.cluster.bench.serve.load import Record
from shoal.cluster.bench.serve.summary import Distribution, FullLoad, Summary, summarize, token_times


def reply(text_at: list[float], ended_at: float, usage: Usage | None = None) -> Reply:
    return Reply(text="", text_at=tuple(text_at), ended_at=ended_at, usage=usage)


def record(outcome: Outcome, sent_at: float, client: int | None = 0, due_at: float | None = None) -> Record:
    return Record(
        session=0,
        turn=0,
        group=0,
        client=client,
        due_at=sent_at if due_at is None else due_at,
        sent_at=sent_at,
        output_len=4,
        outcome=outcome,
    )


def summary(*records: Record, unfinished: int = 0, num_clients: int | None = None) -> Summary:
    return summarize(records, started_at=10.0, num_sent=len(records) + unfinished, num_clients=num_clients)


def used(output_tokens: int, cached_tokens: int | None = None) -> Usage:
    return Usage(input_tokens=100, output_tokens=output_tokens, cached_tokens=cached_tokens)


def test_one_request() -> None:
    said = summary(record(reply([12.0, 13.0, 16.0], 17.0, used(3, cached_tokens=25)), sent_at=11.0))
    assert said.duration_s == 7.0
    assert said.requests_per_s == pytest.approx(1 / 7)
    assert said.output_tokens_per_s == pytest.approx(3 / 7)
    assert said.total_tokens_per_s == pytest.approx(103 / 7)
    assert said.ttft_s is not None and said.ttft_s.p50 == 1.0
    assert said.itl_s is not None and (said.itl_s.count, said.itl_s.mean, said.itl_s.max) == (2, 2.0, 3.0)
    assert said.tpot_s is not None and said.tpot_s.mean == 2.0
    assert said.e2e_s is not None and said.e2e_s.p99 == 6.0
    assert said.cached_tokens == 25
    assert said.tokens_counted_by == "usage"


def test_latency_counts_from_when_a_request_was_due() -> None:
    said = summary(record(reply([15.0], 16.0), sent_at=14.0, due_at=11.0))
    assert said.ttft_s is not None and said.ttft_s.mean == 4.0
    assert said.e2e_s is not None and said.e2e_s.mean == 5.0
    assert said.late_s is not None and said.late_s.mean == 3.0


def test_an_event_may_carry_several_tokens() -> None:
    answer = reply([12.0, 14.0], 14.0, used(5))
    said = summary(record(answer, sent_at=11.0))
    assert said.tokens_per_event == 2.5
    assert said.itl_s is not None and said.itl_s.mean == 2.0  # between events
    assert said.tpot_s is not None and said.tpot_s.mean == 0.5  # over tokens
    assert list(token_times(answer)) == [(12.0, 2.5), (14.0, 2.5)]


def test_without_usage_events_are_counted_and_nothing_is_said_of_prompts() -> None:
    said = summary(record(reply([12.0, 13.0], 13.0), sent_at=11.0))
    assert (said.tokens_counted_by, said.output_tokens) == ("events", 2)
    assert said.input_tokens is said.total_tokens_per_s is said.cached_tokens is None
    mixed = summary(
        record(reply([12.0], 13.0), sent_at=11.0), record(reply([12.0], 13.0, used(4)), sent_at=11.0)
    )
    assert (mixed.tokens_counted_by, mixed.output_tokens, mixed.input_tokens) == ("both", 5, None)


def test_failures_are_counted_by_kind_and_are_in_no_latency() -> None:
    said = summary(
        record(reply([12.0], 13.0), sent_at=11.0),
        record(Failure(kind="timeout", message="late", ended_at=20.0), sent_at=10.0),
        record(Failure(kind="http_503", message="busy", ended_at=11.0), sent_at=10.0),
        record(Failure(kind="http_503", message="also busy", ended_at=11.0), sent_at=10.0),
        unfinished=2,
    )
    assert (said.sent, said.completed, said.failed, said.unfinished) == (6, 1, 3, 2)
    assert {kind: (failure.count, failure.example) for kind, failure in said.failures.items()} == {
        "http_503": (2, "busy"),
        "timeout": (1, "late"),
    }
    assert said.duration_s == 10.0  # a request that timed out took its time too
    assert said.e2e_s is not None and said.e2e_s.count == 1


def test_nothing_at_all() -> None:
    said = summary()
    assert said.duration_s == said.requests_per_s == 0.0
    assert said.ttft_s is None


def test_a_reply_without_text_has_no_first_token() -> None:
    said = summary(record(reply([], 13.0, used(1)), sent_at=11.0))
    assert said.ttft_s is None
    assert said.e2e_s is not None
    assert said.output_tokens == 1


def test_full_load_is_from_the_last_first_token_to_the_first_last_end() -> None:
    said = summary(
        record(reply([11.0, 12.0, 13.0, 14.0], 14.0), sent_at=10.0, client=0),
        record(reply([12.0, 13.0, 14.0, 15.0], 15.0), sent_at=10.0, client=1),
        num_clients=2,
    )
    assert said.full_load == FullLoad(duration_s=2.0, output_tokens_per_s=2.0)


def test_full_load_bridges_the_requests_of_one_client() -> None:
    said = summary(
        record(reply([11.0], 12.0), sent_at=10.0, client=0),
        record(reply([13.0, 15.0], 16.0), sent_at=12.0, client=0),
        record(reply([12.0, 16.0], 17.0), sent_at=10.0, client=1),
        num_clients=2,
    )
    assert said.full_load == FullLoad(duration_s=4.0, output_tokens_per_s=0.75)


def test_no_full_load_in_an_open_loop_or_if_there_was_none() -> None:
    one, another = reply([11.0, 12.0], 12.0), reply([13.0], 14.0)
    assert summary(record(one, sent_at=10.0, client=None)).full_load is None
    assert summary(record(one, sent_at=10.0, client=0), num_clients=2).full_load is None
    one_after_the_other = record(one, sent_at=10.0, client=0), record(another, sent_at=10.0, client=1)
    assert summary(*one_after_the_other, num_clients=2).full_load is None
    assert summary(num_clients=2).full_load is None


def test_percentiles() -> None:
    assert Distribution.of(range(101)) == Distribution(count=101, mean=50, p50=50, p90=90, p99=99, max=100)
    assert Distribution.of([]) is None
