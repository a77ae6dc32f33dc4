"""The promise of test_exactness.py for every family of the lean decoder, on steps written out by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.kernels import library
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import (
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tests.kernels.helpers import same_bits
from tests.oracle.stepping import Pages, Piece, logits_of

TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(310)]
OTHERS = [[(11 * i * i + 5 * i + n) % 500 for i in range(n)] for n in (1, 40, 24, 130)]
BACKEND = CpuBackend(2)


def biased_llama(directory: Path) -> Path:
    return tiny_llama(directory, attention_bias=True, mlp_bias=True)


def wide_mistral(directory: Path) -> Path:
    """A window of a tile and a half of keys, no multiple of a block."""
    return tiny_mistral(directory, sliding_window=100)


def half_windowed_qwen3(directory: Path) -> Path:
    return tiny_qwen3(directory, use_sliding_window=True, sliding_window=24, max_window_layers=1)


@pytest.fixture(
    scope="module",
    params=[
        tiny_qwen3,
        tiny_mistral,
        tiny_qwen2,
        tiny_gemma3,
        tiny_gpt_oss,
        biased_llama,
        wide_mistral,
        half_windowed_qwen3,
    ],
    ids=lambda write: write.__name__,
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    write: Callable[[Path], Path] = request.param
    return load_model(write(tmp_path_factory.mktemp("checkpoint")), BACKEND, max_model_len=512)


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel) -> Tensor:
    logits = logits_of(loaded, BACKEND, TOKENS)
    assert logits.isfinite().all()
    return logits


@pytest.mark.parametrize("sizes", [(7,), (128,), (300, 1), (23, 1, 1, 40)], ids=str)
def test_in_chunks(loaded: LoadedModel, whole: Tensor, sizes: tuple[int, ...]) -> None:
    assert same_bits(logits_of(loaded, BACKEND, TOKENS, *sizes), whole)


def test_one_token_a_step(loaded: LoadedModel, whole: Tensor) -> None:
    assert same_bits(logits_of(loaded, BACKEND, TOKENS[:100], 1), whole[:100])


def test_with_larger_blocks(loaded: LoadedModel, whole: Tensor) -> None:
    assert same_bits(Pages(loaded, BACKEND, [TOKENS], block_size=128).in_chunks((64,)), whole)


@pytest.mark.parametrize("isa", library.instruction_sets())
def test_with_other_threads_and_instruction_sets(loaded: LoadedModel, whole: Tensor, isa: str) -> None:
    for threads in (1, 3):
        assert same_bits(logits_of(loaded, CpuBackend(threads, isa), TOKENS[:150], 100, 1), whole[:150])


def test_beside_others(loaded: LoadedModel, whole: Tensor) -> None:
    """Prompts, chunks and single tokens of five sequences in the same steps."""
    pages = Pages(loaded, BACKEND, [TOKENS, *OTHERS])
    steps: list[list[Piece]] = [
        [(4, 0, 100), (0, 0, 90), (1, 0, 1)],
        [(0, 90, 91), (2, 0, 40), (4, 100, 101)],
        [(3, 0, 24), (0, 91, 200), (4, 101, 130)],
        [(0, 200, 310)],
    ]
    mine: list[Tensor] = []
    last: list[Tensor] = []
    for pieces in steps:
        for piece, logits in zip(pieces, pages.step(*pieces), strict=True):
            mine += [logits] if piece[0] == 0 else []
            last += [logits] if piece[0] == 4 else []
    assert same_bits(torch.cat(mine), whole)
    assert same_bits(torch.cat(last), logits_of(loaded, BACKEND, OTHERS[3])), "its neighbours are exact too"


def test_bfloat16_keys_and_values_are_as_exact(loaded: LoadedModel) -> None:
    def in_chunks(*sizes: int) -> Tensor:
        return Pages(loaded, BACKEND, [TOKENS[:140]], kv_cache_dtype="bfloat16").in_chunks(sizes)

    assert same_bits(in_chunks(50, 1), in_chunks(140))
