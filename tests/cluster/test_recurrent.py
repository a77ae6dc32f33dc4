"""Models whose state is not keys and values alone over real Ray, on two nodes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from shoal.cluster.bench.two_nodes import another_node
from tests.checkpoints import tiny_deepseek_v4, tiny_library
from tests.cluster.chaos import metric
from tests.cluster.served import Served, wait_for

PROMPT = [(7 * i * i + 3 * i) % 500 + 3 for i in range(1500)]


@dataclass(frozen=True, kw_only=True)
class Model:
    write: Callable[[Path], Path]
    block_size: int
    num_cached: int
    """Up to the end of complete blocks, and the state there."""
    num_saved: int
    """Blocks and segments."""


QWEN = Model(
    write=lambda folder: tiny_library("Qwen3_5TextConfig", folder, max_position_embeddings=4096),
    block_size=16,
    num_cached=93 * 16,
    num_saved=93 + 5 + 1,
)
"""With a state every 16 blocks."""
V4 = Model(
    write=lambda folder: tiny_deepseek_v4(folder, sliding_window=128),
    block_size=32,
    num_cached=46 * 32 - 4,
    num_saved=46 + 46,
)
"""Of which state is made of the last four tokens again."""


@pytest.mark.parametrize("model", [QWEN, V4], ids=["qwen3.5", "deepseek v4"])
def test_25_blocks_and_state_are_fetched_from_another_nodes_store(
    ray_address: str, tmp_path: Path, model: Model
) -> None:
    checkpoint = model.write(tmp_path)
    limits = ("--threads", "4", "--block-size", str(model.block_size))
    flags = (*limits, "--routing-policy", "round_robin")
    with Served.start(checkpoint, ray_address, *flags) as served, no_more_room_here():
        served.wait_until_ready()
        with another_node(80 << 20):
            ray.get(served.actor("supervisor").scale.remote(None, 2), timeout=10)
            wait_for(lambda: len(served.ready_engines()) == 2, "an engine on the other node")
            assert len({node_of(served, name) for name in served.engine_names()}) == 2
            cold = answer(served)
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            wait_for(
                lambda: num_known_in_stores(served) >= model.num_saved, "the router knows what was saved"
            )
            fetched = answer(served)
            assert fetched["usage"]["prompt_tokens_details"]["cached_tokens"] == model.num_cached
            assert metric(served, "shoal_cached_prompt_tokens_total", place="other_store") == model.num_cached
            ours, theirs = (said["choices"][0]["logprobs"] for said in (fetched, cold))
            assert ours["tokens"] == theirs["tokens"]
            pairs = zip(ours["token_logprobs"], theirs["token_logprobs"], strict=True)
            assert all(abs(a - b) < 1e-4 for a, b in pairs)
            wait_for(served.is_clean, "nothing is left of them")


def answer(served: Served) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    said = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60)
    assert said.status_code == 200, said.text
    body: dict[str, Any] = said.json()
    return body


def node_of(served: Served, name: str) -> str:
    node = served.actor(name).__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(node, timeout=10))


def num_known_in_stores(served: Served) -> int:
    """Blocks and segments, by the router's account."""
    held = ray.get(served.actor("router").held.remote(), timeout=10)
    return sum(len(held.get(name, ())) for name in served.store_names())


@contextmanager
def no_more_room_here() -> Iterator[None]:
    """Of this node's eight CPUs the first engine takes four, and nobody the others."""
    taken = placement_group([{"CPU": 4}])
    ray.get(taken.ready(), timeout=60)
    try:
        yield
    finally:
        remove_placement_group(taken)
