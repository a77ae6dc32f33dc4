"""How likely tokens are: near float64, the same bits everywhere, the likeliest in order."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import Backend, Logprobs
from shoal.kernels.reference import ln
from tests.kernels.helpers import BEST, NAN, REFERENCE, every_cpu, same_bits

BACKENDS: list[Backend] = [*every_cpu(), REFERENCE]


def of_all(backend: Backend, logits: Tensor, tokens: Sequence[int], top: int) -> Logprobs:
    return backend.logprobs(logits, torch.arange(len(logits)), torch.tensor(tokens), top)


def same(a: Logprobs, b: Logprobs) -> bool:
    pairs = ((a.logprob_R, b.logprob_R), (a.top_ids_RK, b.top_ids_RK), (a.top_RK, b.top_RK))
    return all(same_bits(x, y) for x, y in pairs)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
class TestExamples:
    def test_shares_of_one(self, backend: Backend) -> None:
        said = of_all(backend, torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log(), [1], 3)
        assert said.logprob_R.exp().tolist() == pytest.approx([0.25])
        assert said.top_ids_RK.tolist() == [[0, 1, 2]], "of equals the lower id comes first"
        assert said.top_RK.exp().tolist()[0] == pytest.approx([0.5, 0.25, 0.125])

    def test_rows_and_tokens_are_named(self, backend: Backend) -> None:
        logits = torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.0, 0.0]])
        said = backend.logprobs(logits, torch.tensor([2, 0, 2]), torch.tensor([0, 1, 1]), 1)
        assert said.logprob_R.tolist() == pytest.approx(
            [-math.log(2), -math.log(1 + math.exp(-1)), -math.log(2)]
        )
        assert said.top_ids_RK.tolist() == [[0], [1], [0]]

    def test_no_more_than_there_are(self, backend: Backend) -> None:
        said = of_all(backend, torch.zeros(2, 3), [0, 2], 20)
        assert said.top_ids_RK.tolist() == [[0, 1, 2]] * 2

    def test_none_of_the_others(self, backend: Backend) -> None:
        assert of_all(backend, torch.zeros(2, 3), [0, 2], 0).top_RK.shape == (2, 0)

    def test_the_only_token_is_certain(self, backend: Backend) -> None:
        assert of_all(backend, torch.tensor([[7.0]]), [0], 1).logprob_R.tolist() == [0.0]

    def test_what_cannot_be_comes_last(self, backend: Backend) -> None:
        said = of_all(backend, torch.tensor([[NAN, 1.0, -torch.inf, NAN, 1.0]]), [0], 5)
        assert said.logprob_R.tolist() == [-math.inf]
        assert said.top_ids_RK.tolist() == [[1, 4, 0, 2, 3]]
        assert said.top_RK.tolist()[0] == pytest.approx([-math.log(2)] * 2 + [-math.inf] * 3)

    def test_no_distribution(self, backend: Backend) -> None:
        odd = torch.tensor([[NAN] * 3, [-torch.inf] * 3, [0.0, torch.inf, torch.inf]])
        said = of_all(backend, odd, [0, 1, 2], 1)
        assert said.logprob_R.tolist() == [-math.inf] * 3
        assert said.top_ids_RK.tolist() == [[0], [0], [1]]

    def test_no_rows(self, backend: Backend) -> None:
        none = torch.empty(0, dtype=torch.int64)
        assert backend.logprobs(torch.zeros(2, 3), none, none, 2).top_ids_RK.shape == (0, 2)


@pytest.mark.parametrize("vocabulary", [1, 50, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_near_float64_and_the_same_bits_everywhere(vocabulary: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(9, vocabulary, generator=generator) * spread
    tokens = torch.randint(0, vocabulary, (9,), generator=generator).tolist()
    said = of_all(REFERENCE, logits, tokens, 20)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(said.logprob_R, exact[torch.arange(9), tokens], rtol=0, atol=2e-7)
    assert torch.allclose(said.top_RK, exact.topk(min(20, vocabulary)).values, rtol=0, atol=2e-7)
    for backend in every_cpu():
        assert same(of_all(backend, logits, tokens, 20), said)


def test_a_row_is_alone() -> None:
    logits = torch.randn(40, 777, generator=torch.Generator().manual_seed(1))
    together = of_all(BEST, logits, list(range(40)), 9)
    wide = torch.full((40, 900), 50.0)  # rows of a wider buffer
    wide[:, 100:877] = logits
    for t in range(40):
        mine = slice(t, t + 1)
        alone = of_all(BEST, wide[mine, 100:877], [t], 9)
        assert same_bits(alone.logprob_R, together.logprob_R[mine])
        assert same_bits(alone.top_RK, together.top_RK[mine])


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, -4.0, -math.inf, NAN]), min_size=1, max_size=90),
    top=st.integers(0, 100),
)
def test_the_likeliest_are_a_sort_s_first(logits: list[float], top: int) -> None:
    key = [-math.inf if math.isnan(x) else x for x in logits]
    expected = sorted(range(len(logits)), key=lambda i: (-key[i], i))[:top]
    said = of_all(BEST, torch.tensor([logits]), [0], top)
    assert said.top_ids_RK.tolist() == [expected]
    assert same(said, of_all(REFERENCE, torch.tensor([logits]), [0], top))


def test_ln_is_the_logarithm() -> None:
    x = torch.cat([torch.logspace(0, 19, 4000, base=2, dtype=torch.float64), torch.tensor([1.0, 1 + 2**-34])])
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    assert torch.allclose(ln(x), exact, rtol=4e-16, atol=1e-16)
    assert ln(torch.ones(1, dtype=torch.float64)).item() == 0


@pytest.mark.parametrize(("row", "token"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_what_is_outside_is_refused(row: int, token: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        BEST.logprobs(torch.zeros(2, 3), torch.tensor([row]), torch.tensor([token]), 1)
