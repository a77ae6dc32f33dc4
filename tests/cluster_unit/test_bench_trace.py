"""A trace on simulated engines: worked examples of each part, then whole days of traffic."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.bench.trace.compute import Compute
from shoal.cluster.bench.trace.config import REPORT_INTERVAL_S, EngineSpeed, Link, TraceConfig
from shoal.cluster.bench.trace.outcome import Outcome, percentile
from shoal.cluster.bench.trace.replay import Replay
from shoal.cluster.bench.trace.schedule import Change, Event, read_schedule
from shoal.cluster.bench.trace.traces import TracedRequest, at_rate, one_cache_hit_tokens, read_trace
from shoal.cluster.cli import app
from shoal.kvstore import reporter
from shoal.kvstore.block_hash import extend_keys, root_key

BLOCK = 64
CHANGES: tuple[Change, ...] = ("join", "die", "drain")
SPEED = EngineSpeed(
    prefill_tokens_per_s=1000.0, step_s=0.01, row_s=0.0, context_token_s=0.0, chunk_tokens=1000
)
UNBOUNDED = TraceConfig(
    num_engines=4,
    block_size=BLOCK,
    bytes_per_token=1000,
    num_blocks=None,
    num_store_blocks=0,
    speed=replace(SPEED, prefill_tokens_per_s=2000.0),
)


def request(at_s: float, prompt: list[int], num_output: int = 1) -> TracedRequest:
    keys = tuple(extend_keys(root_key(b"model", ""), prompt, BLOCK))
    return TracedRequest(
        arrives_s=at_s, num_prompt_tokens=len(prompt), num_output_tokens=num_output, block_keys=keys
    )


def conversations(num_conversations: int, rng: Random) -> list[TracedRequest]:
    """Each has a system prompt that many share, and some turns that come minutes apart."""
    requests = []
    for number in range(num_conversations):
        prompt = [rng.randrange(3)] * 500
        at_s = rng.uniform(0, 600)
        for turn in range(rng.randint(1, 6)):
            prompt = prompt + [number * 100 + turn + 10] * rng.randint(50, 1500)
            requests.append(request(at_s, prompt, 100))
            at_s += rng.uniform(5, 120)
    return sorted(requests, key=lambda request: request.arrives_s)


def replay(requests: list[TracedRequest], config: TraceConfig, *schedule: Event) -> Outcome:
    """All blocks are accounted for afterwards."""
    run = Replay(requests, config, schedule)
    outcome = run.run()
    run.check()
    return outcome


# Traces


def test_a_line_is_a_request_and_an_id_a_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 130, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 192, "output_length": 0, "hash_ids": [7, 8, 10]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path, BLOCK)
    assert (second.arrives_s, second.num_prompt_tokens, second.num_output_tokens) == (1.5, 192, 1)
    assert len(first.block_keys) == 2, "the last block of 2 tokens is not complete"
    assert first.block_keys == second.block_keys[:2]
    assert second.num_skippable(BLOCK) == 2, "the last token is computed in any case"
    assert one_cache_hit_tokens([first, second], BLOCK) == 128
    assert [r.arrives_s for r in at_rate([first, second], 3.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "line 2: no 'hash_ids'"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 2: a length"),
        ('{"timestamp": 0, "input_length": 128, "output_length": 1, "hash_ids": [1]}', "1 hash_ids for 2"),
        ('{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [-1]}', "line 2: can't"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match=r"trace\.jsonl") as error:
        read_trace(path, BLOCK)
    assert message in str(error.value)


# Engines


def test_a_prompt_takes_its_tokens_by_the_speed_and_a_short_one_a_step() -> None:
    compute: Compute[str] = Compute(SPEED)
    compute.compute("long", 2500, 10.0)
    assert compute.next_at() == 12.5
    assert compute.take_ended(12.5) == ("long", None)
    compute.compute("short", 1, 12.5)
    assert compute.next_at() == 12.51
    compute.take_ended(12.51)
    assert compute.next_at() is None


def test_drawing_goes_on_beside_a_prompt_at_a_token_a_chunk() -> None:
    compute: Compute[str] = Compute(SPEED)
    compute.draw("a", 100, 0, 0.0)
    assert compute.next_at() == pytest.approx(1.0)
    compute.compute("prompt", 3000, 0.5)  # 50 tokens of a are left
    assert compute.next_at() == pytest.approx(3.5)
    assert compute.take_ended(3.5) == ("prompt", None)
    assert compute.left_to_draw("a", 3.5) == pytest.approx(47)
    assert compute.next_at() == pytest.approx(3.97)
    assert compute.take_ended(3.97) == (None, "a")


def test_rows_and_their_contexts_lengthen_every_step() -> None:
    compute: Compute[str] = Compute(replace(SPEED, row_s=0.005, context_token_s=1e-5))
    compute.draw("a", 10, 500 - 5, 0.0)
    compute.draw("b", 10, 500 - 5, 0.0)
    assert compute.next_at() == pytest.approx(10 * (0.01 + 2 * 0.005 + 1000 * 1e-5))


def test_one_request_alone() -> None:
    outcome = replay([request(5.0, [1] * 1000, 11)], replace(UNBOUNDED, speed=SPEED))
    (served,) = outcome.served
    assert [served.first_token_s, served.end_s] == pytest.approx([1.0, 1.1])
    assert (outcome.hits.total, outcome.of_ceiling) == (0, 1.0)


def test_a_prompt_that_comes_again_is_on_the_device_but_for_its_last_token() -> None:
    outcome = replay([request(0.0, [1] * 640), request(10.0, [1] * 640)], UNBOUNDED)
    assert outcome.hits.device == 576 == outcome.ceiling_tokens
    assert sum(engine.computed_tokens for engine in outcome.engines) == 640 + 64


# Stores


SMALL = replace(UNBOUNDED, num_engines=1, num_blocks=12, num_store_blocks=100)
"""A device of 12 blocks, on which the second prompt of 10 takes the first one's place."""

