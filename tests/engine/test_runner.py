"""Where rows and tokens lie on the device: the examples of mini-sglang's chapter on pool and tables."""

import numpy as np
import torch

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.model_layout import model_layout
from shoal.actors.engine.pools import blocks_needed
from shoal.actors.engine.runner import TokenRows
from shoal.actors.engine.step import SequenceId, SequenceStep, StepPlan
from shoal.kernels.backend import LayerKV, Rows
from shoal.kernels.reference import TorchBackend

CPU = torch.device("cpu")


def a_step(row: int, tokens: tuple[int, ...], *blocks: int) -> SequenceStep:
    return SequenceStep(
        sequence_id=SequenceId(row),
        row=row,
        start=0,
        end=len(tokens),
        block_table=tuple(BlockId(block) for block in blocks),
        known_tokens=tokens,
    )


def the_rows() -> TokenRows:
    return TokenRows(num_rows=3, max_model_len=64, block_size=16, device=CPU)


def test_locations() -> None:
    """A sequence of 20 tokens in blocks 2 and 5, one of 5 tokens in block 10, 16 tokens a block."""
    assert blocks_needed(history=17, block_size=16) == blocks_needed(history=20, block_size=16) == 2
    layout = model_layout(
        [None], num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", max_model_len=64
    )
    memory = DeviceMemory(layout, num_blocks=11, max_rows=25, device=CPU)
    memory.blocks.zero_()
    (kv,) = memory.layers
    assert isinstance(kv, LayerKV)
    rows = the_rows()
    rows.load(StepPlan(step_id=1, sequences=(a_step(1, (7,) * 20, 2, 5), a_step(2, (7,) * 5, 10))))
    k_THD = torch.arange(1.0, 26.0)[:, None, None].expand(25, 1, 4).contiguous()
    TorchBackend().store(
        k_THD,
        -k_THD,
        kv,
        Rows(
            sequence_T=torch.tensor([0] * 20 + [1] * 5, dtype=torch.int32),
            position_T=torch.tensor([*range(20), *range(5)], dtype=torch.int32),
            table_SN=rows.tables(np.array([1, 2])),
        ),
    )
    for stored, sign in ((kv.k_PBHD, 1), (kv.v_PBHD, -1)):
        by_location = stored.reshape(-1, 4)[:, 0] * sign
        locations = [int((by_location == n).nonzero()) for n in range(1, 26)]
        assert locations[:20] == [*range(32, 48), *range(80, 84)]
        assert locations[20:] == [160, 161, 162, 163, 164]


def test_a_drawn_token_is_read_by_the_next_step_and_never_leaves_the_device() -> None:
    rows = the_rows()
    prompts = {1: (785, 6722, 315, 9625, 374), 2: (16, 488, 220, 16, 284, 220, 17, 11)}
    rows.load(StepPlan(step_id=1, sequences=tuple(a_step(row, p, row) for row, p in prompts.items())))
    for row, prompt in prompts.items():
        places = rows.places(np.full(len(prompt), row), np.arange(len(prompt)))
        assert tuple(rows.tokens(places)) == prompt
    ends = rows.places(np.array([1, 2]), np.array([len(prompt) for prompt in prompts.values()]))
    rows.put(ends, torch.tensor([12095, 220]))
    assert list(rows.tokens(ends)) == [12095, 220]
    assert [rows.of(row)[len(prompt)].item() for row, prompt in prompts.items()] == [12095, 220]


def test_a_table_is_read_anew_when_it_has_changed() -> None:
    rows = the_rows()
    for table in ((1, 2, 3), (1, 4), (5,)):
        rows.load(StepPlan(step_id=1, sequences=(a_step(1, (7,), *table),)))
        padded = [*table, 0, 0][:3]
        assert rows.tables(np.array([1]))[:, :3].tolist() == [padded]
