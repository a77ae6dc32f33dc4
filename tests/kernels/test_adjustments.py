"""Bias and penalties: whose logits they change, in which order, and nobody else's."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import Adjustment, Backend
from shoal.kernels.reference import adjusted
from tests.kernels.helpers import BEST, NAN, REFERENCE, adjustment, every_cpu, same_bits, sampling

BACKENDS: list[Backend] = [*every_cpu(), REFERENCE]


def likeliest(backend: Backend, logits: Sequence[float], *adjustments: Adjustment) -> int:
    how = sampling(1, temperature=0, adjustments=adjustments)
    return int(backend.sample(torch.tensor([logits]), how)[0])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
class TestGreedy:
    """Two tokens: 0 is ahead, and its penalty decides whether it stays so."""

    def test_repetition_divides_what_is_positive(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=[0], prompt=1, repetition=2.9)) == 0
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=[0], prompt=1, repetition=3.1)) == 1

    def test_repetition_multiplies_what_is_negative(self, backend: Backend) -> None:
        assert likeliest(backend, [-1.0, -2.0], adjustment(tokens=[0], prompt=1, repetition=1.9)) == 0
        assert likeliest(backend, [-1.0, -2.0], adjustment(tokens=[0], prompt=1, repetition=2.1)) == 1

    def test_repetition_below_1_rewards(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 2.0], adjustment(tokens=[1], repetition=0.5)) == 1

    def test_repetition_counts_once_in_prompt_and_output_together(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=[0, 0, 0, 0], prompt=2, repetition=2)) == 0

    def test_frequency_counts_the_output_alone(self, backend: Backend) -> None:
        tokens = [0, 0, 1, 0, 0]
        assert likeliest(backend, [3.0, 0.0], adjustment(tokens=tokens, prompt=3, frequency=1.4)) == 0
        assert likeliest(backend, [3.0, 0.0], adjustment(tokens=tokens, prompt=3, frequency=1.6)) == 1
        assert likeliest(backend, [3.0, 0.0], adjustment(tokens=tokens, prompt=5, frequency=9)) == 0

    def test_presence_counts_once_in_the_output_alone(self, backend: Backend) -> None:
        tokens = [0, 0, 0]
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=tokens, presence=1.9)) == 0
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=tokens, prompt=2, presence=2.1)) == 1
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=tokens, prompt=3, presence=2.1)) == 0

    def test_negative_penalties_reward(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=[1], presence=-2.1)) == 1
        assert likeliest(backend, [3.0, 1.0], adjustment(tokens=[1, 1], frequency=-1.1)) == 1

    def test_bias_comes_before_penalties(self, backend: Backend) -> None:
        by = adjustment(tokens=[0], repetition=2, bias=[(0, 1.0)])
        assert likeliest(backend, [1.0, 1.2], by) == 1  # (1 + 1) / 2; the other way round it were 1.5

    def test_repetition_comes_before_frequency_and_presence(self, backend: Backend) -> None:
        by = adjustment(tokens=[0], repetition=2, frequency=1, presence=1)
        assert likeliest(backend, [8.0, 2.5], by) == 1  # 8 / 2 - 1 - 1; the other way round it were 3

    def test_an_id_may_be_biased_again(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 1.0], adjustment(bias=[(1, 1.5), (1, 1.0)])) == 1

    def test_a_forbidden_token_is_not_drawn_whatever_speaks_for_it(self, backend: Backend) -> None:
        forbidden = [(0, 100.0), (0, -torch.inf)]
        by = adjustment(tokens=[0], repetition=0.1, frequency=-2, presence=-2, bias=forbidden)
        assert likeliest(backend, [torch.inf, -50.0], by) == 1
        how = sampling(200, adjustments=[adjustment(t, bias=forbidden) for t in range(200)])
        assert backend.sample(torch.tensor([[9.0, -5.0]]).repeat(200, 1), how).tolist() == [1] * 200

    def test_everything_forbidden_draws_token_0(self, backend: Backend) -> None:
        everything = adjustment(bias=[(i, -torch.inf) for i in range(3)])
        for temperature in (0, 1):
            how = sampling(1, temperature=temperature, adjustments=[everything])
            assert backend.sample(torch.tensor([[1.0, 2.0, 3.0]]), how).tolist() == [0]

    def test_the_same_bias_on_everything_changes_nothing(self, backend: Backend) -> None:
        logits = torch.arange(8.0).repeat(50, 1)  # whole numbers, so that nothing is rounded
        everything = [adjustment(t, bias=[(i, -100.0) for i in range(8)]) for t in range(50)]
        with_bias = backend.sample(logits, sampling(50, adjustments=everything))
        assert with_bias.tolist() == backend.sample(logits, sampling(50)).tolist()

    def test_nan_stays_nan(self, backend: Backend) -> None:
        by = adjustment(tokens=[0, 1, 2], repetition=2, frequency=1, presence=1, bias=[(0, 1.0)])
        assert likeliest(backend, [NAN, -3.0, NAN], by) == 1

    def test_no_tokens_yet(self, backend: Backend) -> None:
        assert likeliest(backend, [3.0, 1.0], adjustment(repetition=9, frequency=9, presence=9)) == 0

    def test_only_the_named_row_changes(self, backend: Backend) -> None:
        logits = torch.tensor([[3.0, 1.0]]).repeat(4, 1)
        by = [adjustment(2, tokens=[0], presence=9), adjustment(1, bias=[(1, 9.0)])]
        assert backend.sample(logits, sampling(4, temperature=0, adjustments=by)).tolist() == [0, 1, 1, 0]
        assert logits.tolist() == [[3.0, 1.0]] * 4, "the logits are the caller's"


def by_hand(logits: Sequence[float], tokens: Sequence[int], by: Adjustment) -> list[np.float32]:
    """The same sentences, one token at a time."""
    x = [np.float32(logit) for logit in logits]
    for token_id, added in zip(by.bias_ids.tolist(), by.bias.tolist(), strict=True):
        x[token_id] += np.float32(added)
    repetition, output = np.float32(by.repetition_penalty), list(tokens[by.num_prompt_tokens :])
    for token_id in set(tokens):
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
    for token_id in set(output):
        x[token_id] -= np.float32(by.frequency_penalty) * np.float32(output.count(token_id))
        x[token_id] -= np.float32(by.presence_penalty)
    return x


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocabulary=st.integers(1, 40))
def test_the_reference_says_what_is_written(data: st.DataObject, vocabulary: int) -> None:
    """And every backend draws from the same logits."""
    ids, numbers = st.integers(0, vocabulary - 1), st.floats(-2, 2, width=32)
    logits = data.draw(st.lists(st.floats(-30, 30, width=32), min_size=vocabulary, max_size=vocabulary))
    tokens = data.draw(st.lists(ids, max_size=60))
    by = adjustment(
        tokens=tokens,
        prompt=data.draw(st.integers(0, len(tokens))),
        repetition=data.draw(st.floats(0.125, 8, width=32)),
        frequency=data.draw(numbers),
        presence=data.draw(numbers),
        bias=data.draw(st.lists(st.tuples(ids, st.floats(-100, 100, width=32)), max_size=8)),
    )
    expected = torch.tensor(np.array([by_hand(logits, tokens, by)]))
    assert torch.equal(adjusted(torch.tensor([logits]), [by]), expected)
    for temperature in (0, 1):
        drawn = BEST.sample(expected, sampling(1, temperature=temperature)).tolist()
        for backend in (BEST, REFERENCE):
            how = sampling(1, temperature=temperature, adjustments=[by])
            assert backend.sample(torch.tensor([logits]), how).tolist() == drawn


def long_sequences(rows: int, vocabulary: int) -> tuple[Tensor, list[Adjustment]]:
    """Logits and 3,000 tokens a row; every third row has nothing to adjust."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    tokens = (torch.rand(rows, 3000, generator=generator) ** 4 * vocabulary).long()
    by = [
        adjustment(
            t,
            tokens[t].tolist(),
            prompt=1000 + t,
            repetition=1.0 + t % 2 * 0.3,
            frequency=0.1,
            presence=0.5 * (t % 5),
            bias=[(t, 2.0), (3 * t, -torch.inf)],
        )
        for t in range(rows)
        if t % 3
    ]
    return logits, by


