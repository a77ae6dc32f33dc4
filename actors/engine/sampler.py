"""Draws the next token of each row of logits, and says how likely tokens were.

What is drawn depends on the row's own logits, tokens, parameters, seed and position alone: not on what this
process drew before, so a request that goes on elsewhere draws there what it would have drawn here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.actors.engine.step import Draw, Drawn
from shoal.actors.messages import TokenLogprob
from shoal.kernels.backend import Adjustment, Backend, Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawRow:
    """One row of logits, and the sequence that it continues."""

    draw: Draw
    position: int
    """Of the drawn token."""
    tokens: Tensor
    """int64: the sequence's tokens, prompt first. Penalties read those before `position`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How rows of logits are drawn from, prepared before there are any."""

    sampling: Sampling
    tops: dict[int, int]
    """Rows whose logprobs are asked for, and of how many of the likeliest tokens beside."""


class Sampler:
    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device

    def prepare(self, rows: Sequence[DrawRow], vocab_size: int) -> Draws:
        """All but the logits, and the tokens that penalties read: those are read when it is drawn."""
        return Draws(
            sampling=self._sampling(rows, vocab_size),
            tops={i: top for i, row in enumerate(rows) if (top := row.draw.logprobs) is not None},
        )

    def draw(self, logits_RV: Tensor, draws: Draws) -> tuple[Tensor, list[Drawn]]:
        """One token a row, int64 [R], and what is said of it.

        float32 logits, as the model computed them; they stay as they are.
        """
        token_R = self._backend.sample(logits_RV, draws.sampling)
        drawn = [Drawn(token_id=token_id) for token_id in token_R.tolist()]
        if draws.tops:
            row_A = self._on_device(list(draws.tops), np.int64)
            said = self._logprobs(logits_RV, row_A, token_R[row_A], list(draws.tops.values()))
            for i, logprob in zip(draws.tops, said, strict=True):
                drawn[i] = Drawn(token_id=drawn[i].token_id, logprob=logprob)
        return token_R, drawn

    def prompt_logprobs(
        self,
        hidden_TN: Tensor,
        token_ids_T: Tensor,
        top: int,
        logits: Callable[[Tensor], Tensor],
        *,
        max_logits: int,
    ) -> tuple[TokenLogprob, ...]:
        """Of the tokens (int64) that come right after rows of hidden states, and the `top` likeliest there.

        `logits` is asked for at most `max_logits` rows at a time; its answer may be overwritten by the next.
        """
        said: list[TokenLogprob] = []
        for first in range(0, len(token_ids_T), max_logits):
            token_R = token_ids_T[first : first + max_logits]
            logits_RV = logits(hidden_TN[first : first + max_logits])
            row_R = torch.arange(len(token_R), device=self._device)
            said += self._logprobs(logits_RV, row_R, token_R, [top] * len(token_R))
        return tuple(said)

    def _logprobs(
        self, logits_RV: Tensor, row_R: Tensor, token_R: Tensor, tops: list[int]
    ) -> list[TokenLogprob]:
        said = self._backend.logprobs(logits_RV, row_R, token_R, max(tops))
        each = zip(said.logprob_R.tolist(), said.top_ids_RK.tolist(), said.top_RK.tolist(), tops, strict=True)
        return [
            TokenLogprob(logprob=logprob, top=tuple(zip(ids[:top], logprobs[:top], strict=True)))
            for logprob, ids, logprobs, top in each
        ]

    def _sampling(self, rows: Sequence[DrawRow], vocab_size: int) -> Sampling:
        params = [row.draw.sampling for row in rows]
        return Sampling(
            temperature_T=self._on_device([p.temperature for p in params], np.float32),
            top_k_T=self._on_device([p.top_k for p in params], np.int32),
            top_p_T=self._on_device([p.top_p for p in params], np.float32),
            min_p_T=self._on_device([p.min_p for p in params], np.float32),
            seed_T=self._on_device([p.seed for p in params], np.int64),
            position_T=self._on_device([row.position for row in rows], np.int64),
            adjustments=[
                adjustment
                for i, row in enumerate(rows)
                if (adjustment := self._adjustment(i, row, vocab_size)) is not None
            ],
        )

    def _adjustment(self, i: int, row: DrawRow, vocab_size: int) -> Adjustment | None:
        params, num_prompt_tokens = row.draw.sampling, row.draw.num_prompt_tokens
        penalized = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        bias = params.logit_bias
        if row.position < num_prompt_tokens + params.min_tokens:
            # A checkpoint may name stop tokens that its head does not have; they are never drawn anyway.
            bias += tuple(
                (stop, -np.inf) for stop in sorted(row.draw.stop_token_ids) if 0 <= stop < vocab_size
            )
        if not penalized and not bias:
            return None
        return Adjustment(
            row=i,
            token_ids=row.tokens[: row.position if penalized else 0],
            num_prompt_tokens=num_prompt_tokens if penalized else 0,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            bias_ids=self._on_device([token_id for token_id, _ in bias], np.int64),
            bias=self._on_device([added for _, added in bias], np.float32),
        )

    def _on_device(self, values: list[int] | list[float], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(self._device)
