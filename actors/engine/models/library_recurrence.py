"""The recurrences of transformers' layers on the library path: each row after the other, over state slots.

transformers' own functions compute a prompt in chunks and decode row by row, which gives other sums. Here
every row changes the state in its turn, in prompts as in decode, so where a step ends makes no difference to
that. A mixer's own forward is kept but for the functions that it calls: what is projected, gated and normed
around them is its own affair.
"""

import inspect
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.actors.engine.models.decoder_config import UnsupportedModel
from shoal.actors.engine.models.library_state import CONVOLUTION, RECURRENT
from shoal.kernels.backend import Backend, HeadStates, LayerMemory, LayerParts, RecurrentRows, RingRows, Rows

IntArray = NDArray[np.int64]


class Recurrences(Protocol):
    """What a mixer computes with at the moment."""

    def convolve(self, layer: int, x_TC: Tensor, weight_CK: Tensor) -> Tensor:
        """Each row's and the K - 1 rows' before it, weighted by channel."""
        ...

    def recur(self, layer: int, x: RecurrentRows) -> Tensor:
        """As `Backend.recurrence`."""
        ...


def swap_mixers(layers: nn.Module, now: "Now") -> None:
    """Have every mixer call our functions where it calls transformers'."""
    for module in layers.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if called := _FUNCTIONS.keys() & set(code.co_names if code else ()):
            layer: Any = module.layer_idx
            ours = {name: partial(_FUNCTIONS[name], now, layer) for name in called}
            swapped = FunctionType(
                forward.__code__,
                {**forward.__globals__, **ours},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            swapped.__kwdefaults__ = forward.__kwdefaults__
            module.forward = partial(swapped, module)


class Now(Protocol):
    def __call__(self) -> Recurrences:
        """What the step that is being computed says."""
        ...


def _causal_conv1d_fn(
    now: Now,
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """[1, C, T] in and out, as transformers'."""
    from transformers.activations import ACT2FN  # noqa: PLC0415

    out_TC = now().convolve(layer, hidden_states[0].T, weight)
    if bias is not None:
        out_TC += bias
    if activation is not None:
        out_TC = ACT2FN[activation](out_TC)
    return out_TC.T[None]


def _torch_chunk_gated_delta_rule(
    now: Now,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """[1, T, H, D] in and out, as transformers'."""
    q_THK, k_THK = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q_THK, k_THK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q_THK, k_THK))
    q_THK = q_THK * q_THK.shape[-1] ** -0.5
    rows = _rows(q_THK, k_THK, value[0], g[0].exp(), beta[0])
    return now().recur(layer, rows)[None], None


def _mamba2_chunk_scan(  # noqa: PLR0917
    now: Now,
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    **_: object,
) -> Tensor:
    """[1, T, H, P] in and out, as transformers'."""
    if z is not None:
        raise UnsupportedModel("a selective state with a gate")
    x_THP, step_TH = hidden_states[0].float(), dt[0]
    if dt_bias is not None:
        step_TH = step_TH + dt_bias
    if dt_softplus:
        step_TH = nn.functional.softplus(step_TH)
    step_TH = step_TH.clamp(*dt_limit)
    decay_TH = (A * step_TH).exp()
    out_THP = now().recur(layer, _rows(C[0], B[0], x_THP * step_TH[..., None], decay_TH))
    if D is not None:
        out_THP += D[:, None] * x_THP
    return out_THP[None]


def _rows(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor | None = None
) -> RecurrentRows:
    q_THK, k_THK, v_THV, decay_TH = (x.float().contiguous() for x in (q_THK, k_THK, v_THV, decay_TH))
    beta_TH = None if beta_TH is None else beta_TH.float().contiguous()
    return RecurrentRows(q_THK=q_THK, k_THK=k_THK, v_THV=v_THV, decay_TH=decay_TH, beta_TH=beta_TH)


_FUNCTIONS: dict[str, Any] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _torch_chunk_gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
}
"""By the names that transformers' layers call them."""


