"""Bytes of a token, a block and a pool: the figures of mini-sglang's chapter on the KV pool, and ours."""

import pytest

from shoal.kvstore.layout import BlockLayout

QWEN3_0_6B = BlockLayout(num_layers=28, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
LLAMA_3_1_8B = BlockLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


def test_bytes_of_a_token() -> None:
    assert QWEN3_0_6B.bytes_per_token == 114_688 == 112 << 10
    assert LLAMA_3_1_8B.bytes_per_token == 131_072 == 128 << 10


@pytest.mark.parametrize(("gib", "tokens"), [(4, 37_449), (40, 374_491)])
def test_tokens_that_fit(gib: int, tokens: int) -> None:
    assert (gib << 30) // QWEN3_0_6B.bytes_per_token == tokens


def test_a_block_is_one_contiguous_range_of_all_layers() -> None:
    """There the layers come first, [2, 28, 65, 16, 8, 128]; here the block does."""
    assert QWEN3_0_6B.pool_shape(65) == (65, 28, 2, 16, 8, 128)
    assert QWEN3_0_6B.bytes_per_block == 16 * 114_688
