"""What `shoal batch` reaches of an engine's own speed, and what kills change: `python -m tests.bench.batch`.

A batch of lines whose prompts share prefixes, in random order, half of them greedy and half seeded. An engine
actor of the same configuration is given the same prompts at once, in the order of the batch, and this process
reads its stream; then the batch is run against a cluster, as a person runs it; in turns, and whoever is not
asked is idle. No turn finds a prefix of another's. At last the batch is killed twice and taken up again. With
--tiny a random model answers, in a minute; it is too fast to be compared with.

Ends with 1 if an answer differs, if a prefix was computed more than once, or if the batch reaches less than
95% of the engine's own tokens/s.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import EngineId, EngineRequest, RequestId, SamplingParams
from shoal.cluster.batch.lines import Question
from shoal.cluster.batch.order import leaders_first, prefix_path
from shoal.cluster.bench.engine_stream import CALL_DEADLINE_S, INGRESS, EngineStream
from tests.checkpoints import smollm2, tiny_llama
from tests.cluster.batched import Batch
from tests.cluster.served import Served, private_ray
from tests.cluster_unit.batches import COMPLETIONS, answers, line, write_input

LEAST_SHARE = 0.95
MODEL_LEN, MEMORY, MEMORY_BYTES = 1024, "2GiB", 2 << 30
START_DEADLINE_S, TURN_DEADLINE_S = 120.0, 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One line."""

    group: int
    prompt: list[int]
    seed: int

    @property
    def temperature(self) -> float:
        return float(self.seed % 2)


class Work:
    """The lines of all turns; each turn has a salt of its own, so that nothing is cached."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._output_tokens: int = args.output_tokens
        self.prefix_tokens: int = args.prefix_tokens
        words = random.Random(0)

        def tokens(num: int) -> list[int]:
            return [words.randrange(10, 500 if args.tiny else 10_000) for _ in range(num)]

        prefixes = [tokens(args.prefix_tokens) for _ in range(args.groups)]
        self.tasks = [
            Task(group=i % args.groups, prompt=prefixes[i % args.groups] + tokens(args.tail_tokens), seed=i)
            for i in range(args.lines)
        ]

    def lines(self, salt: str) -> list[dict[str, Any]]:
        lines = [
            line(
                f"{task.group}-{task.seed}",
                task.prompt,
                max_tokens=self._output_tokens,
                ignore_eos=True,
                seed=task.seed,
                temperature=task.temperature,
                top_p=1.0,
                cache_salt=salt,
            )
            for task in self.tasks
        ]
        random.Random(1).shuffle(lines)
        return lines

    def requests(self, salt: str) -> Iterator[EngineRequest]:
        """In the order in which the batch asks."""
        paths = [
            (prefix_path(Question(url=COMPLETIONS, body={"prompt": task.prompt})), task.seed, task)
            for task in self.tasks
        ]
        for task in leaders_first((path, task) for path, _, task in sorted(paths)):
            yield EngineRequest(
                request_id=RequestId(f"{salt}-{task.seed}"),
                attempt=1,
                prompt_token_ids=tuple(task.prompt),
                max_tokens=self._output_tokens,
                stop_token_ids=frozenset(),
                sampling=SamplingParams(temperature=task.temperature, seed=task.seed),
                cache_salt=salt,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    tokens: int
    """Of prompts and answers."""
    hit_tokens: int
    took_s: float
    cpu_s: float
    """Of all processes: what the machine would take with nothing else to do is proportional to it."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.1f} tokens/s ({self.tokens:,} in {self.took_s:.1f} s and "
            f"{self.cpu_s:.1f} s of CPU, {self.hit_tokens:,} of them hit)"
        )


