"""What several choices of one prompt cost beside one: `python -m tests.bench.choices`.

An engine in this process, over SmolLM2; each prompt is new to it.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, replace

from shoal.actors.engine.build import BuiltEngine, build_engine
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import EngineRequest, IngressId, RequestId, SamplingParams
from tests.checkpoints import smollm2

INGRESS = IngressId("bench")


@dataclass(frozen=True, kw_only=True)
class Turn:
    all_begun_s: float
    """Until each choice has its first token."""
    num_blocks: int
    """That are used then."""


class Choices:
    def __init__(self, built: BuiltEngine, prompt_tokens: int) -> None:
        self._built = built
        self._prompt_tokens = prompt_tokens
        self._words = random.Random(0)
        self._num_turns = 0

    def turn(self, num_choices: int) -> Turn:
        self._num_turns += 1
        prompt = tuple(self._words.randrange(1000, 40_000) for _ in range(self._prompt_tokens))
        one = EngineRequest(
            request_id=RequestId(f"{self._num_turns}"),
            attempt=1,
            prompt_token_ids=prompt,
            max_tokens=4,
            stop_token_ids=frozenset(),
            group=RequestId(f"{self._num_turns}"),
        )
        engine = self._built.engine
        begun: set[RequestId] = set()
        began = time.perf_counter()
        choices = [
            replace(one, request_id=RequestId(f"{one.request_id}-{i}"), sampling=SamplingParams(seed=i))
            for i in range(num_choices)
        ]
        assert not engine.submit(choices, INGRESS)
        while len(begun) < num_choices:
            begun |= {reply.chunk.request_id for reply in engine.step() if reply.chunk.token_ids}
        took_s = time.perf_counter() - began
        num_blocks = self._built.scheduler.pools.usage().blocks["used"]
        while engine.has_work:
            engine.step()
        engine.check()
        return Turn(all_begun_s=took_s, num_blocks=num_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    config = EngineConfig(
        checkpoint=str(smollm2()),
        threads=args.threads,
        memory_bytes=2 << 30,
        max_model_len=2 * args.prompt_tokens,
    )
    choices = Choices(build_engine(config), args.prompt_tokens)
    choices.turn(1)
    taken: dict[int, list[Turn]] = {1: [], args.choices: []}
    for _ in range(args.turns):  # in turn, since the machine's speed changes
        for num_choices, turns in taken.items():
            turns.append(choices.turn(num_choices))
    alone_s = statistics.median(turn.all_begun_s for turn in taken[1])
    for num_choices, turns in taken.items():
        took_s = statistics.median(turn.all_begun_s for turn in turns)
        print(
            f"n = {num_choices}: all have begun after {took_s * 1000:.0f} ms ({took_s / alone_s:.3f} times), "
            f"with {max(turn.num_blocks for turn in turns)} blocks of {config.block_size} tokens"
        )


if __name__ == "__main__":
    main()
