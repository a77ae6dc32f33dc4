"""The promise of test_exactness.py for windows in rings: state that was kept changes no bit either."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.actors.engine.block_pool import NO_BLOCK, BlockId
from shoal.actors.engine.build import DEVICE, LoadedModel, load_model
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.runner import ModelRunner, TokenRows
from shoal.actors.engine.step import SequenceId, SequenceStep, StepPlan
from shoal.actors.engine.transfers import Piece
from shoal.kernels import library
from shoal.kernels.cpu import CpuBackend
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.layout import KVDtype
from tests.checkpoints import tiny_mistral, tiny_qwen3
from tests.kernels.helpers import same_bits
from tests.oracle.recording import Served, Setup, greedy, serve
from tests.oracle.stepping import POISON, Pages, poison
from tests.oracle.stepping import Piece as Chunk

BACKEND = CpuBackend(2)
MAX_MODEL_LEN, BLOCK, AFTER = 1024, 16, 32
TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(760)]
OTHERS = [[(11 * i * i + 5 * i + n) % 500 for i in range(n)] for n in (70, 1, 300)]

Write = Callable[[Path], Path]


def mistral(window: int) -> Write:
    """Four layers, all with a window: no block has a byte."""
    return lambda directory: tiny_mistral(directory, **_LAYERS, sliding_window=window)


def qwen3(window: int) -> Write:
    """A paged layer above each that has a window: what it stores depends on layers that are not stored."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return lambda directory: tiny_qwen3(
        directory, **_LAYERS, layer_types=kinds, use_sliding_window=True, sliding_window=window
    )


