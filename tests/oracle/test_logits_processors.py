"""Against transformers' own processors, and against vLLM's formulas as its documentation gives them."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from shoal.kernels.reference import adjusted
from tests.kernels.helpers import BEST, adjustment, same_bits, sampling

VOCABULARY = 64


def random_logits(seed: int) -> Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


token_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=100)
penalties = st.floats(-2, 2, width=32)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 999), tokens=token_ids, penalty=st.floats(0.125, 4, width=32), data=st.data())
def test_repetition_is_transformers(
    seed: int, tokens: list[int], penalty: float, data: st.DataObject
) -> None:
    logits, prompt = random_logits(seed), data.draw(st.integers(0, len(tokens)))
    expected = RepetitionPenaltyLogitsProcessor(penalty=penalty)(torch.tensor([tokens]), logits.clone())
    by = adjustment(tokens=tokens, prompt=prompt, repetition=penalty)
    assert same_bits(adjusted(logits, [by]), expected)
    for temperature in (0, 1):
        drawn = BEST.sample(expected, sampling(1, temperature=temperature)).tolist()
        how = sampling(1, temperature=temperature, adjustments=[by])
        assert BEST.sample(logits, how).tolist() == drawn


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 999), tokens=token_ids, frequency=penalties, presence=penalties, data=st.data())
def test_frequency_and_presence_are_vllm_s(
    seed: int, tokens: list[int], frequency: float, presence: float, data: st.DataObject
) -> None:
    """logits -= frequency_penalties * output_bin_counts; logits -= presence_penalties * output_mask."""
    logits, prompt = random_logits(seed), data.draw(st.integers(0, len(tokens)))
    output_bin_counts = torch.bincount(torch.tensor(tokens[prompt:], dtype=torch.int64), minlength=VOCABULARY)
    expected = logits - torch.tensor([[frequency]]) * output_bin_counts
    expected -= torch.tensor([[presence]]) * (output_bin_counts > 0)
    by = adjustment(tokens=tokens, prompt=prompt, frequency=frequency, presence=presence)
    assert torch.equal(adjusted(logits, [by]), expected)
    how = sampling(1, temperature=0, adjustments=[by])
    assert BEST.sample(logits, how).tolist() == expected.argmax(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), min_p=st.floats(0.001, 1))
def test_min_p_draws_among_what_transformers_keeps(seed: int, min_p: float) -> None:
    """And draws each of them that is not rare."""
    logits = random_logits(seed)
    warper: Any = MinPLogitsWarper(min_p=min_p)
    warped: Tensor = warper(None, logits.clone())
    p = warped.softmax(-1)[0]
    draws = 2000
    tokens = set(BEST.sample(logits.repeat(draws, 1), sampling(draws, min_p=min_p)).tolist())
    assert tokens <= set(p.nonzero().flatten().tolist())
    assert tokens >= set((p > 20 / draws).nonzero().flatten().tolist())
