"""Plain torch beside every operation: the readable truth, and what serves without compiled kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.backend import (
    Adjustment,
    Experts,
    Gate,
    HeadStates,
    LayerKV,
    LayerRing,
    Linear,
    Logprobs,
    RecurrentRows,
    Rotary,
    Rows,
    Sampling,
    Tape,
)


def torch_numerics() -> str:
    """What torch's own bits depend on here: nodes that differ in it compute other bits."""
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """A float32 copy: bfloat16 products are emulated on most CPUs and several times slower."""

    weight_NK: Tensor
    bias_N: Tensor | None

    def __call__(self, x_TK: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_TK, self.weight_NK, self.bias_N)

    @property
    def num_outputs(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class TorchGateUp:
    gate: TorchLinear
    up: TorchLinear

    def __call__(self, x_TK: Tensor, how: Gate) -> Tensor:
        gate, up = self.gate(x_TK), self.up(x_TK)
        match how:
            case "silu":
                return torch.nn.functional.silu(gate) * up
            case "gelu_tanh":
                return torch.nn.functional.gelu(gate, approximate="tanh") * up
            case "clamped_swiglu":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    @property
    def num_outputs(self) -> int:
        return self.gate.num_outputs

    @property
    def num_bytes(self) -> int:
        return self.gate.num_bytes + self.up.num_bytes


class TorchBackend:
    """Runs on any torch device. A row's bits may depend on its neighbours: torch promises nothing else."""

    numerics_id = f"torch-reference, {torch_numerics()}"

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def name(self) -> str:
        return f"torch-{self._device.type}"

    def pack(self, weights_NK: Sequence[Tensor], bias_N: Tensor | None = None) -> TorchLinear:
        bias_N = None if bias_N is None else self._to_float(bias_N)
        return TorchLinear(torch.cat([self._to_float(w) for w in weights_NK]), bias_N)

    def pack_gate_up(
        self,
        gate_NK: Tensor,
        up_NK: Tensor,
        gate_bias_N: Tensor | None = None,
        up_bias_N: Tensor | None = None,
    ) -> TorchGateUp:
        return TorchGateUp(self.pack([gate_NK], gate_bias_N), self.pack([up_NK], up_bias_N))

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> Tensor:
        assert isinstance(w, TorchLinear)
        return out_TN.copy_(w(x_TK))

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> Tensor:
        assert isinstance(w, TorchLinear)
        return residual_TN.add_(w(x_TK))

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> Tensor:
        assert isinstance(gate_up, TorchGateUp)
        return out_TN.copy_(gate_up(x_TK, gate))

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> Tensor:
        top_TE, id_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
        weight_TK, id_TK = top_TE[:, : experts.top].softmax(-1), id_TE[:, : experts.top]
        sum_TN = torch.zeros_like(residual_TN)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            assert isinstance(gate_up, TorchGateUp) and isinstance(down, TorchLinear)
            row, pick = (id_TK == expert).nonzero(as_tuple=True)
            sum_TN[row] += weight_TK[row, pick, None] * down(gate_up(x_TN[row], experts.gate))
        return residual_TN.add_(sum_TN)

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> Tensor:
        return out_TN.copy_(table_VN[id_T].float() * scale)

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> Tensor:
        return out.copy_(_rms_norm(x, weight_N, eps))

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> Tensor:
        return residual.add_(_rms_norm(x, weight_N, eps))

    def rotate(self, x_THD: Tensor, rotary: Rotary, rows: Rows) -> None:
        half = rotary.cos.shape[1]
        position_T = rows.position_T.long()
        cos_T1F, sin_T1F = rotary.cos[position_T].unsqueeze(1), rotary.sin[position_T].unsqueeze(1)
        a, b = x_THD[..., :half].clone(), x_THD[..., half : 2 * half].clone()
        x_THD[..., :half] = a * cos_T1F - b * sin_T1F
        x_THD[..., half : 2 * half] = b * cos_T1F + a * sin_T1F

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing, rows: Rows) -> None:
        if isinstance(kv, LayerRing):
            for own, x_THD in ((kv.own.k_PBHD, k_THD), (kv.own.v_PBHD, v_THD)):
                own[0, : len(x_THD)] = x_THD.to(own.dtype)
            return
        block_rows = kv.k_PBHD.shape[1]
        sequence_T, position_T = rows.sequence_T.long(), rows.position_T.long()
        block_T = rows.table_SN[sequence_T, position_T // block_rows].long()
        offset_T = position_T % block_rows
        if rows.store_from_S is not None:
            new_T = position_T >= rows.store_from_S[sequence_T]
            block_T, offset_T, k_THD, v_THD = (x[new_T] for x in (block_T, offset_T, k_THD, v_THD))
        kv.k_PBHD[block_T, offset_T] = k_THD.to(kv.k_PBHD.dtype)
        kv.v_PBHD[block_T, offset_T] = v_THD.to(kv.v_PBHD.dtype)

    def attention(
        self,
        q_THD: Tensor,
        kv: LayerKV | LayerRing,
        rows: Rows,
        scale: float,
        out_THD: Tensor,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        for sequence in sorted(set(rows.sequence_T.tolist())):
            mine = (rows.sequence_T == sequence).nonzero().flatten()
            position_Q = rows.position_T[mine]
            first, end = 0, int(position_Q.max()) + 1
            if isinstance(kv, LayerRing):
                assert window is not None
                first = max(0, int(position_Q.min()) + 1 - window, _valid_from(kv, rows, sequence))
            k_NHD, v_NHD = (x[first:].float() for x in _sequence_rows(kv, rows, sequence, end))
            group = q_THD.shape[1] // k_NHD.shape[1]
            position_N = torch.arange(first, end, device=self._device)
            hidden_QN = position_N > position_Q[:, None]
            if window is not None:
                hidden_QN |= position_N <= position_Q[:, None] - window
            k_NHD, v_NHD = (x.repeat_interleave(group, dim=1) for x in (k_NHD, v_NHD))
            score_HQN = torch.einsum("qhd,nhd->hqn", q_THD[mine], k_NHD) * scale
            score_HQN = score_HQN.masked_fill(hidden_QN, -torch.inf)
            if sinks_H is not None:
                sink_HQ1 = sinks_H[:, None, None].expand(-1, len(position_Q), 1)
                score_HQN = torch.cat([score_HQN, sink_HQ1], dim=-1)
            weight_HQN = score_HQN.softmax(-1)[..., : len(position_N)]
            out_THD[mine] = torch.einsum("hqn,nhd->qhd", weight_HQN, v_NHD)
        return out_THD

    def restore(self, ring: LayerRing, rows: Rows) -> None:
        if ring.segments is None:
            return
        state, segment_rows, ring_rows = rows.needed_rings, *_lengths(ring)
        for sequence, boundary, segment in state.restores_C3.tolist():
            first = boundary - segment_rows
            kept = max(first, int(state.start_S[sequence]) - ring_rows)
            position_N = torch.arange(kept, boundary, device=self._device)
            for slots, segments in _sides(ring.slots, ring.segments):
                slots[state.slot_S[sequence], position_N % ring_rows] = segments[segment, position_N - first]

    def capture(self, ring: LayerRing, rows: Rows) -> None:
        if ring.segments is None:
            return
        for sequence, boundary, segment in rows.needed_rings.captures_C3.tolist():
            first = boundary - _lengths(ring)[0]
            for segments, x_NHD in zip(
                (ring.segments.k_PBHD, ring.segments.v_PBHD),
                _sequence_rows(ring, rows, sequence, boundary),
                strict=True,
            ):
                segments[segment] = x_NHD[first:]

    def commit(self, ring: LayerRing, rows: Rows) -> None:
        state, (_, ring_rows) = rows.needed_rings, _lengths(ring)
        for sequence in sorted(set(rows.sequence_T.tolist())):
            mine = (rows.sequence_T == sequence).nonzero().flatten()[-ring_rows:]
            row_N = rows.position_T[mine].long() % ring_rows
            for slots, own in _sides(ring.slots, ring.own):
                slots[state.slot_S[sequence], row_N] = own[0, mine]

    def recurrence(self, x: RecurrentRows, states: HeadStates, rows: Rows, out_THV: Tensor) -> Tensor:
        state, group = rows.needed_rings, x.v_THV.shape[1] // x.k_THK.shape[1]
        q_THK1, k_THK1 = (y.repeat_interleave(group, dim=1)[..., None] for y in (x.q_THK, x.k_THK))
        captures = {(s, boundary): segment for s, boundary, segment in state.captures_C3.tolist()}
        where = zip(rows.sequence_T.tolist(), rows.position_T.tolist(), strict=True)
        for t, (s, position) in enumerate(where):
            state_HKV, change_HV = states.slots_PHKV[state.slot_S[s]], x.v_THV[t]
            if position:
                state_HKV *= x.decay_TH[t, :, None, None]
            else:
                state_HKV.zero_()
            if x.beta_TH is not None:
                known_HV = (state_HKV * k_THK1[t]).sum(1)
                change_HV = (change_HV - known_HV) * x.beta_TH[t, :, None]
            state_HKV += k_THK1[t] * change_HV[:, None]
            out_THV[t] = (state_HKV * q_THK1[t]).sum(1)
            if states.segments_PHKV is not None and (s, position + 1) in captures:
                states.segments_PHKV[captures[s, position + 1]] = state_HKV
        return out_THV

    def record(self, layers: Callable[[Tape], None]) -> Callable[[Rows], None]:
        def run(rows: Rows) -> None:
            layers(TorchTape(self, rows))

        return run

    def sample(self, logits_TV: Tensor, how: Sampling) -> Tensor:
        """See sample.cpp for the words. Sums are exact there and here, so the tokens are the same."""
        logits_TV = _without_nan(adjusted(logits_TV, how.adjustments))
        greedy_T = (logits_TV == logits_TV.max(-1, keepdim=True).values).int().argmax(-1)
        weight_TV = _weights(logits_TV, how.temperature_T[:, None])
        weight_TV = weight_TV.masked_fill(weight_TV < how.min_p_T[:, None], 0)

        weight_TV, id_TV = weight_TV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(weight_TV.shape[1], device=self._device)
        top_k_T1 = how.top_k_T[:, None]
        weight_TV = weight_TV.masked_fill((top_k_T1 > 0) & (rank_V >= top_k_T1), 0)
        before_TV = weight_TV.cumsum(-1) - weight_TV
        top_p_T1 = how.top_p_T[:, None].double()
        enough_TV = (rank_V > 0) & (before_TV >= top_p_T1 * weight_TV.sum(-1, keepdim=True))
        weight_TV = weight_TV.masked_fill((top_p_T1 < 1) & enough_TV, 0)

        weight_TV = torch.zeros_like(weight_TV).scatter_(-1, id_TV, weight_TV)
        sum_TV = weight_TV.cumsum(-1)
        total_T = sum_TV[:, -1]
        draws = zip(how.seed_T.tolist(), how.position_T.tolist(), strict=True)
        u_T = torch.tensor([uniform(*d) for d in draws], dtype=torch.float64, device=self._device)
        drawn_T = (sum_TV > (u_T * total_T)[:, None]).int().argmax(-1)
        return torch.where((how.temperature_T > 0) & (total_T > 0), drawn_T, greedy_T)

    def logprobs(self, logits_TV: Tensor, row_R: Tensor, token_R: Tensor, top: int) -> Logprobs:
        """See sample.cpp for the words, and for why the logarithm is spelled out."""
        logits_RV = _without_nan(logits_TV[row_R])
        best_R1 = logits_RV.max(-1, keepdim=True).values.double()
        sum_R1 = _weights(logits_RV, torch.ones_like(logits_RV[:, :1])).sum(-1, keepdim=True)
        logprob_RV = (logits_RV.double() - best_R1 - ln(sum_R1)).masked_fill(sum_R1 == 0, -torch.inf)
        top_ids_RK = logits_RV.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return Logprobs(
            logprob_R=logprob_RV.gather(-1, token_R[:, None]).squeeze(-1),
            top_ids_RK=top_ids_RK,
            top_RK=logprob_RV.gather(-1, top_ids_RK),
        )

    def _to_float(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TorchTape:
    """Computes what is recorded, for the rows of one step."""

    backend: TorchBackend
    rows: Rows

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> None:
        self.backend.gather(table_VN, self._first(id_T), self._first(out_TN), scale=scale)

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> None:
        self.backend.linear(self._first(x_TK), w, self._first(out_TN))

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> None:
        self.backend.add_linear(self._first(x_TK), w, self._first(residual_TN))

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> None:
        self.backend.gated_linear(self._first(x_TK), gate_up, self._first(out_TN), gate=gate)

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> None:
        self.backend.add_experts(self._first(x_TN), self._first(logits_TE), experts, self._first(residual_TN))

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> None:
        self.backend.rms_norm(self._first(x), weight_N, eps, self._first(out))

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> None:
        self.backend.add_rms_norm(self._first(x), weight_N, eps, self._first(residual))

    def rotate(self, x_THD: Tensor, rotary: Rotary) -> None:
        self.backend.rotate(self._first(x_THD), rotary, self.rows)

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing) -> None:
        self.backend.store(self._first(k_THD), self._first(v_THD), kv, self.rows)

    def attention(
        self,
        q_THD: Tensor,
        kv: LayerKV | LayerRing,
        scale: float,
        out_THD: Tensor,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> None:
        q_THD, out_THD = self._first(q_THD), self._first(out_THD)
        self.backend.attention(q_THD, kv, self.rows, scale, out_THD, window=window, sinks_H=sinks_H)

    def restore(self, ring: LayerRing) -> None:
        self.backend.restore(ring, self.rows)

    def capture(self, ring: LayerRing) -> None:
        self.backend.capture(ring, self.rows)

    def commit(self, ring: LayerRing) -> None:
        self.backend.commit(ring, self.rows)

    def _first(self, x: Tensor) -> Tensor:
        return x[: len(self.rows.sequence_T)]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Four words of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    x, (k0, k1), low = list(counter), key, 0xFFFFFFFF
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [b >> 32 ^ x[1] ^ k0, b & low, a >> 32 ^ x[3] ^ k1, a & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return x


def uniform(seed: int, position: int) -> float:
    """53 bits in [0, 1) that depend on (seed, position) alone."""
    low = 0xFFFFFFFF
    x = philox((position & low, position >> 32 & low, 0, 0), (seed & low, seed >> 32 & low))
    return ((x[1] << 32 | x[0]) >> 11) * 2.0**-53


def _rms_norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_N


def _gather(pool_PBHD: Tensor, table_N: Tensor, length: int) -> Tensor:
    """The first `length` rows of a sequence, [length, H, D]."""
    blocks = -(-length // pool_PBHD.shape[1])
    return pool_PBHD[table_N[:blocks].long()].flatten(0, 1)[:length]


def _sequence_rows(kv: LayerKV | LayerRing, rows: Rows, sequence: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions 0..end-1, [end, H, D]; what a ring no longer has is anything."""
    if isinstance(kv, LayerKV):
        table_N = rows.table_SN[sequence]
        return _gather(kv.k_PBHD, table_N, end), _gather(kv.v_PBHD, table_N, end)
    state, (_, ring_rows) = rows.needed_rings, _lengths(kv)
    slot, start = int(state.slot_S[sequence]), int(state.start_S[sequence])
    mine = (rows.sequence_T == sequence).nonzero().flatten()
    before = torch.arange(min(start, end), device=mine.device) % ring_rows
    k_NHD, v_NHD = (
        torch.cat([slots[slot, before], own[0, mine[: max(0, end - start)]]])
        for slots, own in _sides(kv.slots, kv.own)
    )
    return k_NHD, v_NHD


def _sides(a: LayerKV, b: LayerKV) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys of both, values of both."""
    return (a.k_PBHD, b.k_PBHD), (a.v_PBHD, b.v_PBHD)


def _lengths(ring: LayerRing) -> tuple[int, int]:
    """Rows of a segment and of the ring."""
    return 0 if ring.segments is None else ring.segments.k_PBHD.shape[1], ring.slots.k_PBHD.shape[1]


def _valid_from(ring: LayerRing, rows: Rows, sequence: int) -> int:
    return int(rows.needed_rings.valid_from_S[sequence]) if ring.segments is None else 0


def _without_nan(logits_TV: Tensor) -> Tensor:
    return logits_TV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def adjusted(logits_TV: Tensor, adjustments: Sequence[Adjustment]) -> Tensor:
    if adjustments:
        logits_TV = logits_TV.clone()
    for by in adjustments:
        x_V = logits_TV[by.row]
        x_V.index_put_((by.bias_ids,), by.bias, accumulate=True)
        in_prompt_V, drawn_V = (
            torch.bincount(ids, minlength=len(x_V)).float()
            for ids in (by.token_ids[: by.num_prompt_tokens], by.token_ids[by.num_prompt_tokens :])
        )
        repetition, frequency, presence = (
            x_V.new_tensor(p) for p in (by.repetition_penalty, by.frequency_penalty, by.presence_penalty)
        )
        repeated_V = torch.where(x_V > 0, x_V / repetition, x_V * repetition)
        x_V.copy_(torch.where(in_prompt_V + drawn_V > 0, repeated_V, x_V))
        x_V -= frequency * drawn_V
        x_V -= presence * (drawn_V > 0)
    return logits_TV


def _weights(logits_TV: Tensor, temperature_T1: Tensor) -> Tensor:
    best_T1 = logits_TV.max(-1, keepdim=True).values
    weight_TV = _exp2((logits_TV - best_T1) * (1.4426950408889634 / temperature_T1)).double()
    return ((weight_TV * 2**34).round() / 2**34).nan_to_num(nan=0.0)


def ln(x: Tensor) -> Tensor:
    m, exponent = torch.frexp(x)
    small = m < 0.7071067811865476
    m, exponent = torch.where(small, m * 2, m), exponent - small.int()
    s = (m - 1) / (m + 1)
    z, series = s * s, torch.zeros_like(s)
    for k in range(23, 0, -2):
        series = series * z + 1 / k
    return exponent.double() * 0.6931471805599453 + 2 * s * series


def _exp2(x: Tensor) -> Tensor:
    """2^x for x <= 0 by the steps of lanes.h; an fma rounded from double is as good as always the same."""
    y = x.clamp(min=-125)
    n = y.round()
    f = y - n
    p = torch.full_like(f, 0.00015353362)
    for c in (0.00133988739, 0.00961843692, 0.0555033237, 0.240226477, 0.693147182, 1.0):
        p = (p.double() * f.double() + torch.tensor(c, dtype=torch.float32).double().item()).float()
    return torch.ldexp(p, n.int()).masked_fill(x < -125, 0)
