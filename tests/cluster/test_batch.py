"""Batches on real engines: killed and taken up again they end as if nothing had happened."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray.util import list_named_actors

from tests.cluster.batched import Batch
from tests.cluster.chaos import metric
from tests.cluster.served import Served, wait_for
from tests.cluster_unit.batches import answers, line, write_input

BLOCK = 16
PREFIX_TOKENS = 6 * BLOCK
GROUPS, EACH = 8, 8


def prompt(group: int, i: int) -> list[int]:
    """Token ids: what a prefix is must be known to the token."""
    return [10 + (group * 31 + k * 7) % 400 for k in range(PREFIX_TOKENS)] + [10 + i, 20 + group, 30 + i]


def lines() -> list[dict[str, Any]]:
    """Of the groups in turn, greedy and seeded."""
    return [
        line(f"{group}-{i}", prompt(group, i), max_tokens=24, ignore_eos=True, seed=i, temperature=i % 2)
        for i in range(EACH)
        for group in range(GROUPS)
    ]


def said(path: Path) -> dict[str, tuple[str, str, int]]:
    """(text, finish reason, tokens) by custom_id."""
    by_id = {}
    for answer in answers(path):
        assert answer["error"] is None, answer
        assert answer["custom_id"] not in by_id
        body = answer["response"]["body"]
        (choice,) = body["choices"]
        total = body["usage"]["total_tokens"]
        by_id[answer["custom_id"]] = (choice["text"], choice["finish_reason"], total)
    return by_id


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.jsonl", lines())


def test_killed_twice_it_ends_as_if_undisturbed(served: Served, source: Path, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed.jsonl", tmp_path / "disturbed.jsonl"
    assert Batch(source, undisturbed, "--url", served.url).run() == 0
    batch = Batch(source, disturbed, "--url", served.url, "--concurrency", "2", "--ordered")
    for num_answers in (12, 30):
        assert batch.run_until(num_answers) == -signal.SIGKILL
        before = disturbed.read_bytes()
        assert before.count(b"\n") < GROUPS * EACH
    assert batch.run() == 0, batch.output
    assert said(disturbed) == said(undisturbed)
    assert [answer["custom_id"] for answer in answers(disturbed)] == [each["custom_id"] for each in lines()]
    written = set(disturbed.read_bytes().splitlines())
    assert written >= set(before[: before.rindex(b"\n")].splitlines())  # none was asked again
    wait_for(served.is_clean, "what the killed ones had asked is gone")


def test_each_engine_computes_a_shared_prefix_once_at_most(served: Served, tmp_path: Path) -> None:
    salted = [each | {"body": each["body"] | {"cache_salt": "cold"}} for each in lines()]
    source, target = write_input(tmp_path / "in.jsonl", salted), tmp_path / "out.jsonl"
    batch = Batch(source, target, "--url", served.url)
    assert batch.run() == 0, batch.output
    computed: Counter[str] = Counter()
    for answer in answers(target):
        cached = answer["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        computed[answer["custom_id"].split("-")[0]] += cached < PREFIX_TOKENS
    assert set(computed) == {str(group) for group in range(GROUPS)}
    assert all(1 <= times <= 2 for times in computed.values()), computed


def test_the_door_says_how_many_sequences_run_at_once(served: Served) -> None:
    """By which a batch knows how many requests to keep open."""

    def slots() -> bool:
        return metric(served, "shoal_sequence_slots") == 16

    wait_for(slots, "two engines of eight")


def test_told_to_stop_it_says_what_is_left(served: Served, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    batch = Batch(source, target, "--url", served.url, "--concurrency", "1")
    assert batch.run_until(3, signal.SIGTERM) == 1
    assert "not asked or not answered: run again to go on" in batch.output
    assert "Traceback" not in batch.output
    assert 3 <= len(said(target)) < GROUPS * EACH


def test_in_a_cluster_of_its_own_killed_and_taken_up_again(
    ray_address: str, checkpoint: Path, source: Path, tmp_path: Path
) -> None:
    """What the killed one left holds the name, and 6 of 8 CPUs, until its lease runs out."""
    target = tmp_path / "out.jsonl"
    flags = ("--model", str(checkpoint), "--engines", "2", "--threads", "3", "--memory", "300MiB")
    more = ("--max-num-seqs", "2", "--block-size", "16", "--address", ray_address, "--json")
    batch = Batch(source, target, *flags, *more)
    assert batch.run_until(5) == -signal.SIGKILL
    assert batch.run() == 0, batch.output
    assert len(said(target)) == GROUPS * EACH
    summary = json.loads(next(each for each in batch.output.splitlines() if each.startswith("{")))
    assert summary["answered_before"] >= 5
    assert not [a for a in list_named_actors(all_namespaces=True) if a["namespace"].startswith("shoal-batch")]
