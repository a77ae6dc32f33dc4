"""Sampling: what is kept, what is drawn, and that a row draws from its own seed and position alone."""

import math
from itertools import pairwise
from typing import Unpack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.backend import Backend, Sampling
from shoal.kernels.reference import philox, uniform
from tests.kernels.helpers import BEST, NAN, REFERENCE, Wishes, every_cpu, sampling

BACKENDS: list[Backend] = [*every_cpu(), REFERENCE]


def logits_of(weights: list[float]) -> Tensor:
    return torch.tensor([weights]).log()


def drawn(backend: Backend, weights: list[float], draws: int = 400, **wishes: Unpack[Wishes]) -> list[int]:
    """How often each id comes up."""
    logits = logits_of(weights).expand(draws, -1).contiguous()
    tokens = backend.sample(logits, sampling(draws, **wishes)).tolist()
    return [tokens.count(i) for i in range(len(weights))]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
class TestWhatIsKept:
    def test_temperature_0_takes_the_largest_and_of_equals_the_first(self, backend: Backend) -> None:
        logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [NAN, -5.0, NAN, -4.0], [-2.0, -1.0, -1.0, NAN]])
        assert backend.sample(logits, sampling(3, temperature=0)).tolist() == [1, 3, 1]

    def test_all_have_a_chance(self, backend: Backend) -> None:
        assert all(drawn(backend, [0.1, 0.4, 0.2, 0.3]))

    def test_top_k_keeps_the_largest(self, backend: Backend) -> None:
        counts = drawn(backend, [0.1, 0.4, 0.2, 0.3], top_k=2)
        assert [n > 0 for n in counts] == [False, True, False, True]

    def test_top_k_takes_the_lower_ids_of_equals(self, backend: Backend) -> None:
        counts = drawn(backend, [0.1, 0.3, 0.3, 0.3], top_k=2)
        assert [n > 0 for n in counts] == [False, True, True, False]

    def test_top_k_beyond_the_vocabulary_keeps_all(self, backend: Backend) -> None:
        assert drawn(backend, [0.5, 0.5], top_k=99) == drawn(backend, [0.5, 0.5])

    def test_top_p_keeps_as_few_as_reach_it(self, backend: Backend) -> None:
        counts = drawn(backend, [0.1, 0.4, 0.2, 0.3], top_p=0.71)
        assert [n > 0 for n in counts] == [False, True, True, True]
        counts = drawn(backend, [0.1, 0.4, 0.2, 0.3], top_p=0.69)
        assert [n > 0 for n in counts] == [False, True, False, True]

    def test_top_p_that_is_reached_exactly_needs_no_more(self, backend: Backend) -> None:
        counts = drawn(backend, [1.0, 1.0, 1.0, 1.0], top_p=0.5)
        assert [n > 0 for n in counts] == [True, True, False, False]

    def test_top_p_keeps_one_at_least(self, backend: Backend) -> None:
        assert drawn(backend, [0.3, 0.4, 0.3], top_p=1e-9) == [0, 400, 0]

    def test_top_p_is_a_share_of_what_top_k_left(self, backend: Backend) -> None:
        counts = drawn(backend, [0.3, 0.1, 0.2, 0.4], top_k=2, top_p=0.5)  # of 0.7, 0.4 is enough
        assert counts == [0, 0, 0, 400]

    def test_min_p_keeps_what_has_that_share_of_the_largest(self, backend: Backend) -> None:
        counts = drawn(backend, [0.1, 0.4, 0.2, 0.3], min_p=0.45)
        assert [n > 0 for n in counts] == [False, True, True, True]
        counts = drawn(backend, [0.1, 0.4, 0.2, 0.3], min_p=0.55)
        assert [n > 0 for n in counts] == [False, True, False, True]

    def test_min_p_1_keeps_the_largest_and_all_its_equals(self, backend: Backend) -> None:
        counts = drawn(backend, [0.3, 0.4, 0.2, 0.4], min_p=1)
        assert [n > 0 for n in counts] == [False, True, False, True]

    def test_min_p_comes_after_the_temperature(self, backend: Backend) -> None:
        counts = drawn(backend, [0.1, 0.4], min_p=0.4, temperature=2)  # as 1 to 2
        assert all(counts)
        assert drawn(backend, [0.1, 0.4], min_p=0.4, temperature=1) == [0, 400]

    def test_top_p_is_a_share_of_what_min_p_left(self, backend: Backend) -> None:
        counts = drawn(backend, [0.4, 0.3, 0.2, 0.1], min_p=0.4, top_p=0.75)  # of 0.9, 0.7 is enough
        assert [n > 0 for n in counts] == [True, True, False, False]

    def test_a_low_temperature_is_greedy(self, backend: Backend) -> None:
        for temperature in (1e-3, 1e-38):
            assert drawn(backend, [0.1, 0.4, 0.2, 0.3], temperature=temperature) == [0, 400, 0, 0]

    def test_odd_logits_draw_a_valid_token(self, backend: Backend) -> None:
        odd = [[NAN] * 4, [-torch.inf] * 4, [0.0, torch.inf, torch.inf, NAN], [NAN, -torch.inf, 1.0, NAN]]
        wishes: list[Wishes] = [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}]
        for wish in wishes:
            tokens = backend.sample(torch.tensor(odd), sampling(4, **wish))
            assert tokens.tolist() == [0, 0, 1, 2]

    def test_the_only_token(self, backend: Backend) -> None:
        assert backend.sample(torch.zeros(2, 1), sampling(2, top_p=0.5)).tolist() == [0, 0]


