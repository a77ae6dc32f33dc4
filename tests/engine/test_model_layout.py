"""Bytes of a token, a block, a slot and a segment: published figures, and parts of every kind."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.engine.model_layout import LayerLayout, ModelLayout, model_layout, paged_layer
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import Packing, Part, StateLayout


def full_attention(num_layers: int) -> ModelLayout:
    """Of eight heads of 128, as Qwen3 0.6B and Llama 3.1 8B have them."""
    return model_layout(
        (None,) * num_layers,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype="bfloat16",
        max_model_len=40960,
    )


QWEN3_0_6B, LLAMA_3_1_8B = full_attention(28), full_attention(32)


def test_bytes_of_a_token() -> None:
    """The figures of mini-sglang's chapter on the KV pool, and ours."""
    assert QWEN3_0_6B.bytes_per_token == 114_688 == 112 << 10
    assert LLAMA_3_1_8B.bytes_per_token == 131_072 == 128 << 10


@pytest.mark.parametrize(("gib", "tokens"), [(4, 37_449), (40, 374_491)])
def test_tokens_that_fit(gib: int, tokens: int) -> None:
    assert (gib << 30) // int(QWEN3_0_6B.bytes_per_token) == tokens


def test_a_block_is_one_contiguous_range_of_all_layers() -> None:
    """There the layers come first, [2, 28, 65, 16, 8, 128]; here the block does: [65, 28, 2, 16, 8, 128]."""
    assert QWEN3_0_6B.blocks.num_bytes == 16 * 114_688
    kv_bytes = 2 * 16 * 8 * 128 * 2
    assert [placed.offset for placed in QWEN3_0_6B.blocks.parts] == [i * kv_bytes for i in range(28)]


def test_rings_are_in_slots_the_stored_ones_first() -> None:
    layout = model_layout(
        (5, None, 9, 5),
        num_kv_heads=2,
        head_dim=4,
        block_size=4,
        dtype="float32",
        max_model_len=64,
        num_dropped_layers=1,
    )
    row = 2 * 2 * 4 * 4
    assert [(placed.layer, placed.offset) for placed in layout.slots.parts] == [
        (0, 0),
        (2, 9 * row),
        (3, 18 * row),
    ]
    assert (layout.slots.num_bytes, layout.stored_bytes) == (27 * row, 18 * row)
    assert [placed.layer for placed in layout.segments.parts] == [0, 2]
    assert layout.segments.num_bytes == 2 * 4 * row, "of each its block's last rows"
    assert layout.blocks.num_bytes == 4 * row
    assert layout.rule == BoundaryRule(num_segments=2, num_recomputed=2)


def test_the_identity_of_attention_is_that_of_its_rings() -> None:
    """It is a part of fingerprints, which stores of earlier starts go by."""
    assert QWEN3_0_6B.identity == ""
    rings = StateLayout(num_layers=1, window=5, num_kv_heads=1, head_dim=4, block_size=4)
    layout = model_layout((5,), num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", max_model_len=64)
    assert layout.identity == f", {rings}"


STATE = Part(name="recurrent", shape=(4, 16, 8), dtype="float32")
SCRATCH = Part(name="scratch", shape=(3,), dtype="float32")
WINDOW = Part(name="window", shape=(134, 528), dtype="uint8")


def mixed(*layers: LayerLayout) -> ModelLayout:
    return ModelLayout.of(layers, block_size=16, rule=BoundaryRule(num_segments=1), whole_states=True)


def test_parts_of_any_kind_lie_beside_keys_and_values() -> None:
    attention = paged_layer(num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")
    recurrent = LayerLayout(slots=(SCRATCH, STATE), segments=(STATE,))
    rows = LayerLayout(blocks=(Part(name="compressed", shape=(1, 528), dtype="uint8"),))
    layout = mixed(recurrent, attention, recurrent, LayerLayout(), rows)
    assert [(placed.layer, placed.part.name) for placed in layout.slots.parts] == [
        (0, "recurrent"),
        (2, "recurrent"),
        (0, "scratch"),
        (2, "scratch"),
    ]
    assert layout.stored_bytes == layout.segments.num_bytes == 2 * STATE.num_bytes
    assert layout.slots.num_bytes == 2 * STATE.num_bytes + 64
    assert [(placed.layer, placed.offset) for placed in layout.blocks.parts] == [(1, 0), (4, 2048)]
    assert layout.blocks.num_bytes == 2048 + 576
    assert layout.identity != mixed(recurrent, attention, recurrent, LayerLayout(), LayerLayout()).identity


def test_the_rings_of_deepinfer() -> None:
    """134 rows of 528 bytes in each of 20 layers, and as many that are not stored (section 4.4)."""
    stored = LayerLayout(slots=(WINDOW,), segments=(WINDOW,))
    layout = mixed(*[stored] * 20, *[LayerLayout(slots=(WINDOW,))] * 20)
    assert WINDOW.num_bytes == 70_752
    assert (layout.stored_bytes, layout.slots.num_bytes) == (1_415_040, 2 * 1_415_040)


def test_a_segment_of_what_no_slot_has_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="a segment has recurrent, which the slot has not"):
        LayerLayout(segments=(STATE,))
    with pytest.raises(ValueError, match="two parts of one name"):
        LayerLayout(slots=(STATE, STATE))


PARTS = st.builds(
    Part,
    name=st.sampled_from("abc"),
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
)


@st.composite
def layers(draw: st.DrawFn) -> LayerLayout:
    """Of its slot's parts some are stored, perhaps in another shape, as a ring's rows are."""
    in_blocks, in_slots = (draw(st.lists(PARTS, unique_by=lambda p: p.name, max_size=3)) for _ in range(2))
    stored = [part for part in in_slots if draw(st.booleans())]
    saved = tuple(part if draw(st.booleans()) else replace(part, shape=(2,)) for part in stored)
    return LayerLayout(blocks=tuple(in_blocks), slots=tuple(in_slots), segments=saved)


@given(st.lists(layers(), max_size=5))
def test_every_part_has_bytes_of_its_own_and_what_is_stored_lies_in_front(chosen: list[LayerLayout]) -> None:
    layout = mixed(*chosen)
    for packing, parts in (
        (layout.blocks, [layer.blocks for layer in chosen]),
        (layout.slots, [layer.slots for layer in chosen]),
        (layout.segments, [layer.segments for layer in chosen]),
    ):
        expected = [(i, part) for i, of_layer in enumerate(parts) for part in of_layer]
        assert Counter((p.layer, p.part) for p in packing.parts) == Counter(expected)
        assert num_unused(packing) == packing.num_bytes - sum(part.num_bytes for _, part in expected)
    for placed in layout.slots.parts:
        is_stored = placed.part.name in {part.name for part in chosen[placed.layer].segments}
        assert placed.end <= layout.stored_bytes if is_stored else placed.offset >= layout.stored_bytes
    assert layout.bytes_per_token * layout.block_size == layout.blocks.num_bytes


def num_unused(packing: Packing) -> int:
    """Bytes that are no part's; none is two parts'."""
    used = [0] * packing.num_bytes
    for placed in packing.parts:
        for i in range(placed.offset, placed.end):
            used[i] += 1
    assert set(used) <= {0, 1}
    return used.count(0)
