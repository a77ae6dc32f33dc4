"""What DeepSeek V4 keeps: the figures that its authors have published, and parts of their true size."""

from dataclasses import replace

import pytest

from shoal.actors.engine.models.deepseek_v4_layout import V4Layer, V4Shape
from shoal.kvstore.boundary import BoundaryRule

V4 = V4Shape(
    architecture="DeepseekV4ForCausalLM",
    layers=(V4Layer(), V4Layer(ratio=4, is_sparse=True), V4Layer(ratio=128)),
    window=128,
    head_dim=512,
    index_head_dim=128,
)
"""A layer of each kind, of the size that they have."""


def test_the_parts_of_deepseek_v4() -> None:
    layout = V4.layout(block_size=128, dtype="bfloat16", num_dropped_layers=1)
    assert [(p.layer, p.part.name, p.part.shape) for p in layout.blocks.parts] == [
        (1, "compressed", (32, 512)),
        (1, "index", (32, 128)),
        (2, "compressed", (1, 512)),
    ]
    assert [(p.layer, p.part.name, p.part.shape) for p in layout.slots.parts] == [
        (0, "window", (134, 512)),
        (1, "window", (134, 512)),
        (1, "making", (8, 2, 1024)),
        (1, "index making", (8, 2, 256)),
        (2, "window", (134, 512)),
        (2, "making", (128, 2, 512)),
    ]
    assert layout.stored_bytes == layout.slots.parts[2].offset == 2 * 134 * 1024
    assert [(p.layer, p.part.name, p.part.shape) for p in layout.segments.parts] == [
        (0, "window", (131, 512)),
        (1, "window", (131, 512)),
    ]
    assert layout.rule == BoundaryRule(num_segments=1, num_recomputed=1, num_rewound=4)
    assert not layout.whole_states


def test_20_layers_of_deepseek_v4_in_rows_of_8_bits() -> None:
    """The figures of the engine that its authors have published: 134 rows of 528 bytes, of 20 layers."""
    layers = (V4Layer(ratio=4, is_sparse=True), V4Layer(ratio=128)) * 20
    layout = replace(V4, layers=layers).layout(block_size=128, dtype="float8", num_dropped_layers=20)
    windows = [placed for placed in layout.slots.parts if placed.part.name == "window"]
    assert {placed.part.num_bytes for placed in windows} == {134 * 528} == {70_752}
    assert layout.stored_bytes == windows[19].end == 1_415_040


@pytest.mark.parametrize(("drafts", "rows"), [(0, 134), (4, 134), (5, 135), (8, 138)])
def test_a_ring_of_deepseek_v4_reaches_back_beyond_drafts_that_were_wrong(drafts: int, rows: int) -> None:
    """A segment has 131 rows before its boundary, which lies behind a step's first row; the ring has the
    others though all drafts of the step before were wrong."""
    layout = V4.layout(block_size=128, dtype="bfloat16", num_draft_tokens=drafts)
    sizes = {p.part.name: p.part.shape[0] for p in layout.slots.parts if p.layer == 1}
    assert sizes == {"window": rows, "making": 8 + drafts, "index making": 8 + drafts}
    assert rows - drafts >= V4.segment_rows(128) - 1


def test_a_window_of_several_blocks_is_in_as_many_segments() -> None:
    layout = V4.layout(block_size=128, dtype="bfloat16")
    assert (layout.rule.num_segments, V4.segment_rows(128)) == (1, 131)
    longer = replace(V4, window=300).layout(block_size=128, dtype="bfloat16")
    assert (longer.rule.num_segments, longer.segments.parts[0].part.shape[0]) == (3, 132)


def test_engines_with_drafts_and_without_read_each_others_pieces() -> None:
    """Rings are longer for them, and pieces are not; fewer that are stored are other pieces."""
    named = [
        V4.layout(block_size=128, dtype="bfloat16", **options).identity
        for options in ({}, {"num_draft_tokens": 8}, {"num_dropped_layers": 1})
    ]
    assert named[0] == named[1] != named[2]