@pytest.mark.parametrize("vocabulary", [97, 49_152])
def test_every_backend_draws_the_same_tokens(vocabulary: int) -> None:
    logits, by = long_sequences(12, vocabulary)
    untouched = logits.clone()
    how = sampling(12, adjustments=by)
    tokens = REFERENCE.sample(logits, how).tolist()
    for backend in every_cpu():
        assert backend.sample(logits, how).tolist() == tokens
    assert same_bits(logits, untouched)


def test_a_row_draws_alone() -> None:
    logits, by = long_sequences(24, 501)
    together = BEST.sample(logits, sampling(24, adjustments=by)).tolist()
    of_row = {adjustment.row: adjustment for adjustment in by}
    for t in range(24):
        alone = [replace(of_row[t], row=0)] if t in of_row else []
        how = sampling(1, position=t, adjustments=alone)
        assert BEST.sample(logits[t : t + 1], how).tolist() == [together[t]]


@pytest.mark.parametrize(
    "wrong",
    [
        [adjustment(2, bias=[(0, 1.0)])],
        [adjustment(-1, bias=[(0, 1.0)])],
        [adjustment(0, bias=[(0, 1.0)]), adjustment(0, bias=[(1, 1.0)])],
        [adjustment(0, tokens=[1, 4], presence=1)],
        [adjustment(0, tokens=[-1, 1], prompt=2, repetition=2)],
        [adjustment(0, bias=[(4, 1.0)])],
        [adjustment(0, bias=[(-1, 1.0)])],
        [adjustment(0, tokens=[1], prompt=2)],
    ],
)
def test_what_is_outside_is_refused(wrong: list[Adjustment]) -> None:
    """And leaves nothing behind that a later draw could see."""
    logits = torch.tensor([[3.0, 2.5, 1.0, 0.0]]).repeat(2, 1)
    for backend in every_cpu():
        with pytest.raises(ValueError, match=r"adjustments|tokens"):
            backend.sample(logits, sampling(2, adjustments=wrong))
        later = [adjustment(t, tokens=[0], presence=1) for t in range(2)]
        assert backend.sample(logits, sampling(2, temperature=0, adjustments=later)).tolist() == [1, 1]