def cpu_seconds() -> float:
    """Of this process and all that descend from it, those that have ended included."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


class Alone:
    """An engine actor, and all that it says."""

    def __init__(self, config: EngineConfig) -> None:
        engine: Any = ray.remote(EngineActor)
        self._actor = engine.options(num_cpus=0).remote(EngineId("alone"), config)
        ray.get(self._actor.start.remote(), timeout=START_DEADLINE_S)
        self._stream = EngineStream(self._actor)

    def turn(self, work: Work, salt: str) -> Turn:
        started, cpu_s = time.perf_counter(), cpu_seconds()
        submits = [self._actor.submit.remote(INGRESS, (request,)) for request in work.requests(salt)]
        unfinished, tokens, hit_tokens = len(submits), 0, 0
        for chunk in self._stream.chunks(TURN_DEADLINE_S):
            tokens += len(chunk.token_ids)
            hit_tokens += 0 if chunk.cached_tokens is None else chunk.cached_tokens.total
            unfinished -= chunk.finish_reason is not None
            if not unfinished:
                break
        took_s = time.perf_counter() - started
        ray.get(submits, timeout=CALL_DEADLINE_S)
        tokens += sum(len(task.prompt) for task in work.tasks)
        return Turn(tokens=tokens, hit_tokens=hit_tokens, took_s=took_s, cpu_s=cpu_seconds() - cpu_s)


def batched(work: Work, served: Served, folder: Path, salt: str) -> tuple[Turn, Path]:
    """The time is the command's own: without Python's start, which is in that of the CPU."""
    source, target = write_input(folder / f"{salt}.jsonl", work.lines(salt)), folder / f"{salt}.out"
    batch, cpu_s = Batch(source, target, "--url", served.url, "--json"), cpu_seconds()
    if batch.run(within_s=TURN_DEADLINE_S):
        sys.exit(batch.output)
    summary = json.loads(next(each for each in batch.output.splitlines() if each.startswith("{")))
    tokens = summary["prompt_tokens"] + summary["completion_tokens"]
    turn = Turn(
        tokens=tokens,
        hit_tokens=summary["cached_tokens"],
        took_s=summary["seconds"],
        cpu_s=cpu_seconds() - cpu_s,
    )
    return turn, target


def killed_twice(work: Work, served: Served, folder: Path) -> Path:
    source, target = write_input(folder / "killed.jsonl", work.lines("killed")), folder / "killed.out"
    batch = Batch(source, target, "--url", served.url)
    for third in (1, 2):
        if batch.run_until(third * len(work.tasks) // 3) != -signal.SIGKILL:
            sys.exit(batch.output)
        print(f"killed after {batch.num_answers():,} answers", flush=True)
    if batch.run(within_s=TURN_DEADLINE_S):
        sys.exit(batch.output)
    return target


def said(target: Path) -> dict[str, tuple[str, str, int]]:
    """(text, finish reason, tokens) by custom_id, which is there once."""
    by_id: dict[str, tuple[str, str, int]] = {}
    for answer in answers(target):
        if answer["custom_id"] in by_id:
            sys.exit(f"error: {target} answers {answer['custom_id']} twice")
        body = answer["response"]["body"]
        [choice] = body["choices"]
        tokens = body["usage"]["total_tokens"]
        by_id[answer["custom_id"]] = (choice["text"], choice["finish_reason"], tokens)
    return by_id


def most_computed(work: Work, target: Path) -> int:
    """How often one prefix was computed, at most: by answers that did not hit all of it."""
    computed: Counter[str] = Counter()
    for answer in answers(target):
        by_place = answer["response"]["body"]["usage"]["cached_tokens_by_place"]
        computed[answer["custom_id"].split("-")[0]] += sum(by_place.values()) < work.prefix_tokens
    return max(computed.values())


def measure(args: argparse.Namespace, served: Served, alone: Alone | None, folder: Path) -> dict[str, Any]:
    work = Work(args)
    ratios, by_cpu, target = [], [], folder
    for i in range(args.rounds):
        own = alone.turn(work, f"own-{i}") if alone is not None else None
        turn, target = batched(work, served, folder, f"batch-{i}")
        print(f"the batch: {turn}", flush=True)
        if own is not None:
            if turn.tokens != own.tokens:
                sys.exit(f"error: the batch had {turn.tokens} tokens, the engine {own.tokens}")
            ratios.append(turn.tokens_per_s / own.tokens_per_s)
            by_cpu.append(own.cpu_s / turn.cpu_s)
            print(f"the engine alone: {own}; the batch has {ratios[-1]:.1%} of it", flush=True)
    undisturbed = said(target)
    result: dict[str, Any] = {
        "lines": len(undisturbed),
        "share_of_the_engines_own": statistics.median(ratios) if ratios else None,
        "share_by_cpu": statistics.median(by_cpu) if by_cpu else None,
        "times_a_prefix_was_computed": most_computed(work, target),
    }
    if args.kill:
        target = killed_twice(work, served, folder)
        result["killed_is_equal"] = said(target) == undisturbed
        result["times_a_prefix_was_computed_by_the_killed"] = most_computed(work, target)
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "lines": 2000,
        "groups": 200,
        "prefix-tokens": 256,
        "tail-tokens": 32,
        "output-tokens": 32,
        "threads": 2,
        "rounds": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    print(json.dumps(result))
    is_as_wanted = (
        (result["share_of_the_engines_own"] or 1) >= LEAST_SHARE
        and result["times_a_prefix_was_computed"] == 1
        and result.get("times_a_prefix_was_computed_by_the_killed", 1) <= 1
        and result.get("killed_is_equal", True)
    )
    sys.exit(not is_as_wanted)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    checkpoint = tiny_llama(folder, max_position_embeddings=MODEL_LEN) if args.tiny else smollm2()
    config = EngineConfig(
        checkpoint=str(checkpoint),
        max_model_len=MODEL_LEN,
        memory_bytes=MEMORY_BYTES,
        threads=args.threads,
        max_queued_requests=args.lines,
    )
    flags = ("--threads", str(args.threads), "--memory", MEMORY, "--max-model-len", str(MODEL_LEN))
    same = ("--max-num-seqs", str(config.max_num_seqs), "--block-size", str(config.block_size))
    with (
        private_ray(object_store_bytes=None) as address,
        Served.start(checkpoint, address, *flags, *same) as served,
    ):
        served.wait_until_ready()
        return measure(args, served, None if args.tiny else Alone(config), folder)


if __name__ == "__main__":
    main()