_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "max_position_embeddings": MAX_MODEL_LEN}
MODELS: dict[str, Write] = {
    "mistral of 8": mistral(8),
    "mistral of 64": mistral(64),
    "mistral of 200": mistral(200),
    "qwen3 of 24": qwen3(24),
}
NUM_RINGS = {"mistral of 8": 4, "mistral of 64": 4, "mistral of 200": 4, "qwen3 of 24": 2}
WINDOW = {"mistral of 8": 8, "mistral of 64": 64, "mistral of 200": 200, "qwen3 of 24": 24}
DROPPED = [
    *[(name, m) for name in ("mistral of 8", "mistral of 64") for m in range(4)],
    *[("qwen3 of 24", m) for m in range(3)],
    *[("mistral of 200", m) for m in (0, 3)],
]
"""Layers that are not stored, at most as many as have a ring."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    return {
        name: load_model(write(tmp_path_factory.mktemp("checkpoint")), BACKEND, max_model_len=MAX_MODEL_LEN)
        for name, write in MODELS.items()
    }


@pytest.fixture(scope="module")
def whole(models: dict[str, LoadedModel]) -> dict[str, Tensor]:
    """All at once, each layer paged, as for a model whose sequences are no longer than its window."""
    logits = {}
    for name, model in models.items():
        pages = Pages(model, BACKEND, [TOKENS], max_model_len=1)
        assert pages.num_rings == 0
        logits[name] = pages.in_chunks([len(TOKENS)])
        assert logits[name].isfinite().all()
    return logits


def pages_of(
    model: LoadedModel,
    *sequences: list[int],
    backend: CpuBackend = BACKEND,
    dtype: KVDtype = "float32",
    dropped: int = 0,
) -> Pages:
    return Pages(
        model,
        backend,
        sequences,
        block_size=BLOCK,
        kv_cache_dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        num_dropped_layers=dropped,
    )


@pytest.mark.parametrize("sizes", [(760,), (7,), (64,), (300, 1, 1, 33)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_in_rings_are_one_prompt_in_pages(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], name: str, sizes: tuple[int, ...]
) -> None:
    pages = pages_of(models[name], TOKENS)
    assert pages.num_rings == NUM_RINGS[name]
    assert same_bits(pages.in_chunks(sizes), whole[name])


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_and_beside_others(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], name: str
) -> None:
    pages = pages_of(models[name], TOKENS[:320], *OTHERS)
    steps: list[list[Chunk]] = [
        [(1, 0, 70), (0, 0, 90), (2, 0, 1)],
        [(0, 90, 250), (3, 0, 299)],
        [(3, 299, 300), (0, 250, 251)],
        *[[(0, p, p + 1)] for p in range(251, 320)],
    ]
    mine = [
        logits
        for pieces in steps
        for piece, logits in zip(pieces, pages.step(*pieces), strict=True)
        if piece[0] == 0
    ]
    assert same_bits(torch.cat(mine), whole[name][:320])


@pytest.mark.parametrize(("name", "dropped"), DROPPED)
def test_every_boundary_can_be_taken_up(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], name: str, dropped: int
) -> None:
    """From blocks and segments, after as many tokens computed again as the rule says; what is captured then
    serves the next."""
    pages = pages_of(models[name], TOKENS, dropped=dropped)
    again = pages.rule.num_recomputed
    assert again == -(-dropped * (WINDOW[name] - 1) // BLOCK)
    end = min(len(TOKENS), (again + 5) * BLOCK + WINDOW[name] + AFTER)
    pages.in_chunks([37, 100], end=end)
    boundaries = range(again + 1, (end - AFTER) // BLOCK + 1, 2 if WINDOW[name] == 200 else 1)
    assert len(boundaries) > 3
    for boundary in boundaries:
        start = boundary - again
        pages.take_up(0, start=start * BLOCK, boundary=boundary * BLOCK)
        at, end = boundary * BLOCK, boundary * BLOCK + AFTER
        logits = pages.in_chunks([100], start=start * BLOCK, end=at) if again else None
        got = pages.in_chunks([1, 5], start=at, end=end)
        assert same_bits(got, whole[name][at:end]), boundary
        assert logits is None or logits.isfinite().all()


@pytest.mark.parametrize(("name", "dropped"), [case for case in DROPPED if case[1]])
def test_one_token_less_computed_again_is_not_enough(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], name: str, dropped: int
) -> None:
    """A layer that is not stored lacks W - 1 positions, and what it lacks is felt by the one above."""
    pages, lacking = pages_of(models[name], TOKENS, dropped=dropped), dropped * (WINDOW[name] - 1)
    pages.in_chunks([len(TOKENS)])
    for start in (96, 48):  # of what comes after a boundary only a part is computed again
        first_right = start + lacking
        pages.take_up(0, start=start, boundary=first_right)
        got = pages.in_chunks([first_right + AFTER], start=start, end=first_right + AFTER)
        expected = whole[name][start : first_right + AFTER]
        assert same_bits(got[lacking:], expected[lacking:])
        assert not same_bits(got[lacking - 1], expected[lacking - 1]), "it was right before"


@pytest.mark.parametrize("name", ["mistral of 8", "mistral of 64"])
def test_state_of_before_is_needed(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], name: str
) -> None:
    """Of the segments of a boundary none may be missing: the slot they would go to holds NaN."""
    pages = pages_of(models[name], TOKENS[:200])
    pages.in_chunks([200])
    segments = len(pages.rule.segments_at(8))
    for missing in range(segments):
        pages.take_up(0, start=128, boundary=128, without=missing)
        assert not same_bits(pages.in_chunks([32], start=128, end=160), whole[name][128:160])
    pages.take_up(0, start=128, boundary=128)
    assert same_bits(pages.in_chunks([32], start=128, end=160), whole[name][128:160])


@pytest.mark.parametrize("isa", library.instruction_sets())
def test_with_other_threads_and_instruction_sets(
    models: dict[str, LoadedModel], whole: dict[str, Tensor], isa: str
) -> None:
    for threads, name in ((1, "mistral of 64"), (3, "qwen3 of 24")):
        pages = pages_of(models[name], TOKENS[:180], backend=CpuBackend(threads, isa), dropped=1)
        assert same_bits(pages.in_chunks([60]), whole[name][:180])
        again = pages.rule.num_recomputed * BLOCK
        pages.take_up(0, start=144 - again, boundary=144)
        assert same_bits(pages.in_chunks([100], start=144 - again)[again:], whole[name][144:180])


@pytest.mark.parametrize("name", ["mistral of 64", "qwen3 of 24"])
def test_bfloat16_state_is_as_exact(models: dict[str, LoadedModel], name: str) -> None:
    at_once = pages_of(models[name], TOKENS[:200], dtype="bfloat16").in_chunks([200])
    pages = pages_of(models[name], TOKENS[:200], dtype="bfloat16")
    assert same_bits(pages.in_chunks([50, 1, 7]), at_once)
    pages.take_up(0, start=112, boundary=112)
    assert same_bits(pages.in_chunks([9], start=112), at_once[112:])


def piece(*, block: BlockId = NO_BLOCK, segment: BlockId = NO_BLOCK) -> Piece:
    """Its names are of no concern to a device."""
    return Piece(key=BlockKey(b"key"), parent=BlockKey(b"parent"), block=block, segment=segment)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "dropped"), [("mistral of 64", 1), ("qwen3 of 24", 0), ("qwen3 of 24", 1)])
def test_a_runner_takes_up_what_another_has_saved(
    models: dict[str, LoadedModel], name: str, dropped: int, dtype: KVDtype
) -> None:
    """What leaves one machine as bytes goes to other blocks, segments and another slot on the next."""
    here, there = (Machine(models[name], dtype, dropped) for _ in range(2))
    again, boundary, end = here.memory.layout.rule.num_recomputed, 8, 150
    start = boundary - again
    expected = here.logits(
        here.step(1, end=end, captures=tuple((b * BLOCK, BlockId(b)) for b in range(1, boundary + 1)))
    )
    blocks = [BlockId(b) for b in range(1, boundary + 1)]
    segments = [BlockId(i + 1) for i in here.memory.layout.rule.segments_at(start)]
    saved = [*[piece(block=b) for b in blocks], *[piece(segment=b) for b in segments]]
    data = np.empty(here.num_bytes(saved), dtype=np.uint8)
    here.memory.copy_out(saved, data)

    moved = {b: BlockId(b + 3) for b in [*blocks, *segments]}
    there.memory.copy_in(
        [*[piece(block=moved[b]) for b in blocks], *[piece(segment=moved[b]) for b in segments]], data
    )
    beside = there.step(2, end=40)
    resumed = there.step(
        3,
        start=start * BLOCK,
        end=end,
        shared=tuple(moved[b] for b in blocks),
        restore=tuple(moved[b] for b in segments),
        valid_from=start * BLOCK,
        store_from=boundary * BLOCK,
    )
    for steps, first in (((beside, resumed), 40), ((resumed, beside), 0)):
        got = there.logits(*steps)[first:][again * BLOCK :]
        assert same_bits(got[: end - boundary * BLOCK], expected[boundary * BLOCK :])
    unsaved = [b for b in range(1, there.num_blocks) if b not in moved.values()]
    assert there.memory.segments is not None and (there.memory.segments[unsaved] == POISON).all()


class Machine:
    """A runner and its memory; sequence n has row n, slot n and blocks of its own."""

    num_blocks = 48

    def __init__(self, model: LoadedModel, dtype: KVDtype, dropped: int) -> None:
        layout = model.config.layout(
            block_size=BLOCK, dtype=dtype, max_model_len=MAX_MODEL_LEN, num_dropped_layers=dropped
        )
        self.memory = DeviceMemory(
            layout,
            num_blocks=self.num_blocks,
            num_slots=5,
            num_segments=self.num_blocks,
            max_rows=320,
            device=DEVICE,
        )
        poison(self.memory)
        rows = TokenRows(num_rows=5, max_model_len=MAX_MODEL_LEN, block_size=BLOCK, device=DEVICE)
        self.decoder = model.decoder(BACKEND, max_rows=320, max_logits=320)
        self.runner = ModelRunner(
            *(self.decoder, self.memory, rows, BACKEND, DEVICE),
            max_logits=320,
            vocab_size=model.config.vocab_size,
        )

    def step(
        self, sequence: int, *, end: int, start: int = 0, shared: tuple[BlockId, ...] = (), **more: Any
    ) -> SequenceStep:
        own = range(12 * (sequence - 1) + 1, 12 * sequence + 1)
        table = (*shared, *(BlockId(b) for b in own if b not in shared))
        return SequenceStep(
            sequence_id=SequenceId(sequence),
            row=sequence,
            start=start,
            end=end,
            block_table=table,
            slot=BlockId(sequence),
            known_tokens=tuple(TOKENS[:end]),
            **more,
        )

    @torch.inference_mode()
    def logits(self, *steps: SequenceStep) -> Tensor:
        plan = StepPlan(step_id=1, sequences=steps)
        return self.decoder.logits(self.runner.hidden_states(self.runner.pack(plan))).clone()

    def num_bytes(self, pieces: Sequence[Piece]) -> int:
        layout, num_blocks = self.memory.layout, sum(piece.block != NO_BLOCK for piece in pieces)
        num_segments = len(pieces) - num_blocks
        return num_blocks * layout.blocks.num_bytes + num_segments * layout.segments.num_bytes


@pytest.mark.parametrize(("name", "dropped"), [("mistral of 8", 3), ("mistral of 64", 1), ("qwen3 of 24", 1)])
def test_a_hit_computes_again_what_is_not_stored(
    models: dict[str, LoadedModel], name: str, dropped: int
) -> None:
    """Through the scheduler: a prompt, its next turn in an engine full of others', and a cold one."""
    prompt, again = TOKENS[:200], -(-dropped * (WINDOW[name] - 1) // BLOCK)
    setup = Setup(
        backend=BACKEND,
        block_size=BLOCK,
        max_num_batched_tokens=50,
        max_num_seqs=4,
        num_blocks=60,
        max_model_len=MAX_MODEL_LEN,
        num_dropped_layers=dropped,
    )
    cold = serve(models[name], setup, [greedy("it", prompt, 10)])
    served = Served(models[name], replace(setup, prefix_cache="radix"), watch=[5])
    served.serve([greedy(f"other {n}", tokens, 3) for n, tokens in enumerate(OTHERS)])
    served.serve([greedy("first turn", prompt[:150], 1)])
    recording = served.serve([greedy("it", prompt, 10)])
    boundary = 150 // BLOCK
    assert recording.num_cached_tokens["it"] == (boundary - again) * BLOCK
    ours, expected = recording.digests[SequenceId(5)], cold.digests[SequenceId(1)]
    assert ours == {p: bits for p, bits in expected.items() if p >= boundary * BLOCK}
    assert recording.tokens["it"] == cold.tokens["it"]


@pytest.mark.parametrize(
    ("pieces", "size", "message"),
    [
        ([piece(block=BlockId(1))], 10, "1 pieces take 8192 bytes, not uint8 \\(10,\\)"),
        ([piece()], 0, "a piece is a block or a segment"),
        ([piece(block=BlockId(1), segment=BlockId(1))], 0, "a piece is a block or a segment"),
    ],
)
def test_pieces_that_are_none_are_refused(
    models: dict[str, LoadedModel], pieces: list[Piece], size: int, message: str
) -> None:
    machine = Machine(models["qwen3 of 24"], "bfloat16", 0)
    with pytest.raises(ValueError, match=message):
        machine.memory.copy_out(pieces, np.empty(size, dtype=np.uint8))
