"""What of a model's layers goes out with a block and a segment, and comes back."""

import numpy as np
import torch

from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.model_layout import model_layout
from shoal.actors.engine.transfers import Piece
from shoal.kernels.backend import LayerRing
from shoal.kvstore.block_hash import BlockKey

WINDOWS = (None, 5, None, 9, 5)
NUM_DROPPED = 1


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


def test_24_every_layer_comes_back_with_its_block_and_its_segment() -> None:
    """A layer whose rows were in neither would be taken up from whatever is there."""
    before, after = memory(), memory()
    for part in (after.blocks, after.segments):
        assert part is not None
        part.zero_()
    name = BlockKey(b"x")
    pieces = [Piece(key=name, parent=name, block=2), Piece(key=name, parent=name, segment=3)]
    data = np.empty(sum(map(before.num_bytes, pieces)), dtype=np.uint8)
    before.copy_out(pieces, data)
    after.copy_in(pieces, data)
    assert len(before.layers) == len(after.layers) == len(WINDOWS)
    dropped = 0
    for ours, theirs in zip(before.layers, after.layers, strict=True):
        if not isinstance(ours, LayerRing):
            assert torch.equal(ours.k_PBHD[2], theirs.k_PBHD[2]) and torch.equal(
                ours.v_PBHD[2], theirs.v_PBHD[2]
            )
            assert not theirs.k_PBHD[1].any()
        elif ours.segments is None:
            dropped += 1
        else:
            assert theirs.segments is not None
            assert torch.equal(ours.segments.k_PBHD[3], theirs.segments.k_PBHD[3])
            assert torch.equal(ours.segments.v_PBHD[3], theirs.segments.v_PBHD[3])
    assert dropped == NUM_DROPPED, "which the rule makes to be computed again"
