"""Short chats on a few slow engines: what the weight of a row costs in hits, and what it saves.

python -m tests.bench.short_chats [--row-weights 1 2 4]
"""

import argparse
import random

from shoal.actors.router import engine_view
from shoal.cluster.bench.trace.config import EngineSpeed, TraceConfig
from shoal.cluster.bench.trace.replay import Replay
from shoal.cluster.bench.trace.traces import TracedRequest
from shoal.kvstore.block_hash import KEY_BYTES, BlockKey

BLOCK_SIZE = 16
NUM_REQUESTS, REQUESTS_PER_S = 3000, 9.0
NUM_CHATS, NUM_TURNS, DRAWN_TOKENS = 60, 10, 150
CONFIG = TraceConfig(
    num_engines=4,
    block_size=BLOCK_SIZE,
    num_blocks=None,
    num_store_blocks=0,
    speed=EngineSpeed(prefill_tokens_per_s=1500.0, step_s=0.01, row_s=0.0005, chunk_tokens=512),
)


def short_chats(seed: int = 1) -> list[TracedRequest]:
    """Turns of 50 to 150 tokens, of chats that are open at the same time. One that has had its last turn
    makes room for a new one."""
    rng = random.Random(seed)
    names, now = iter(range(1 << 62)), 0.0
    chats = [(next(names), 0, 0) for _ in range(NUM_CHATS)]  # name, turns, tokens
    requests = []
    for _ in range(NUM_REQUESTS):
        now += rng.expovariate(REQUESTS_PER_S)
        i = rng.randrange(NUM_CHATS)
        name, turns, tokens = chats[i]
        tokens += rng.randint(50, 150)
        requests.append(
            TracedRequest(
                arrives_s=now,
                num_prompt_tokens=tokens,
                num_output_tokens=DRAWN_TOKENS,
                block_keys=tuple(
                    BlockKey(((name << 32) + block).to_bytes(KEY_BYTES, "big"))
                    for block in range(tokens // BLOCK_SIZE)
                ),
            )
        )
        is_last = turns + 1 == NUM_TURNS
        chats[i] = (next(names), 0, 0) if is_last else (name, turns + 1, tokens + DRAWN_TOKENS)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--row-weights", type=float, nargs="+", default=[engine_view.ROW_WEIGHT])
    requests = short_chats()
    for weight in parser.parse_args().row_weights:
        engine_view.ROW_WEIGHT = weight
        outcome = Replay(requests, CONFIG).run()
        on_engine = sum(served.end_s for served in outcome.served) / outcome.simulated_s / CONFIG.num_engines
        ceiling = outcome.ceiling_tokens / outcome.num_prompt_tokens
        print(
            f"a row weighs {weight:g}: {outcome.hit_share:.1%} hit (one cache: {ceiling:.1%}), "
            f"{on_engine:.2f} requests on an engine, first token {outcome.mean_first_token_s:.2f} s"
        )


if __name__ == "__main__":
    main()