THREE = [request(0.0, [1] * 640), request(10.0, [2] * 640), request(20.0, [1] * 640)]


def test_what_the_device_had_to_evict_comes_back_from_its_nodes_store() -> None:
    outcome = replay(THREE, SMALL)
    assert (outcome.hits.device, outcome.hits.own_store) == (64, 512)
    assert replay(THREE, replace(SMALL, num_store_blocks=0)).hits.total == 64


def test_a_link_slower_than_break_even_is_not_used() -> None:
    assert SMALL.break_even_bytes_per_s == 2e6
    slow, fast = (
        replay(THREE, replace(SMALL, own_link=Link(bytes_per_s=speed, latency_s=0.0))).hits.own_store
        for speed in (1.9e6, 2.1e6)
    )
    assert (slow, fast) == (0, 512)


def test_what_another_engine_computed_comes_from_the_other_nodes_store() -> None:
    """The first engine has gone; its node's memory has not."""
    config = replace(UNBOUNDED, num_engines=2, engines_per_node=1, num_store_blocks=100)
    die = Event(at_s=10.0, change="die", engine=0)
    outcome = replay([request(0.0, [1] * 640), request(20.0, [1] * 640)], config, die)
    assert (outcome.hits.other_store, outcome.hits.total) == (576, 576)


def test_a_write_policy_decides_what_outlives_an_engine() -> None:
    """The prompt was seen once, and its turn had not ended."""
    config = replace(UNBOUNDED, num_engines=2, engines_per_node=1, num_store_blocks=100)
    die = Event(at_s=2.0, change="die", engine=0)
    one = [request(0.0, [1] * 641, 1000)]
    through = replay(one, config, die)
    selective = replay(one, replace(config, write_policy="write_through_selective"), die)
    assert through.engines[1].computed_tokens + 640 == selective.engines[1].computed_tokens


# Engines that come and go


def test_a_schedule_is_written_in_a_line_or_a_file(tmp_path: Path) -> None:
    events = (
        Event(at_s=10.0, change="die", engine=3),
        Event(at_s=600.0, change="join", count=2),
        Event(at_s=900.0, change="drain", engine=0),
    )
    assert read_schedule("600 join 2; 900 drain 0; 10 die 3") == events
    path = tmp_path / "schedule"
    path.write_text("600 join 2\n# later\n900 drain 0\n10 die 3\n")
    assert read_schedule(str(path)) == events
    assert read_schedule("") == ()


@pytest.mark.parametrize("text", ["600", "x join 2", "600 explode 1", "600 join 0", "-1 die 0", "1 die -1"])
def test_a_schedule_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--schedule: "):
        read_schedule(text)


def test_a_schedule_of_an_engine_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no engine 4, only 0 to 3"):
        Replay([request(0.0, [1] * 64)], UNBOUNDED, read_schedule("5 die 4; 6 join 1"))
    Replay([request(0.0, [1] * 64)], UNBOUNDED, read_schedule("5 join 1; 6 die 4"))


def test_54_requests_outlive_their_engine_and_draw_each_token_once() -> None:
    config = replace(UNBOUNDED, num_engines=2, speed=SPEED)
    die = Event(at_s=2.0, change="die", engine=0)
    outcome = replay([request(0.0, [1] * 1000, 201)], config, die)
    (served,) = outcome.served
    assert served.first_token_s == pytest.approx(1.0), "the first engine drew it"
    assert served.end_s == pytest.approx(2.0 + 1.101 + 0.01 * 99), "101 tokens were computed, 100 drawn"
    assert (served.attempts, outcome.num_replaced) == (2, 1)


def test_a_drained_engine_ends_what_it_has_and_gets_nothing_new() -> None:
    config = replace(UNBOUNDED, num_engines=2)
    drain = Event(at_s=0.5, change="drain", engine=0)
    requests = [request(0.0, [1] * 2000, 100), *(request(1.0 + i, [1] * 2000) for i in range(5))]
    outcome = replay(requests, config, drain)
    assert [engine.num_requests for engine in outcome.engines] == [1, 5]
    assert (outcome.num_replaced, len(outcome.served)) == (0, 6)


