"""What is drawn for a row, and what is said about it, whoever its neighbours are and wherever it began."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.actors.engine.sampler import DrawRow, Sampler
from shoal.actors.engine.step import Draw, Drawn
from shoal.actors.messages import SamplingParams, TokenLogprob
from tests.kernels.helpers import BEST, REFERENCE, sampling

SAMPLERS = [Sampler(backend, torch.device("cpu")) for backend in (BEST, REFERENCE)]
SAMPLER = SAMPLERS[0]
UNUSED = 10**6
"""A token id that no vocabulary has: reading it raises."""


def a_row(
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    *,
    stop: Sequence[int] = (),
    logprobs: int | None = None,
    **params: Any,
) -> DrawRow:
    """Greedy unless it says otherwise. Its tokens lie in a longer row of a pool."""
    tokens = [*prompt, *output]
    return DrawRow(
        draw=Draw(
            sampling=SamplingParams(**{"temperature": 0.0, **params}),
            num_prompt_tokens=len(prompt),
            stop_token_ids=frozenset(stop),
            logprobs=logprobs,
        ),
        position=len(tokens),
        tokens=torch.tensor([*tokens, UNUSED, UNUSED]),
    )


def draw(logits_RV: Tensor, rows: Sequence[DrawRow], sampler: Sampler = SAMPLER) -> list[Drawn]:
    token_R, said = sampler.draw(logits_RV, sampler.prepare(rows, logits_RV.shape[1]))
    assert token_R.tolist() == [each.token_id for each in said]
    return said


def drawn(logits: list[float], row: DrawRow, sampler: Sampler = SAMPLER) -> int:
    return draw(torch.tensor([logits]), [row], sampler)[0].token_id


@pytest.mark.parametrize("sampler", SAMPLERS, ids=("cpu", "reference"))
class TestDraw:
    def test_parameters_reach_their_rows(self, sampler: Sampler) -> None:
        logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
        rows = [
            a_row(range(5), temperature=0.7, seed=-3),
            a_row(range(6), temperature=1.0, top_k=7, seed=2**62),
            a_row(range(5), [8, 9], temperature=1.3, top_p=0.4),
            a_row(range(8), temperature=1.0, min_p=0.3),
            a_row(range(9)),
        ]
        how = [
            sampling(1, temperature=0.7, seed=-3, position=5),
            sampling(1, temperature=1.0, top_k=7, seed=2**62, position=6),
            sampling(1, temperature=1.3, top_p=0.4, seed=0, position=7),
            sampling(1, temperature=1.0, min_p=0.3, seed=0, position=8),
            sampling(1, temperature=0),
        ]
        expected = [int(BEST.sample(logits[t : t + 1], how[t])[0]) for t in range(5)]
        assert [said.token_id for said in draw(logits, rows, sampler)] == expected

    def test_penalties_tell_prompt_from_output(self, sampler: Sampler) -> None:
        assert drawn([3.0, 2.0], a_row([0], [1], presence_penalty=2.0), sampler) == 0
        assert drawn([3.0, 2.0], a_row([1], [0], presence_penalty=2.0), sampler) == 1
        assert drawn([3.0, 2.0], a_row([1], [0, 0], frequency_penalty=0.6), sampler) == 1
        assert drawn([3.0, 2.0], a_row([0], [], repetition_penalty=2.0), sampler) == 1

    def test_an_empty_prompt(self, sampler: Sampler) -> None:
        assert drawn([3.0, 2.0], a_row([], [0], presence_penalty=2.0), sampler) == 1
        assert drawn([3.0, 2.0], a_row([], [], repetition_penalty=2.0), sampler) == 0

    def test_bias(self, sampler: Sampler) -> None:
        assert drawn([3.0, 2.0], a_row(logit_bias=((1, 1.5),)), sampler) == 1
        assert drawn([3.0, 2.0], a_row(logit_bias=((0, -100.0), (1, -100.0))), sampler) == 0

    def test_no_stop_token_before_min_tokens(self, sampler: Sampler) -> None:
        for length in range(3):
            row = a_row([7] * 4, [7] * length, stop=[0, 2], min_tokens=2)
            assert drawn([3.0, 1.0, 2.0], row, sampler) == (0 if length == 2 else 1)

    def test_no_bias_helps_a_stop_token(self, sampler: Sampler) -> None:
        assert drawn([3.0, 1.0], a_row(stop=[0], min_tokens=1, logit_bias=((0, 100.0),)), sampler) == 1

    def test_stop_tokens_that_the_head_lacks(self, sampler: Sampler) -> None:
        assert drawn([3.0, 1.0], a_row(stop=[2, 50_000, -1], min_tokens=1), sampler) == 0

    def test_a_bias_on_what_the_head_lacks_is_refused(self, sampler: Sampler) -> None:
        with pytest.raises((ValueError, IndexError)):
            drawn([3.0, 1.0], a_row(logit_bias=((2, 1.0),)), sampler)


class TestLogprobs:
    def test_those_who_ask_get_as_many_as_they_ask_for(self) -> None:
        logits = torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(4, 1)
        rows = [a_row(logprobs=2), a_row(), a_row(logprobs=0), a_row(logprobs=9)]
        said = [d.logprob for d in draw(logits, rows)]
        two, nobody, none, all_three = said
        assert nobody is None
        assert two is not None
        assert none is not None
        assert all_three is not None
        assert [token_id for token_id, _ in two.top] == [0, 1]
        assert [token_id for token_id, _ in all_three.top] == [0, 1, 2]
        assert none == TokenLogprob(logprob=two.logprob)
        assert two.logprob == two.top[0][1] == pytest.approx(-math.log(2))

    def test_they_are_the_model_s_own(self) -> None:
        """Whatever changes what is drawn."""
        logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        plain = a_row(logprobs=3, temperature=0.1, seed=5)
        bent = a_row(
            [0, 0],
            [1],
            logprobs=3,
            temperature=0.1,
            presence_penalty=2.0,
            repetition_penalty=3.0,
            logit_bias=((2, 9.0),),
        )
        (first,), (second,) = draw(logits, [plain]), draw(logits, [bent])
        assert first.logprob is not None
        assert second.logprob is not None
        assert (first.token_id, second.token_id) == (0, 2)
        assert first.logprob.top == second.logprob.top
        assert second.logprob.logprob == dict(first.logprob.top)[2] == pytest.approx(math.log(0.2))


def any_row() -> st.SearchStrategy[DrawRow]:
    ids = st.lists(st.integers(0, 29), max_size=12)
    return st.builds(
        a_row,
        ids,
        ids,
        stop=st.lists(st.integers(0, 40), max_size=3),
        logprobs=st.one_of(st.none(), st.integers(0, 5)),
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 3]),
        min_p=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**63 - 1),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logit_bias=st.sampled_from([(), ((3, 2.0),)]),
        min_tokens=st.integers(0, 4),
    )


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(any_row(), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_row_s_answer_is_its_own(rows: list[DrawRow], seed: int) -> None:
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(seed)) * 2
    together = draw(logits, rows)
    assert together == [draw(logits[t : t + 1], [row])[0] for t, row in enumerate(rows)]
    assert together == draw(logits, rows, SAMPLERS[1])


def toy_logits(token_ids: Sequence[int]) -> list[float]:
    """A model whose next token depends on the last two."""
    generator = torch.Generator().manual_seed(token_ids[-1] * 31 + token_ids[-2])
    return torch.randn(20, generator=generator).tolist()


def test_a_continuation_draws_what_would_have_been_drawn() -> None:
    """After any number of tokens, by a sampler that has seen none of them."""
    prompt = [3, 4, 5]
    penalties: dict[str, Any] = {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2}

    def go_on(output: list[int]) -> list[int]:
        sampler = Sampler(BEST, torch.device("cpu"))
        while len(output) < 30:
            row = a_row(prompt, output, stop=[6], min_tokens=9, temperature=1.0, seed=11, **penalties)
            output = [*output, drawn(toy_logits([*prompt, *output]), row, sampler)]
        return output

    whole = go_on([])
    assert 6 not in whole[:9]
    for length in range(0, 30, 3):
        assert go_on(whole[:length]) == whole


def test_prompt_logprobs_are_the_same_in_tiles() -> None:
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(8, 50, generator=generator)
    hidden, tokens = torch.randn(23, 8, generator=generator), torch.randint(0, 50, (23,), generator=generator)
    buffer = torch.empty(23, 50)
    tiles: list[int] = []

    def logits(hidden_RN: Tensor) -> Tensor:
        tiles.append(len(hidden_RN))
        out = buffer[: len(hidden_RN)]
        out.copy_((hidden_RN[:, :, None] * head).sum(1))  # unlike a product's, its bits do not see the tile
        return out

    whole = SAMPLER.prompt_logprobs(hidden, tokens, 3, logits, max_logits=23)
    assert [said.logprob for said in whole] == pytest.approx(
        logits(hidden).double().log_softmax(-1).gather(1, tokens[:, None]).flatten().tolist(), abs=1e-6
    )
    tiles.clear()
    assert SAMPLER.prompt_logprobs(hidden, tokens, 3, logits, max_logits=10) == whole
    assert tiles == [10, 10, 3]
    assert SAMPLER.prompt_logprobs(hidden[:0], tokens[:0], 3, logits, max_logits=10) == ()
