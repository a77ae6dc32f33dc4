"""DeepSeek V4 on the library path: transformers' logits within 1e-4; from any cut its own within 1e-5."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.models import deepseek_v4
from shoal.actors.engine.models.decoder_config import UnsupportedModel
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from shoal.kvstore.layout import KVDtype
from tests.checkpoints import tiny_deepseek_v4
from tests.oracle.cuts import Cuts, Place, Subject, assert_every_cut_is_right
from tests.oracle.stepping import Pages
from tests.oracle.stepping import Piece as Chunk
from tests.oracle.test_library import theirs

BACKEND = CpuBackend(2)
TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(400)]
OTHER = [(11 * i * i + 5 * i + 1) % 500 for i in range(150)]
TOLERANCE, OWN_TOLERANCE = 1e-4, 1e-5

FULL_SIZE: dict[str, Any] = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
}
SHAPES = {
    "window of 16": ({"sliding_window": 16}, 32),
    "window of 128": ({"sliding_window": 128}, 32),
    "window and block of 128": (FULL_SIZE | {"sliding_window": 128}, 128),
}
"""What is different, and a block's size."""


def name_as_published(config: Path) -> None:
    """Layers are told by their ratios, and how many of the first route by the token."""
    said = json.loads(config.read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates"):
        del said[name]
    config.write_text(json.dumps(said | {"compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1}))


class Model:
    def __init__(self, shape: str, directory: Path) -> None:
        overrides, self.block_size = SHAPES[shape]
        self.checkpoint = tiny_deepseek_v4(directory, **overrides)
        if "compress_rates" in overrides:
            name_as_published(self.checkpoint / "config.json")
        self.loaded = load_model(self.checkpoint, BACKEND, max_model_len=512)
        peer = theirs(self.checkpoint)
        with torch.inference_mode():
            self.expected: tuple[Tensor, Tensor] = tuple(
                peer(torch.tensor([ids]), use_cache=False).logits[0] for ids in (TOKENS, OTHER)
            )

    def pages(self, *, dtype: KVDtype = "float32", dropped: int = 0, drafts: int = 0) -> Pages:
        return Pages(
            self.loaded,
            BACKEND,
            [TOKENS, OTHER],
            block_size=self.block_size,
            kv_cache_dtype=dtype,
            num_dropped_layers=dropped,
            num_draft_tokens=drafts,
        )


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("checkpoint"))


CHUNKS = {
    "at once": (400,),
    "mixed": (64, 1, 7, 128),
    "of 13": (13,),
    "of 32": (32,),
    "single tokens": (*[1] * 24, 90, *[1] * 40, 400),
}


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_logits_in_chunks_of_any_size(model: Model, sizes: tuple[int, ...]) -> None:
    assert (model.pages().in_chunks(sizes) - model.expected[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_logits_in_mixed_batches(model: Model, seed: int) -> None:
    """Chunks, whole prompts and single tokens beside each other."""
    draw, pages, done = random.Random(seed), model.pages(), [0, 0]
    lengths = [len(TOKENS), len(OTHER)]
    while done != lengths:
        pieces: list[Chunk] = []
        for s in draw.sample((0, 1), 2):
            if left := lengths[s] - done[s]:
                count = min(left, draw.choice([1, 1, 5, 40, 120]))
                pieces.append((s, done[s], done[s] + count))
                done[s] += count
        for (s, start, end), logits in zip(pieces, pages.step(*pieces), strict=True):
            assert (logits - model.expected[s][start:end]).abs().max() < TOLERANCE, (s, start, end)


@torch.inference_mode()
def test_greedy_tokens_are_those_of_generate(model: Model) -> None:
    prompt = TOKENS[:150]
    output = (
        theirs(model.checkpoint)
        .generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=2
        )[0]
        .tolist()
    )
    pages, sequence = model.pages(), list(prompt)
    pages.sequences = [sequence, OTHER]
    (logits,) = pages.step((0, 0, len(prompt)))
    for position in range(len(prompt), len(output)):
        sequence.append(int(logits[-1].argmax()))
        (logits,) = pages.step((0, position, position + 1))
    assert sequence == output


@pytest.mark.parametrize("dropped", range(4))
def test_every_boundary_can_be_taken_up(model: Model, dropped: int) -> None:
    """From blocks and segments alone, in a slot of NaN: as if it had gone on, in the same chunks."""
    rule, block_size = model.pages(dropped=dropped).rule, model.block_size
    for boundary in range(block_size * (1 + rule.num_recomputed), 400, block_size):
        pages, start = model.pages(dropped=dropped), boundary - rule.num_recomputed * block_size
        first, size = start - rule.num_rewound, block_size + 3
        expected = pages.in_chunks([first, size])
        pages.take_up(0, start=start, boundary=boundary)
        resumed = pages.in_chunks([size], start=first)
        assert (resumed[boundary - first :] - expected[boundary:]).abs().max() < OWN_TOLERANCE, boundary


@pytest.mark.parametrize("again", range(4))
def test_a_stretch_of_which_less_is_computed_again_is_felt(model: Model, again: int) -> None:
    pages = model.pages()
    pages.in_chunks([400])
    boundary = 2 * model.block_size
    pages.take_up(0, start=boundary, boundary=boundary)
    (resumed,) = pages.step((0, boundary - again, boundary + 8))
    assert resumed[-1].isnan().all()


def test_segments_that_are_missing_are_felt(model: Model) -> None:
    pages = model.pages()
    pages.in_chunks([400])
    boundary = 2 * model.block_size
    for missing in range(pages.rule.num_segments):
        pages.take_up(0, start=boundary, boundary=boundary, without=missing)
        (resumed,) = pages.step((0, boundary - pages.rule.num_rewound, boundary + 8))
        assert resumed[-1].isnan().all()


def test_30_rows_of_drafts_that_were_wrong_are_never_read(model: Model) -> None:
    """Nor are they in what is captured in the end."""
    pages, first, end = model.pages(drafts=5), 2 * model.block_size - 20, 2 * model.block_size + 20
    pages.in_chunks([first], end=first)
    for position in range(first, end):
        pages.sequences = [[*TOKENS[: position + 1], *[499] * 5], OTHER]
        (logits,) = pages.step((0, position, position + 6))
        assert (logits[0] - model.expected[0][position]).abs().max() < TOLERANCE, position
    pages.sequences, boundary = [TOKENS, OTHER], 2 * model.block_size
    pages.take_up(0, start=boundary, boundary=boundary)
    resumed = pages.in_chunks([400], start=boundary - 4)
    assert (resumed[4:] - model.expected[0][boundary:]).abs().max() < TOLERANCE


def test_rows_in_bfloat16_are_rounded_before_they_are_read(model: Model) -> None:
    """So chunks agree. A value that lies between two may be rounded to the other, and a query choose another
    row then: a few logits are far off, and none by much on average."""
    whole = model.pages(dtype="bfloat16").in_chunks([400])
    apart = (model.pages(dtype="bfloat16").in_chunks([64, 1, 7, 128]) - whole).abs()
    assert apart.mean() < (whole - model.expected[0]).abs().mean() < 0.1


@pytest.fixture(scope="module", params=["deepseek-v4-16", "deepseek-v4-128"])
def subject(request: pytest.FixtureRequest, subject_named: Callable[[str], Subject]) -> Subject:
    return subject_named(request.param)


@pytest.mark.parametrize("num_dropped", [0, 2])
def test_every_cut_has_the_logits_of_a_cold_machine(subject: Subject, num_dropped: int) -> None:
    assert_every_cut_is_right(replace(subject, num_dropped=num_dropped))


def test_prompts_of_every_length_have_the_logits_and_the_tokens_of_a_cold_machine(subject: Subject) -> None:
    """Whatever a block and its stretches have of it at the end."""
    cuts = Cuts(subject)
    lengths = [*range(33, 66), 95, 96, 97, 193, 222]
    expected = {length: cuts.cold(length, num_output=3) for length in lengths}
    assert len({tokens[-1] for tokens in expected.values()}) > 10, "they all say the same"
    for place in Place:
        for length, cut in zip(lengths, cuts.of(place, lengths, num_output=3), strict=True):
            assert cut.right and cut.tokens == expected[length], (place, length)


@torch.inference_mode()
def test_without_kernels(tmp_path: Path) -> None:
    checkpoint, backend = tiny_deepseek_v4(tmp_path), TorchBackend()
    expected = theirs(checkpoint)(torch.tensor([OTHER]), use_cache=False).logits[0]
    loaded = load_model(checkpoint, backend, max_model_len=256)
    ours = Pages(loaded, backend, [OTHER], block_size=32).in_chunks([100, 1])
    assert (ours - expected).abs().max() < TOLERANCE


def test_blocks_must_end_where_stretches_do(tmp_path: Path) -> None:
    loaded: LoadedModel = load_model(tiny_deepseek_v4(tmp_path), BACKEND, max_model_len=64)
    with pytest.raises(
        ValueError, match="--block-size 16 must be a multiple of 32 for DeepseekV4ForCausalLM"
    ):
        loaded.config.layout(block_size=16, dtype="float32", max_model_len=64)
    with pytest.raises(ValueError, match="cannot leave 5 of 4 sliding layers unstored"):
        loaded.config.layout(block_size=32, dtype="float32", max_model_len=64, num_dropped_layers=5)


def test_24_an_attention_that_is_not_what_ours_takes_it_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepseek_v4, "compress", lambda making, bias, *, overlaps: making[:, -1, 0, -32:])
    with pytest.raises(UnsupportedModel, match="DeepseekV4ForCausalLM cannot be served: "):
        load_model(tiny_deepseek_v4(tmp_path), BACKEND, max_model_len=64)