def test_requests_wait_for_an_engine_to_join_and_are_counted_if_none_does() -> None:
    config = replace(UNBOUNDED, num_engines=1)
    die, join = Event(at_s=1.0, change="die", engine=0), Event(at_s=5.0, change="join", count=1)
    served, unserved = (
        replay([request(2.0, [1] * 200)], config, *schedule) for schedule in ((die, join), (die,))
    )
    assert served.first_token_s(50) == pytest.approx(3.1)
    assert (unserved.num_unserved, unserved.served) == (1, ())


# Whole days


def test_hits_stay_near_those_of_one_cache_and_work_stays_even() -> None:
    outcome = replay(conversations(200, Random(1)), UNBOUNDED)
    assert outcome.of_ceiling >= 0.9 and outcome.work_imbalance <= 1.1, outcome


def test_with_stores_a_prefix_computed_anywhere_is_a_hit_everywhere() -> None:
    config = replace(UNBOUNDED, engines_per_node=2, num_store_blocks=None)
    outcome = replay(conversations(200, Random(1)), config)
    assert outcome.of_ceiling >= 0.99 and outcome.hits.own_store and outcome.hits.other_store, outcome


def test_the_cheapest_engine_is_better_than_what_knows_nothing_and_than_what_knows_only_prefixes() -> None:
    requests = conversations(150, Random(2))
    names: tuple[RoutingPolicyName, ...] = ("cost", "round_robin", "least_loaded", "greedy_prefix")
    cost, *others = (replay(requests, replace(UNBOUNDED, policy=name)) for name in names)
    assert all(cost.first_token_s(90) <= other.first_token_s(90) for other in others)
    assert cost.hits.total >= 1.5 * max(other.hits.total for other in others[:2])
    assert others[2].work_imbalance > 4 / 3, "three system prompts are on three engines of four"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_happens_every_request_is_answered_and_no_block_is_lost(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    config = replace(
        UNBOUNDED,
        num_engines=data.draw(st.integers(2, 4)),
        engines_per_node=data.draw(st.integers(1, 2)),
        num_blocks=data.draw(st.integers(160, 300)),
        num_store_blocks=data.draw(st.sampled_from((0, 20, 400))),
        write_policy=data.draw(st.sampled_from(("write_through", "write_through_selective", "write_back"))),
        policy=data.draw(st.sampled_from(("cost", "round_robin", "least_loaded", "greedy_prefix"))),
    )
    changes = data.draw(st.lists(st.sampled_from(CHANGES), max_size=6))
    schedule = [
        Event(at_s=100.0 * i, change=change, engine=i % config.num_engines)
        for i, change in enumerate(changes)
    ]
    requests = at_rate(conversations(15, Random(seed)), 2.0)
    outcome = replay(requests, config, *schedule, Event(at_s=1000.0, change="join"))
    assert len(outcome.served) == len(requests) and not outcome.num_unserved
    assert outcome.hits.total <= outcome.ceiling_tokens
    for request in outcome.served:
        assert 0 < request.first_token_s <= request.end_s


def test_the_same_trace_gives_the_same_outcome() -> None:
    requests = conversations(20, Random(3))
    first, second = (replay(requests, UNBOUNDED) for _ in range(2))
    assert first.served == second.served and first.engines == second.engines


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (51, 3), (75, 3), (100, 4), (0, 1)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([3.0, 1.0, 4.0, 2.0], percent) == value


def test_engines_report_as_often_as_real_ones() -> None:
    assert REPORT_INTERVAL_S == reporter.REPORT_INTERVAL_S


# The command


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "day.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1200, "output_length": 5, "hash_ids": [0, i % 5 + 1, i + 9]}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "trace", *arguments], env={"COLUMNS": "150"})
    assert result.exit_code in (0, 1), result.output
    return result.output


def test_all_policies_side_by_side_as_tables_json_and_a_picture(trace: Path, tmp_path: Path) -> None:
    json_file, picture = tmp_path / "out.json", tmp_path / "out.png"
    said = bench(
        str(trace),
        "--policy",
        "all",
        "--schedule",
        "2 die 1",
        "--json",
        str(json_file),
        "--plot",
        str(picture),
    )
    assert "break-even link speed 2.10 GB/s" in said
    document = json.loads(json_file.read_text())
    assert document["policies"].keys() == {"cost", "round_robin", "least_loaded", "greedy_prefix"}
    for outcome in document["policies"].values():
        assert outcome["requests"] == 40
        assert outcome["ttft_s"]["p50"] <= outcome["ttft_s"]["p90"] <= outcome["ttft_s"]["p99"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "2"], "--blocks 2: the longest request needs 3"),
        (["--rate", "0"], "--rate must be positive"),
        (["--schedule", "soon"], "--schedule: 'soon' is neither a file nor"),
        (["--block-size", "100"], "3 hash_ids for 12 complete blocks of 100 tokens"),
        (["--own-link", "0"], "a link needs a positive speed"),
    ],
)
def test_a_wrong_choice_is_one_line(trace: Path, arguments: list[str], message: str) -> None:
    said = bench(str(trace), *arguments)
    assert message in said and said.count("\n") == 1


def test_a_trace_that_is_not_there_is_one_line() -> None:
    assert "No such file" in bench("/nowhere/at/all.jsonl")
