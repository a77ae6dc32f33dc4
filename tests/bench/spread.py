"""How requests that share prefixes spread over real engines: `python -m tests.bench.spread [--engines 2 4]`.

`shoal serve` with SmolLM2, engines of one thread, on one node with its store. Four plays on each cluster:

- a burst of 64 at once over 8 prefixes of 1,024 tokens that nobody has seen. The first of each prefix can hit
  nothing; ideally all others hit all of it;
- the same over 8 prefixes that were asked for once before. Ideally all hit;
- a burst of 64 behind one new prefix of 256 tokens, which is all of the work at first;
- 100 requests behind another of 256 tokens, each awaited before the next.

Where requests are is asked of the router all the while: it counts what it has placed until the engine reports
the arrival, and then what the engine reports to run and wait there. Hits are what `usage` says.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event

from shoal.cluster.bench.serve.client import Failure, Reply
from shoal.cluster.bench.serve.load import Record
from shoal.cluster.bench.serve.run import ServeBenchConfig, run_bench
from shoal.cluster.bench.serve.workload import Lengths, WorkloadConfig
from tests.checkpoints import smollm2
from tests.cluster.served import Served, private_ray, wait_for

TAIL_TOKENS, OUTPUT_TOKENS = 32, 8
MOST_OVER_MEAN, LEAST_HIT_SHARE = 1.5, 0.9
"""Wanted of a burst: the fullest engine's requests to the mean of all, and hit tokens to the ideal."""
MOST_ON_ONE = 0.7
"""Wanted of requests that come one at a time: the share of the engine that gets most."""
SAMPLE_S = 0.01
OBJECT_STORE_BYTES = 4 << 30
START_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    name: str
    num_requests: int
    at_once: int
    num_prefixes: int
    prefix_tokens: int
    is_known: bool = False
    """Each prefix was asked for once before."""

    @property
    def ideal_tokens(self) -> int:
        """Hits, if each prefix were computed once."""
        num_first = 0 if self.is_known else self.num_prefixes
        return (self.num_requests - num_first) * self.prefix_tokens


_BURST = Play(name="burst, new prefixes", num_requests=64, at_once=64, num_prefixes=8, prefix_tokens=1024)
PLAYS = (
    _BURST,
    replace(_BURST, name="burst, known prefixes", is_known=True),
    Play(name="burst, one new prefix", num_requests=64, at_once=64, num_prefixes=1, prefix_tokens=256),
    Play(name="one at a time", num_requests=100, at_once=1, num_prefixes=1, prefix_tokens=256),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at: float
    num_requests: dict[str, int]
    """By engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    play: Play
    by_engine: tuple[int, ...]
    """Requests: in flight when all that come at once are placed, else all."""
    hit_tokens: int
    took_s: float

    @property
    def over_mean(self) -> float:
        return max(self.by_engine) * len(self.by_engine) / sum(self.by_engine)

    @property
    def on_one(self) -> float:
        return max(self.by_engine) / sum(self.by_engine)

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.play.ideal_tokens

    @property
    def is_as_wanted(self) -> bool:
        if self.play.at_once == 1:
            return self.on_one <= MOST_ON_ONE
        return self.over_mean <= MOST_OVER_MEAN and self.hit_share >= LEAST_HIT_SHARE

    def __str__(self) -> str:
        return (
            f"{self.play.name}: {' + '.join(map(str, self.by_engine))} requests, "
            f"max/mean {self.over_mean:.2f}, {self.on_one:.0%} on one; hit {self.hit_tokens:,} tokens, "
            f"{self.hit_share:.1%} of the ideal; {self.took_s:.1f} s"
            f"{'' if self.is_as_wanted else '; not as wanted'}"
        )


FIGURES = ("over_mean", "on_one", "hit_share", "is_as_wanted")
"""Of an outcome, beside its fields."""


def play_on(served: Served, play: Play, seed: int) -> Outcome:
    """As `shoal bench serve` does it. Exits with a line if a request fails."""
    config = ServeBenchConfig(
        url=served.url,
        workload=WorkloadConfig(
            name="shared-prefix",
            prompt_format="token_ids",
            input_len=Lengths(TAIL_TOKENS, TAIL_TOKENS),
            output_len=Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS),
            groups=play.num_prefixes,
            prefix_len=play.prefix_tokens,
            seed=seed,
        ),
        concurrency=play.at_once,
        num_requests=play.num_requests,
        warmup=play.num_prefixes if play.is_known else 0,
    )
    with watched(served) as samples:
        records = run_bench(config, on_stage=lambda _: None, on_record=lambda _: None).load.records
    replies = [record.outcome for record in records if isinstance(record.outcome, Reply)]
    if len(replies) < play.num_requests:
        failures = [record.outcome for record in records if isinstance(record.outcome, Failure)]
        sys.exit(f"error: {play.name}: {len(failures)} requests failed; {failures[:1]}")
    return Outcome(
        play=play,
        by_engine=in_flight(samples) if play.at_once > 1 else placed(records, samples),
        hit_tokens=sum(reply.usage.cached_tokens or 0 for reply in replies if reply.usage),
        took_s=max(reply.ended_at for reply in replies) - min(record.sent_at for record in records),
    )


@contextmanager
def watched(served: Served) -> Iterator[list[Sample]]:
    """What is in flight, sampled until the block ends."""
    samples: list[Sample] = []
    done = Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            num_requests = served.loads()
            samples.append(Sample(at=time.perf_counter(), num_requests=num_requests))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield samples
        finally:
            done.set()
        watching.result()


def in_flight(samples: Sequence[Sample]) -> tuple[int, ...]:
    """When most were for the first time."""
    fullest = max(samples, key=lambda sample: sum(sample.num_requests.values()))
    return _in_order(fullest.num_requests)


def placed(records: Sequence[Record], samples: Sequence[Sample]) -> tuple[int, ...]:
    """Where each of them was, which were alone in the cluster one after another."""
    counts = Counter(dict.fromkeys(samples[0].num_requests, 0))
    for record in records:
        seen = Counter[str]()
        for sample in samples:
            if record.sent_at < sample.at < record.outcome.ended_at:
                seen.update(sample.num_requests)
        if not seen.total():
            sys.exit("error: a request came and went between two samples")
        counts[seen.most_common(1)[0][0]] += 1
    return _in_order(counts)


def _in_order(counts: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(count for _, count in sorted(counts.items()))


@contextmanager
def cluster(num_engines: int, address: str, store_memory: str) -> Iterator[Served]:
    flags = ("--threads", "1", "--memory", "1.5GiB", "--max-model-len", "2048")
    more = ("--max-num-seqs", "64", "--block-size", "128", "--kv-store-memory", store_memory)
    with Served.start(smollm2(), address, *flags, *more, engines=num_engines) as served:
        served.wait_until_ready()
        wait_for(
            lambda: len(served.loads()) == num_engines and (store_memory == "0" or served.store_names()),
            "all engines and the store",
            within_s=START_DEADLINE_S,
        )
        yield served


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kv-store-memory", default="1GiB", help="as of shoal serve; 0 is no store")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with private_ray(object_store_bytes=OBJECT_STORE_BYTES) as address:
        for num_engines in args.engines:
            with cluster(num_engines, address, args.kv_store_memory) as served:
                for seed, play in enumerate(PLAYS):
                    outcome = play_on(served, play, seed)
                    print(f"{num_engines} engines, {outcome}", flush=True)
                    rows.append(asdict(outcome) | {name: getattr(outcome, name) for name in FIGURES})
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(not all(row["is_as_wanted"] for row in rows))


if __name__ == "__main__":
    main()