@dataclass(frozen=True)
class StatefulStep:
    """Recurrences of a step's rows, from the state in their sequences' slots, and into it."""

    backend: Backend
    rows: Rows
    kv: tuple[LayerMemory, ...]
    _made_taps: dict[int, "Taps"] = field(default_factory=dict, init=False)
    """By the size of a convolution's kernel."""

    def convolve(self, layer: int, x_TC: Tensor, weight_CK: Tensor) -> Tensor:
        slots, segments = self._restored(layer, CONVOLUTION)
        runs, kernel_size = self._runs, weight_CK.shape[1]
        taps = self._taps(kernel_size)
        before_UNC = torch.where(runs.is_new_U[:, None, None], 0.0, slots[runs.slot_U])
        rows_XC = torch.cat([before_UNC.flatten(0, 1), x_TC])
        out_TC = rows_XC[taps.source_TK[:, 0]] * weight_CK[:, 0]
        for tap in range(1, kernel_size):
            out_TC += rows_XC[taps.source_TK[:, tap]] * weight_CK[:, tap]
        slots[runs.slot_U] = rows_XC[taps.kept_UN]
        if segments is not None and len(runs.captured_C):
            segments[runs.captured_C] = rows_XC[taps.captured_CN]
        return out_TC

    def recur(self, layer: int, x: RecurrentRows) -> Tensor:
        slots, segments = self._restored(layer, RECURRENT)
        states = HeadStates(slots_PHKV=slots, segments_PHKV=segments)
        return self.backend.recurrence(x, states, self.rows, torch.empty_like(x.v_THV))

    def _restored(self, layer: int, part: str) -> tuple[Tensor, Tensor | None]:
        """That part of all slots and segments of a layer, with what the step takes up."""
        kept = self.kv[layer]
        assert isinstance(kept, LayerParts), "a recurrent layer without state"
        slots, segments = kept.slots[part], kept.segments.get(part)
        if segments is not None and len(self._runs.restored_R):
            slots[self._runs.restored_slot_R] = segments[self._runs.restored_R]
        return slots, segments

    @cached_property
    def _runs(self) -> "Runs":
        return Runs.of(self.rows, self.rows.needed_rings)

    def _taps(self, kernel_size: int) -> "Taps":
        """Made once for all layers of a step."""
        if kernel_size not in self._made_taps:
            self._made_taps[kernel_size] = Taps.of(self._runs, kernel_size)
        return self._made_taps[kernel_size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Each sequence's rows of a step, U runs of neighbours, and which boundaries lie in them."""

    run_U: IntArray
    """0, 1, ..., U - 1"""
    first_U: IntArray
    count_U: IntArray
    slot_U: Tensor
    is_new_U: Tensor
    """Whether a run begins at position 0."""
    run_T: IntArray
    offset_T: IntArray
    """Of each row, in its run."""
    restored_R: Tensor
    """Segments with the state before the first row of a run, and its slot."""
    restored_slot_R: Tensor
    captured_C: Tensor
    """Segments, and after how many rows of which run they are taken."""
    capture_run_C: IntArray
    capture_offset_C: IntArray

    @classmethod
    def of(cls, rows: Rows, rings: RingRows) -> "Runs":
        sequence_T = rows.sequence_T.numpy().astype(np.int64)
        begins_T = np.flatnonzero(np.diff(sequence_T, prepend=-1))
        count_U = np.diff(begins_T, append=len(sequence_T))
        sequence_U = sequence_T[begins_T]
        run_of = dict(zip(sequence_U.tolist(), range(len(sequence_U)), strict=True))
        run_T = np.repeat(np.arange(len(sequence_U)), count_U)
        start_S, slot_S = rings.start_S.numpy(), rings.slot_S.numpy().astype(np.int64)
        restores = [(slot_S[s], g) for s, at, g in rings.restores_C3.tolist() if at == start_S[s]]
        captures = [(g, run_of[s], at - start_S[s]) for s, at, g in rings.captures_C3.tolist()]
        restored_slot_R, restored_R = np.array(restores, dtype=np.int64).reshape(-1, 2).T
        captured_C, capture_run_C, capture_offset_C = np.array(captures, dtype=np.int64).reshape(-1, 3).T
        return cls(
            run_U=np.arange(len(sequence_U)),
            first_U=begins_T,
            count_U=count_U,
            slot_U=torch.from_numpy(slot_S[sequence_U]),
            is_new_U=torch.from_numpy(start_S[sequence_U] == 0),
            run_T=run_T,
            offset_T=np.arange(len(sequence_T)) - begins_T[run_T],
            restored_R=torch.from_numpy(restored_R.copy()),
            restored_slot_R=torch.from_numpy(restored_slot_R.copy()),
            captured_C=torch.from_numpy(captured_C.copy()),
            capture_run_C=capture_run_C,
            capture_offset_C=capture_offset_C,
        )

    def sources(self, run_X: IntArray, end_X: IntArray, num_rows: int, *, num_before: int) -> Tensor:
        """int64 [X, num_rows]: where the last rows of a run are, up to that many of it.

        In the `num_before` rows that each run has from before the step, one run's behind the other's, and
        the step's own rows behind them all.
        """
        offset_XR = end_X[:, None] + np.arange(-num_rows, 0)
        before_XR = (run_X * num_before + num_before)[:, None] + offset_XR
        own_XR = (len(self.count_U) * num_before + self.first_U[run_X])[:, None] + offset_XR
        return torch.from_numpy(np.where(offset_XR < 0, before_XR, own_XR))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taps:
    """Which rows a convolution reads and keeps, as `Runs.sources` names them."""

    source_TK: Tensor
    """The K rows up to each row of the step,"""
    kept_UN: Tensor
    """the N = K - 1 up to the end of each run,"""
    captured_CN: Tensor
    """and those up to each boundary that is captured."""

    @classmethod
    def of(cls, runs: Runs, kernel_size: int) -> "Taps":
        sources = partial(runs.sources, num_before=kernel_size - 1)
        return cls(
            source_TK=sources(runs.run_T, runs.offset_T + 1, kernel_size),
            kept_UN=sources(runs.run_U, runs.count_U, kernel_size - 1),
            captured_CN=sources(runs.capture_run_C, runs.capture_offset_C, kernel_size - 1),
        )
