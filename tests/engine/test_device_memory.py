"""What of a model's layers goes out with a block and a segment, and comes back."""

from collections.abc import Iterator

import numpy as np
import torch

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.model_layout import LayerLayout, ModelLayout, model_layout, paged_layer
from shoal.actors.engine.transfers import Piece
from shoal.kernels.backend import LayerKV, LayerMemory, LayerParts, LayerRing
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.boundary import BoundaryRule
from shoal.kvstore.layout import Part

WINDOWS = (None, 5, None, 9, 5)
NUM_DROPPED = 1
BLOCK, SEGMENT = BlockId(2), BlockId(3)


def memory() -> DeviceMemory:
    layout = model_layout(
        WINDOWS,
        num_kv_heads=2,
        head_dim=4,
        block_size=4,
        dtype="float32",
        max_model_len=64,
        num_dropped_layers=NUM_DROPPED,
    )
    made = DeviceMemory(
        layout, num_blocks=4, num_slots=3, num_segments=4, max_rows=8, device=torch.device("cpu")
    )
    for part in (made.blocks, made.slots, made.segments):
        assert part is not None
        values = part.view(-1).view(torch.float32)
        values.copy_(torch.rand(values.shape, generator=torch.Generator().manual_seed(len(values))))
    return made


def rows(made: DeviceMemory) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Keys and values of each layer in that block or segment; None of one that is not stored."""

    def of(layer: LayerMemory) -> tuple[torch.Tensor, torch.Tensor] | None:
        if isinstance(layer, LayerKV):
            return layer.k_PBHD[BLOCK], layer.v_PBHD[BLOCK]
        assert isinstance(layer, LayerRing)
        if layer.segments is None:
            return None
        return layer.segments.k_PBHD[SEGMENT], layer.segments.v_PBHD[SEGMENT]

    return [of(layer) for layer in made.layers]


def test_24_every_layer_comes_back_with_its_block_and_its_segment() -> None:
    """A layer whose rows were in neither would be taken up from whatever is there."""
    before, after = memory(), memory()
    for part in (after.blocks, after.segments):
        assert part is not None
        part.zero_()
    name = BlockKey(b"x")
    pieces = [Piece(key=name, parent=name, block=BLOCK), Piece(key=name, parent=name, segment=SEGMENT)]
    data = np.empty(sum(map(before.num_bytes, pieces)), dtype=np.uint8)
    before.copy_out(pieces, data)
    after.copy_in(pieces, data)
    saved = 0
    for ours, theirs in zip(rows(before), rows(after), strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        (k, v), (k_again, v_again) = ours, theirs
        assert k.any() and torch.equal(k, k_again) and torch.equal(v, v_again)
        saved += 1
    assert saved == len(WINDOWS) - NUM_DROPPED, "and the rule makes the others be computed again"


def parts_of_every_kind() -> DeviceMemory:
    """Rows of several kinds in blocks, a ring and a whole state in slots, and what is never saved."""
    ring = Part(name="window", shape=(6, 528), dtype="uint8")
    rows = Part(name="window", shape=(4, 528), dtype="uint8")
    state = Part(name="recurrent", shape=(2, 3, 5), dtype="float32")
    scratch = Part(name="scratch", shape=(3,), dtype="bfloat16")
    compressed = Part(name="compressed", shape=(1, 528), dtype="uint8")
    index = Part(name="index", shape=(1, 8), dtype="bfloat16")
    layers = [
        LayerLayout(blocks=(compressed, index), slots=(ring, scratch), segments=(rows,)),
        paged_layer(num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16"),
        LayerLayout(slots=(state,), segments=(state,)),
        LayerLayout(),
        LayerLayout(blocks=(compressed,), slots=(ring,)),
    ]
    layout = ModelLayout.of(layers, block_size=4, rule=BoundaryRule(num_segments=2))
    return DeviceMemory(
        layout, num_blocks=4, num_slots=3, num_segments=4, max_rows=8, device=torch.device("cpu")
    )


def views(made: DeviceMemory) -> Iterator[tuple[str, torch.Tensor]]:
    """Of each layer's parts: where they are, all blocks', slots' or segments'."""
    for i, layer in enumerate(made.layers):
        if isinstance(layer, LayerKV):
            yield from ((f"blocks {i} {what}", x) for what, x in (("k", layer.k_PBHD), ("v", layer.v_PBHD)))
        elif isinstance(layer, LayerParts):
            for where in ("blocks", "slots", "segments"):
                yield from ((f"{where} {i} {name}", x) for name, x in getattr(layer, where).items())


def test_parts_of_every_kind_have_memory_of_their_own() -> None:
    made = parts_of_every_kind()
    for pool in (made.blocks, made.slots, made.segments):
        assert pool is not None
        pool.zero_()
    found = dict(views(made))
    assert len(found) == 11
    for value, view in enumerate(found.values(), start=1):
        view.fill_(value)
    for value, (name, view) in enumerate(found.items(), start=1):
        assert (view == value).all(), f"{name} is another's too"


def test_24_whatever_a_segment_and_a_block_have_comes_back_bit_for_bit() -> None:
    before, after = parts_of_every_kind(), parts_of_every_kind()
    some = torch.Generator().manual_seed(24)
    for made, fill in ((before, True), (after, False)):
        for pool in (made.blocks, made.slots, made.segments):
            assert pool is not None
            pool.copy_(torch.randint(0, 256, pool.shape, generator=some)) if fill else pool.zero_()
    name = BlockKey(b"x")
    pieces = [Piece(key=name, parent=name, block=BLOCK), Piece(key=name, parent=name, segment=SEGMENT)]
    data = np.empty(sum(map(before.num_bytes, pieces)), dtype=np.uint8)
    before.copy_out(pieces, data)
    after.copy_in(pieces, data)
    there = dict(views(after))
    for where, ours in views(before):
        at = {"blocks": BLOCK, "segments": SEGMENT}.get(where.split()[0])
        if at is None:
            assert not there[where].any(), "slots are nobody's to save"
        else:
            assert ours[at].any() and same_bytes(ours[at], there[where][at]), where


def test_all_parts_of_a_slot_are_copied_as_one() -> None:
    made = parts_of_every_kind()
    assert made.slots is not None
    made.slots.copy_(torch.randint(0, 256, made.slots.shape, generator=torch.Generator().manual_seed(7)))
    source, copy = 1, 2
    slots = [view for where, view in views(made) if where.startswith("slots")]
    assert len(slots) == 4 and not any(same_bytes(view[source], view[copy]) for view in slots)
    made.slots[copy] = made.slots[source]
    assert all(same_bytes(view[source], view[copy]) for view in slots)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
