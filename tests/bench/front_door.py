"""What HTTP and Ray cost over the engine alone: `python -m tests.bench.front_door [--streams 16]`.

One cluster, started as a person starts it, and beside it an engine actor of the same configuration whose
stream this process reads itself. Both decode the same batch, in turns; whoever is not asked is idle.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import EngineId, EngineRequest, IngressId, RequestId, SamplingParams, TokenBatch
from tests.checkpoints import smollm2
from tests.cluster.served import ROOT, Served, private_ray

MODEL_LEN, MEMORY, MEMORY_BYTES = 2048, "2GiB", 2 << 30
PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS, PREFILLS = 128, 256, 3, 10
HEAR_DEADLINE_S = 60.0
READER = IngressId("front-door-bench")


class DirectEngine:
    """An engine actor and the one stream it speaks on."""

    def __init__(self, config: EngineConfig) -> None:
        self._actor: Any = ray.remote(EngineActor).options(num_cpus=0).remote(EngineId("alone"), config)
        self._num_requests = 0

    async def start(self) -> None:
        await self._actor.start.remote()
        self._stream = aiter(self._actor.stream.options(num_returns="streaming").remote(READER))
        await self._hear()  # the batch that opens it

    async def submit(self, max_tokens: int) -> None:
        self._num_requests += 1
        words = random.Random(self._num_requests)
        request = EngineRequest(
            request_id=RequestId(str(self._num_requests)),
            attempt=1,
            prompt_token_ids=tuple(words.randrange(1000, 10_000) for _ in range(PROMPT_TOKENS)),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=0.0),
        )
        await self._actor.submit.remote(READER, (request,))

    async def decode(self, streams: int) -> float:
        """Output tokens/s from when all streams have begun to when the first has ended."""
        for _ in range(streams):
            await self.submit(OUTPUT_TOKENS)
        begun: set[RequestId] = set()
        ended, tokens, started, last = 0, 0, 0.0, 0.0
        while ended < streams:
            batch = await self._hear()
            if len(begun) == streams and not ended:
                tokens += sum(len(chunk.token_ids) for chunk in batch.chunks)
                last = time.perf_counter()
            begun.update(chunk.request_id for chunk in batch.chunks)
            if len(begun) == streams and not started:
                started = time.perf_counter()
            ended += sum(chunk.finish_reason is not None for chunk in batch.chunks)
        return tokens / (last - started)

    async def first_token_s(self) -> float:
        started = time.perf_counter()
        await self.submit(1)
        await self._hear()
        return time.perf_counter() - started

    async def _hear(self) -> TokenBatch:
        async with asyncio.timeout(HEAR_DEADLINE_S):
            batch: TokenBatch = await (await anext(self._stream))
            return batch


def bench_serve(url: str, *flags: str) -> Any:
    """The summary of `shoal bench serve`, run as a person runs it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "shoal.cluster", "bench", "serve", "--url", url, "--json", file.name]
        subprocess.run([*command, *flags], check=True, capture_output=True, timeout=600, cwd=ROOT)
        return json.loads(Path(file.name).read_text())["summary"]


def over_http(url: str, *flags: str) -> Any:
    prompt = ("--endpoint", "completions", "--prompt-format", "token_ids", "--input-len", str(PROMPT_TOKENS))
    return bench_serve(url, *prompt, *flags)


async def measure(served: Served, engine: DirectEngine, streams: int) -> None:
    many = ("--concurrency", str(streams), "--num-requests", str(streams), "--output-len", str(OUTPUT_TOKENS))
    one = ("--concurrency", "1", "--num-requests", str(PREFILLS), "--output-len", "1")
    ratios, gaps = [], []
    for i in range(ROUNDS + 1):
        seed = ("--seed", str(i))  # prompts that no prefix cache has seen
        direct = await engine.decode(streams)
        http = over_http(served.url, *many, *seed)["full_load"]["output_tokens_per_s"]
        direct_first_s = statistics.median([await engine.first_token_s() for _ in range(PREFILLS)])
        http_first_s = over_http(served.url, *one, *seed)["ttft_s"]["p50"]
        if i == 0:
            continue  # both are warm now
        ratios.append(http / direct)
        gaps.append(http_first_s - direct_first_s)
        print(
            f"{streams} streams: {http:.1f} tokens/s over HTTP, {direct:.1f} from the engine, "
            f"{ratios[-1]:.0%}; "
            f"first token {http_first_s * 1e3:.1f} and {direct_first_s * 1e3:.1f} ms",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.0%}, {statistics.median(gaps) * 1e3:+.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    checkpoint = smollm2()
    config = EngineConfig(
        checkpoint=str(checkpoint),
        max_model_len=MODEL_LEN,
        memory_bytes=MEMORY_BYTES,
        threads=args.threads,
        max_num_seqs=args.streams,
    )
    flags = [
        *("--max-model-len", str(MODEL_LEN), "--memory", MEMORY, "--threads", str(args.threads)),
        *("--max-num-seqs", str(args.streams), "--block-size", str(config.block_size)),
    ]
    with (
        private_ray(object_store_bytes=None) as address,
        Served.start(checkpoint, address, *flags) as served,
    ):
        served.wait_until_ready()
        engine = DirectEngine(config)

        async def run() -> None:
            await engine.start()
            await measure(served, engine, args.streams)

        asyncio.run(run())


if __name__ == "__main__":
    main()
