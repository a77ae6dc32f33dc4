"""A real model of two kinds of layers. Slow, and its wheels are large: `pytest -m gemma tests/oracle`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.actors.engine.build import DEVICE, LoadedModel, load_model
from shoal.actors.engine.models.decoder_config import DecoderConfig, load_config
from shoal.actors.engine.models.lean_decoder import LeanDecoder
from shoal.actors.engine.models.lean_weights import DecoderWeights
from shoal.actors.engine.models.rope import rope_frequencies, rotary_tables
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import gemma3_270m
from tests.kernels.helpers import same_bits
from tests.oracle.stepping import logits_of

pytestmark = pytest.mark.gemma

BACKEND = CpuBackend(2)
MAX_MODEL_LEN, WINDOW = 1024, 512
STORY = """The fox came down to the river at dusk, when the water was the colour of slate. She had walked
all day along the old railway, past the mill and the empty houses, and now she was thirsty. On the other bank
a boy sat with a fishing rod and watched her drink. He did not move. She looked at him once, and then, since
he seemed to be a kind of tree, she drank again.
"""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return gemma3_270m()


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def gemma(checkpoint: Path) -> LoadedModel:
    """With logits of every 64th token of 262,144: a prompt's are not a gigabyte then."""
    whole = load_model(checkpoint, BACKEND, max_model_len=MAX_MODEL_LEN)
    assert isinstance(whole.config, DecoderConfig) and isinstance(whole.weights, DecoderWeights)
    head = BACKEND.pack([whole.weights.embedding_VN[::64].contiguous()])
    config = replace(whole.config, vocab_size=head.num_outputs)
    weights = replace(whole.weights, head=head)
    rotaries = rotary_tables(
        rope_frequencies(load_config(checkpoint), MAX_MODEL_LEN, config.head_dim), MAX_MODEL_LEN, DEVICE
    )
    return replace(
        whole, config=config, weights=weights, decoder=partial(LeanDecoder, config, weights, rotaries)
    )


@pytest.fixture(scope="module")
def tokens(checkpoint: Path) -> list[int]:
    """Of the story, told until it is longer than a window."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ids: list[int] = tokenizer(STORY * 8)["input_ids"][:600]
    assert len(ids) == 600 > WINDOW and ids[0] == tokenizer.bos_token_id
    return ids


@pytest.fixture(scope="module")
def whole(gemma: LoadedModel, tokens: list[int]) -> Tensor:
    return logits_of(gemma, BACKEND, tokens)


@pytest.fixture(scope="module")
def their_last(theirs: Any, tokens: list[int]) -> Tensor:
    """Logits of the last 41 tokens, which see a window and no more: float32 [41, V]."""
    with torch.inference_mode():
        logits: Tensor = theirs(torch.tensor([tokens]), use_cache=False, logits_to_keep=41).logits[0]
    return logits


def test_the_conversion_kept_the_model(their_last: Tensor, tokens: list[int]) -> None:
    """It has read these sentences before: what comes next surprises it no more."""
    assert torch.nn.functional.cross_entropy(their_last[:-1], torch.tensor(tokens[-40:])) < 0.5


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() < 1e-3 * theirs.abs().max())


@torch.inference_mode()
def test_logits_are_those_of_transformers(
    theirs: Any, their_last: Tensor, tokens: list[int], whole: Tensor
) -> None:
    assert close(whole[-41:], their_last[:, ::64])
    assert close(whole[:300], theirs(torch.tensor([tokens[:300]]), use_cache=False).logits[0, :, ::64])


def test_chunks_change_no_bit(gemma: LoadedModel, tokens: list[int], whole: Tensor) -> None:
    chunks = logits_of(gemma, CpuBackend(1), tokens, 128, 1, 380, 1, 1, 1, 80)
    assert same_bits(chunks, whole)
