"""Placement over a whole day of traffic, in simulated time."""

from random import Random

from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key
from tests.router.replay import Replay, Request, one_cache

BLOCK = 64


def conversations(num_conversations: int, rng: Random) -> list[Request]:
    """Each has a system prompt that many share, and some turns that come minutes apart."""
    requests = []
    for number in range(num_conversations):
        tokens = [rng.randrange(3)] * 500
        arrives_s = rng.uniform(0, 600)
        for turn in range(rng.randint(1, 6)):
            tokens += [number * 100 + turn + 10] * rng.randint(50, 1500)
            requests.append(
                Request(
                    arrives_s=arrives_s,
                    num_prompt_tokens=len(tokens),
                    num_output_tokens=100,
                    block_keys=tuple(_keys(tokens)),
                )
            )
            arrives_s += rng.uniform(5, 120)
    return sorted(requests, key=lambda request: request.arrives_s)


def _keys(tokens: list[int]) -> list[BlockKey]:
    return extend_keys(root_key(b"model", ""), tokens, BLOCK)


def test_hits_stay_near_those_of_one_cache_and_work_stays_even() -> None:
    requests = conversations(200, Random(1))
    outcome = Replay(num_engines=4, block_size=BLOCK, tokens_per_s=2000.0).run(requests)
    assert outcome.hit_share >= 0.9 * one_cache(requests, BLOCK), str(outcome)
    assert outcome.imbalance <= 1.1, str(outcome)