def test_the_generator_is_philox() -> None:
    """The known answers that its authors publish with Random123."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_draws_follow_u() -> None:
    """With equal weights the token is floor(u * n): every backend draws the same u, for any 64-bit seed."""
    n = 1024
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for backend in BACKENDS:
            tokens = backend.sample(torch.zeros(5, n), sampling(5, seed=seed, position=2**33)).tolist()
            assert tokens == [math.floor(uniform(seed, 2**33 + t) * n) for t in range(5)]


def test_frequencies_are_the_probabilities() -> None:
    draws, weights = 40_000, [0.05, 0.3, 0.2, 0.05, 0.4]
    for temperature in (1.0, 0.5, 2.0):
        p = torch.tensor(weights, dtype=torch.float64) ** (1 / temperature)
        expected = p / p.sum() * draws
        counts = torch.tensor(drawn(BEST, weights, draws, temperature=temperature))
        chi_square = ((counts - expected).square() / expected).sum()
        assert chi_square < 18.5  # with 4 degrees of freedom, a false alarm once in a thousand seeds


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    u = torch.tensor([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    for pairs in (torch.stack([u[:, 1:], u[:, :-1]]), torch.stack([u[1:], u[:-1]])):
        assert abs(torch.corrcoef(pairs.flatten(1))[0, 1]) < 0.05


def mixed(rows: int) -> Sampling:
    """Every kind of wish in one batch."""
    generator = torch.Generator().manual_seed(3)
    return Sampling(
        temperature_T=torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.3]).repeat(rows)[:rows],
        top_k_T=torch.tensor([0, 50, 0, 1, 3000, 0, 17], dtype=torch.int32).repeat(rows)[:rows],
        top_p_T=torch.tensor([1.0, 0.9, 0.5, 0.99, 0.05]).repeat(rows)[:rows],
        min_p_T=torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.003, 1.0]).repeat(rows)[:rows],
        seed_T=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        position_T=torch.randint(0, 100_000, (rows,), generator=generator),
    )


@pytest.mark.parametrize("vocabulary", [50, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 30.0])
def test_every_backend_draws_the_same_tokens(vocabulary: int, spread: float) -> None:
    rows = 12
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    tokens = BEST.sample(logits, mixed(rows))
    assert tokens.tolist() == REFERENCE.sample(logits, mixed(rows)).tolist()
    for backend in every_cpu():
        assert backend.sample(logits, mixed(rows)).tolist() == tokens.tolist()


def test_a_row_draws_alone() -> None:
    logits, how = torch.randn(40, 777, generator=torch.Generator().manual_seed(1)), mixed(40)
    together = BEST.sample(logits, how).tolist()
    wide = torch.full((40, 900), 50.0)  # rows of a wider buffer
    wide[:, 100:877] = logits
    for t in range(40):
        mine = slice(t, t + 1)
        alone = Sampling(
            temperature_T=how.temperature_T[mine],
            top_k_T=how.top_k_T[mine],
            top_p_T=how.top_p_T[mine],
            min_p_T=how.min_p_T[mine],
            seed_T=how.seed_T[mine],
            position_T=how.position_T[mine],
        )
        assert BEST.sample(wide[mine, 100:877], alone).tolist() == [together[t]]


def kept_by_sorting(weights: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    order = sorted((i for i, w in enumerate(weights) if w >= min_p), key=lambda i: (-weights[i], i))
    order = order[: top_k or None]
    total, reached = sum(weights[i] for i in order), 0.0
    kept: set[int] = set()
    for i in order:
        if kept and reached >= top_p * total:
            break
        kept.add(i)
        reached += weights[i]
    return kept


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.integers(0, 20).map(lambda n: 2.0**-n), min_size=1, max_size=70),
    min_p=st.sampled_from([0.0, 0.0, 1.0, 0.5, 0.25, 2.0**-12]),
    top_k=st.integers(0, 80),
    top_p=st.floats(0.0078125, 1.0, width=32),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_draw_is_the_first_id_past_u_among_those_kept(
    weights: list[float], min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    """Powers of two have exact logarithms, so a sort in plain Python can say what must come out."""
    largest = max(weights)
    weights = [w / largest for w in weights]
    kept = kept_by_sorting(weights, min_p, top_k, top_p if top_p < 1 else math.inf)
    kept_weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    sums = [sum(kept_weights[: i + 1]) for i in range(len(weights))]
    assert all(a <= b for a, b in pairwise(sums))
    expected = next(i for i, s in enumerate(sums) if s > uniform(seed, 0) * sums[-1])

    logits = torch.tensor([weights]).log2()
    how = sampling(1, temperature=math.log2(math.e), min_p=min_p, top_k=top_k, top_p=top_p, seed=seed)
    assert BEST.sample(logits, how).tolist() == [expected]
    assert REFERENCE.sample(logits, how).tolist() == [expected]
