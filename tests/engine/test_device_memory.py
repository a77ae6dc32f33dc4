"""What of a model's layers goes out with a block and a segment, and comes back."""

import numpy as np
import torch

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.model_layout import model_layout
from shoal.actors.engine.transfers import Piece
from shoal.kernels.backend import LayerKV, LayerRing
from shoal.kvstore.block_hash import BlockKey

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
        part.copy_(torch.rand(part.shape, generator=torch.Generator().manual_seed(part.numel())))
    return made


def rows(made: DeviceMemory) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Keys and values of each layer in that block or segment; None of one that is not stored."""

    def of(layer: LayerKV | LayerRing) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not isinstance(layer, LayerRing):
            return layer.k_PBHD[BLOCK], layer.v_PBHD[BLOCK]
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
