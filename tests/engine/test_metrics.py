"""What is counted for operators while requests are served."""

from shoal.actors.engine.load import Load
from shoal.actors.messages import IngressId
from tests.engine.bench import INGRESS, Bench, a_request


def test_the_load_is_who_runs_and_who_waits_of_all_or_of_one_ingress() -> None:
    bench = Bench(max_num_seqs=2)
    assert bench.scheduler.load() == Load(num_running=0, num_waiting=0, num_fetching=0)
    for name in "abc":
        bench.submit(a_request(name, [1, 2, 3], max_tokens=5))
    bench.step()
    assert bench.scheduler.load() == Load(num_running=2, num_waiting=1, num_fetching=0)
    assert bench.scheduler.load(INGRESS) == bench.scheduler.load()
    assert bench.scheduler.load(IngressId("another")) == Load(num_running=0, num_waiting=0, num_fetching=0)


def test_time_in_the_queue_is_from_arrival_to_the_first_admission() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(a_request("first", [1], max_tokens=2))
    bench.submit(a_request("second", [2], max_tokens=2))
    bench.step()
    bench.now = 7.0
    bench.finish()
    assert dict(bench.scheduler.queue_seconds.buckets())["0.001"] == 1, "the first did not wait"
    assert dict(bench.scheduler.queue_seconds.buckets())["+Inf"] == 2
    assert bench.scheduler.queue_seconds.sum == 7.0


def test_who_is_preempted_has_not_waited_for_its_first_admission_twice() -> None:
    bench = Bench(num_blocks=6)
    for name in "ab":
        bench.submit(a_request(name, list(range(8)), max_tokens=12))
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.queue_seconds.buckets()[-1] == ("+Inf", 2.0)


def test_every_block_is_used_cached_or_free() -> None:
    bench = Bench(num_blocks=9)
    assert bench.pools.usage().blocks == {"used": 0, "cached": 0, "free": 8}
    bench.submit(a_request("a", list(range(9)), max_tokens=1))
    bench.step()
    assert bench.pools.usage().blocks == {"used": 3, "cached": 0, "free": 5}
    assert bench.pools.usage().share_of_blocks == 3 / 8
    bench.finish()
    assert bench.pools.usage().blocks == {"used": 0, "cached": 2, "free": 6}
    assert bench.pools.num_evicted_blocks == 0
    bench.serve("b", list(range(50, 80)))
    assert bench.pools.num_evicted_blocks == 2
    assert sum(bench.pools.usage().blocks.values()) == 8


def test_segments_are_counted_likewise() -> None:
    bench = Bench(window=6, num_segments=5)
    bench.serve("a", list(range(9)))
    usage = bench.pools.usage().segments
    assert sum(usage.values()) == 4 and usage["cached"] > 0 and usage["used"] == 0
    assert Bench().pools.usage().segments == {"used": 0, "cached": 0, "free": 0}
