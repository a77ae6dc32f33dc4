"""The exact CPU backend: our C++ kernels, called through ctypes, which releases the GIL.

An operation becomes a struct of addresses once what would corrupt memory has been checked. It runs at once,
or is recorded on a tape with others, to run together in one call a step.
"""

from collections.abc import Callable, Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from typing import Self
from weakref import finalize

import torch
from torch import Tensor

from shoal.kernels import library
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
    RingRows,
    Rotary,
    Rows,
    Sampling,
    Tape,
)

# Names the bits, of every instruction set alike. Bump it with any change that alters a bit of any output:
# computed keys and values are shared under this name.
NUMERICS_ID = "shoal-exact-1"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GATES: dict[Gate, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
_FLOAT32 = torch.float32  # one lookup less in what every call checks
_MAX_GROUP = 512
_VECTOR = 16


class PackedLinear:
    """Panels in memory of the library's own, given back when the object dies."""

    def __init__(
        self, dtype: torch.dtype, num_outputs: int, num_inputs: int, *, gate_up: bool, has_bias: bool
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"weights are {dtype}; float32, bfloat16 and float16 can be packed")
        lib = library.load()
        address = lib.shoal_linear_new(_DTYPES[dtype], num_outputs, num_inputs, gate_up, has_bias)
        if not address:
            raise MemoryError(f"no memory for a [{num_outputs}, {num_inputs}] matrix")
        finalize(self, lib.shoal_linear_free, address)
        self.address: int = address
        self.dtype = dtype
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.gate_up = gate_up

    def fill(self, weight_NK: Tensor, *, first: int, part: int, threads: int) -> None:
        _check_weight(weight_NK, self.dtype, self.num_inputs)
        rows, stride = weight_NK.shape[0], weight_NK.stride(0)
        library.load().shoal_linear_fill(
            self.address, part, first, rows, weight_NK.data_ptr(), stride, threads
        )

    def fill_bias(self, bias_N: Tensor, *, part: int) -> None:
        _expect("bias", bias_N, torch.float32, (self.num_outputs,))
        library.load().shoal_linear_fill_bias(self.address, part, bias_N.data_ptr())

    def settle(self, threads: int) -> Self:
        """To be called once, when all is filled: bfloat16 then takes 12 bits where that loses nothing."""
        if not library.load().shoal_linear_settle(self.address, threads):
            raise MemoryError(f"no memory for a [{self.num_outputs}, {self.num_inputs}] matrix")
        return self

    @property
    def num_bytes(self) -> int:
        size: int = library.load().shoal_linear_num_bytes(self.address)
        return size


@dataclass(frozen=True, slots=True)
class Op:
    struct: library.Op
    num_rows: int
    """Of its tensors: at most so many can be computed."""
    keeps: tuple[object, ...]
    """What the struct points to."""


class CpuBackend:
    """The same bits whatever the instruction set, the threads and the other rows. Safe for many callers."""

    numerics_id = NUMERICS_ID

    def __init__(self, threads: int, isa: str | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; at least 1 is needed")
        self._kernels = library.kernels(isa)
        self._threads = threads

    @property
    def name(self) -> str:
        return f"cpu-{self._kernels.isa}"

    def pack(self, weights_NK: Sequence[Tensor], bias_N: Tensor | None = None) -> PackedLinear:
        num_outputs, (dtype, num_inputs) = sum(len(w) for w in weights_NK), _kind(weights_NK)
        linear = PackedLinear(dtype, num_outputs, num_inputs, gate_up=False, has_bias=bias_N is not None)
        first = 0
        for weight in weights_NK:
            linear.fill(weight, first=first, part=0, threads=self._threads)
            first += len(weight)
        if bias_N is not None:
            linear.fill_bias(bias_N, part=0)
        return linear.settle(self._threads)

    def pack_gate_up(
        self,
        gate_NK: Tensor,
        up_NK: Tensor,
        gate_bias_N: Tensor | None = None,
        up_bias_N: Tensor | None = None,
    ) -> PackedLinear:
        dtype, num_inputs = _kind((gate_NK, up_NK))
        if len(gate_NK) != len(up_NK):
            raise ValueError(f"gate has {len(gate_NK)} outputs, up {len(up_NK)}")
        if (gate_bias_N is None) is not (up_bias_N is None):
            raise ValueError("of gate and up only one has a bias")
        has_bias = gate_bias_N is not None
        linear = PackedLinear(dtype, len(gate_NK), num_inputs, gate_up=True, has_bias=has_bias)
        for part, (weight, bias) in enumerate(((gate_NK, gate_bias_N), (up_NK, up_bias_N))):
            linear.fill(weight, first=0, part=part, threads=self._threads)
            if bias is not None:
                linear.fill_bias(bias, part=part)
        return linear.settle(self._threads)

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> Tensor:
        self._run(self._kernels.linear, _linear(x_TK, w, out_TN))
        return out_TN

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> Tensor:
        self._run(self._kernels.linear, _linear(x_TK, w, residual_TN, add=True))
        return residual_TN

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> Tensor:
        self._run(self._kernels.linear, _linear(x_TK, gate_up, out_TN, gate=gate))
        return out_TN

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> Tensor:
        self._run(self._kernels.experts, _experts(x_TN, logits_TE, experts, residual_TN))
        return residual_TN

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> Tensor:
        self._run(self._kernels.gather, _gather(table_VN, id_T, out_TN, scale))
        return out_TN

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> Tensor:
        self._run(self._kernels.rms_norm, _rms_norm(x, weight_N, eps, out))
        return out

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> Tensor:
        self._run(self._kernels.rms_norm, _rms_norm(x, weight_N, eps, residual, add=True))
        return residual

    def rotate(self, x_THD: Tensor, rotary: Rotary, rows: Rows) -> None:
        self._run(self._kernels.rotate, _rotate(x_THD, rotary), rows)

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing, rows: Rows) -> None:
        self._run(self._kernels.store, _store(k_THD, v_THD, kv), rows)

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
        op = _attention(q_THD, kv, scale, out_THD, window=window, sinks_H=sinks_H)
        self._run(self._kernels.attention, op, rows)
        return out_THD

    def restore(self, ring: LayerRing, rows: Rows) -> None:
        if ring.segments is not None:
            self.record(lambda tape: tape.restore(ring))(rows)

    def capture(self, ring: LayerRing, rows: Rows) -> None:
        if ring.segments is not None:
            self.record(lambda tape: tape.capture(ring))(rows)

    def commit(self, ring: LayerRing, rows: Rows) -> None:
        self.record(lambda tape: tape.commit(ring))(rows)

    def recurrence(self, x: RecurrentRows, states: HeadStates, rows: Rows, out_THV: Tensor) -> Tensor:
        self._run(self._kernels.recurrence, _recurrence(x, states, out_THV), rows)
        return out_THV

    def record(self, layers: Callable[[Tape], None]) -> Callable[[Rows], None]:
        tape = CpuTape(self._kernels)
        layers(tape)
        return tape.close(self._threads)

    def sample(self, logits_TV: Tensor, how: Sampling) -> Tensor:
        rows, stride, vocabulary = _logits(logits_TV)
        _expect("temperature", how.temperature_T, torch.float32, (rows,))
        _expect("top_k", how.top_k_T, torch.int32, (rows,))
        _expect("top_p", how.top_p_T, torch.float32, (rows,))
        _expect("min_p", how.min_p_T, torch.float32, (rows,))
        _expect("seed", how.seed_T, torch.int64, (rows,))
        _expect("position", how.position_T, torch.int64, (rows,))
        adjustments = [_adjustment(adjustment) for adjustment in how.adjustments]
        token_T = torch.empty(rows, dtype=torch.int64)
        failed = self._kernels.sample(
            *(logits_TV.data_ptr(), stride, rows, vocabulary),
            *(how.temperature_T.data_ptr(), how.top_k_T.data_ptr(), how.top_p_T.data_ptr()),
            *(how.min_p_T.data_ptr(), how.seed_T.data_ptr(), how.position_T.data_ptr()),
            *((library.Adjustment * len(adjustments))(*adjustments), len(adjustments)),
            *(token_T.data_ptr(), self._threads),
        )
        if failed:
            outside = f"outside 0..{rows - 1} or twice, or an id outside 0..{vocabulary - 1}"
            raise ValueError(f"adjustments name a row {outside}")
        return token_T

    def logprobs(self, logits_TV: Tensor, row_R: Tensor, token_R: Tensor, top: int) -> Logprobs:
        rows, stride, vocabulary = _logits(logits_TV)
        count, top = len(row_R), min(top, vocabulary)
        _expect("row", row_R, torch.int64, (count,))
        _expect("token", token_R, torch.int64, (count,))
        said = Logprobs(
            logprob_R=torch.empty(count, dtype=torch.float64),
            top_ids_RK=torch.empty(count, top, dtype=torch.int64),
            top_RK=torch.empty(count, top, dtype=torch.float64),
        )
        failed = self._kernels.logprobs(
            *(logits_TV.data_ptr(), stride, rows, vocabulary),
            *(row_R.data_ptr(), token_R.data_ptr(), count, top),
            *(said.logprob_R.data_ptr(), said.top_ids_RK.data_ptr(), said.top_RK.data_ptr(), self._threads),
        )
        if failed:
            raise ValueError(f"a row is outside 0..{rows - 1} or a token outside 0..{vocabulary - 1}")
        return said

    def _run(self, kernel: library.Function, op: Op, rows: Rows | None = None) -> None:
        where = library.Rows(count=op.num_rows) if rows is None else _rows(rows)
        if where.count != op.num_rows:
            raise ValueError(f"tensors of {op.num_rows} rows for {where.count}")
        _raise_if(kernel(addressof(op.struct), addressof(where), self._threads))


class CpuTape:
    """Records operations; holds what they point to."""

    def __init__(self, kernels: library.Kernels) -> None:
        self._kernels = kernels
        self._recorded: list[tuple[library.Function, Op]] = []

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> None:
        self._recorded.append((self._kernels.gather, _gather(table_VN, id_T, out_TN, scale)))

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> None:
        self._recorded.append((self._kernels.linear, _linear(x_TK, w, out_TN)))

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> None:
        self._recorded.append((self._kernels.linear, _linear(x_TK, w, residual_TN, add=True)))

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> None:
        self._recorded.append((self._kernels.linear, _linear(x_TK, gate_up, out_TN, gate=gate)))

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> None:
        self._recorded.append((self._kernels.experts, _experts(x_TN, logits_TE, experts, residual_TN)))

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> None:
        self._recorded.append((self._kernels.rms_norm, _rms_norm(x, weight_N, eps, out)))

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> None:
        self._recorded.append((self._kernels.rms_norm, _rms_norm(x, weight_N, eps, residual, add=True)))

    def rotate(self, x_THD: Tensor, rotary: Rotary) -> None:
        self._recorded.append((self._kernels.rotate, _rotate(x_THD, rotary)))

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing) -> None:
        self._recorded.append((self._kernels.store, _store(k_THD, v_THD, kv)))

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
        op = _attention(q_THD, kv, scale, out_THD, window=window, sinks_H=sinks_H)
        self._recorded.append((self._kernels.attention, op))

    def restore(self, ring: LayerRing) -> None:
        if ring.segments is not None:
            self._recorded.append((self._kernels.restore, _ring_op(ring)))

    def capture(self, ring: LayerRing) -> None:
        if ring.segments is not None:
            self._recorded.append((self._kernels.capture, _ring_op(ring)))

    def commit(self, ring: LayerRing) -> None:
        self._recorded.append((self._kernels.commit, _ring_op(ring)))

    def close(self, threads: int) -> Callable[[Rows], None]:
        recorded, run_tape = tuple(self._recorded), library.load().shoal_run_tape
        most = min((op.num_rows for _, op in recorded), default=0)
        calls = (library.Call * len(recorded))(*(library.Call(kernel, op.struct) for kernel, op in recorded))

        def run(rows: Rows) -> None:
            where = _rows(rows)
            if where.count > most:
                raise ValueError(f"{where.count} rows for a tape of {most}")
            _raise_if(run_tape(addressof(calls), len(recorded), addressof(where), threads))

        return run


def _raise_if(failed: int) -> None:
    if failed:
        raise ValueError("a row's id, sequence, position, block, slot or segment is out of range")


def _packed(w: Linear, *, gate_up: bool) -> PackedLinear:
    if not isinstance(w, PackedLinear) or w.gate_up is not gate_up:
        raise ValueError(f"{w!r} is not a {'gate-up' if gate_up else 'plain'} matrix of this backend")
    return w


def _gate(gate: Gate) -> int:
    if gate not in _GATES:
        raise ValueError(f"gate {gate!r} is not among {', '.join(_GATES)}")
    return _GATES[gate]


def _linear(x_TK: Tensor, w: Linear, out_TN: Tensor, *, gate: Gate | None = None, add: bool = False) -> Op:
    w = _packed(w, gate_up=gate is not None)
    rows, x_stride = _matrix("x", x_TK, w.num_inputs)
    out_rows, out_stride = _matrix("out", out_TN, w.num_outputs)
    if out_rows != rows:
        raise ValueError(f"x has {rows} rows, out {out_rows}")
    struct = library.LinearOp(
        *(w.address, x_TK.data_ptr(), x_stride, out_TN.data_ptr(), out_stride),
        *(add, 0 if gate is None else _gate(gate)),
    )
    return Op(struct, rows, (x_TK, w, out_TN))


def _experts(x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> Op:
    count, size = len(experts.gate_up), x_TN.shape[-1]
    if len(experts.down) != count or not 0 < experts.top <= count:
        raise ValueError(f"{experts.top} of {count} gate-up and {len(experts.down)} down matrices")
    gate_up = [_packed(w, gate_up=True) for w in experts.gate_up]
    down = [_packed(w, gate_up=False) for w in experts.down]
    shapes = {(w.num_inputs, w.num_outputs) for w in gate_up} | {(w.num_outputs, w.num_inputs) for w in down}
    if len(shapes) != 1 or gate_up[0].num_inputs != size:
        raise ValueError(f"x has {size} columns; experts have matrices of {sorted(shapes)}")
    rows, x_stride = _matrix("x", x_TN, size)
    logits_rows, logits_stride = _matrix("logits", logits_TE, count)
    out_rows, out_stride = _matrix("residual", residual_TN, size)
    if not rows == logits_rows == out_rows:
        raise ValueError(f"x has {rows} rows, logits {logits_rows}, residual {out_rows}")
    addresses = [(c_void_p * count)(*(w.address for w in matrices)) for matrices in (gate_up, down)]
    struct = library.ExpertsOp(
        *(x_TN.data_ptr(), x_stride, logits_TE.data_ptr(), logits_stride),
        *(*map(addressof, addresses), residual_TN.data_ptr(), out_stride),
        *(count, experts.top, _gate(experts.gate)),
    )
    return Op(struct, rows, (x_TN, logits_TE, experts, residual_TN, addresses))


def _gather(table_VN: Tensor, id_T: Tensor, out_TN: Tensor, scale: float) -> Op:
    table_rows, size = table_VN.shape
    rows, out_stride = _matrix("out", out_TN, size)
    _expect("id", id_T, torch.int64, (rows,))
    if table_VN.dtype not in _DTYPES or table_VN.stride(1) != 1 or not table_VN.is_cpu:
        raise ValueError(f"the table must be floats with contiguous rows, not {_describe(table_VN)}")
    struct = library.GatherOp(
        *(table_VN.data_ptr(), table_VN.stride(0), table_rows, _DTYPES[table_VN.dtype]),
        *(id_T.data_ptr(), out_TN.data_ptr(), out_stride, size, scale),
    )
    return Op(struct, rows, (table_VN, id_T, out_TN))


def _rms_norm(x: Tensor, weight_N: Tensor, eps: float, out: Tensor, *, add: bool = False) -> Op:
    rows, heads, size, x_stride = _heads_or_matrix("x", x)
    *out_shape, out_stride = _heads_or_matrix("out", out)
    _expect("weight", weight_N, torch.float32, (size,))
    if out_shape != [rows, heads, size]:
        raise ValueError(f"x has rows of {list(x.shape)}, out {list(out.shape)}")
    struct = library.RmsNormOp(
        *(x.data_ptr(), x_stride, weight_N.data_ptr(), out.data_ptr(), out_stride, heads, size, eps, add)
    )
    return Op(struct, rows, (x, weight_N, out))


def _rotate(x_THD: Tensor, rotary: Rotary) -> Op:
    rows, heads, head_size, stride = _heads("x", x_THD)
    positions, half = rotary.cos.shape
    _expect("cos", rotary.cos, torch.float32, (positions, half))
    _expect("sin", rotary.sin, torch.float32, (positions, half))
    if 2 * half > head_size:
        raise ValueError(f"{2 * half} of {head_size} cannot be rotated")
    struct = library.RotateOp(
        *(x_THD.data_ptr(), stride, heads, head_size),
        *(rotary.cos.data_ptr(), rotary.sin.data_ptr(), positions, half),
    )
    return Op(struct, rows, (x_THD, rotary))


def _store(k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing) -> Op:
    pool, ring, keeps = _places(kv)
    *k_shape, k_stride = _heads("k", k_THD)
    *v_shape, v_stride = _heads("v", v_THD)
    if k_shape != v_shape or k_shape[1:] != [pool.heads, pool.head_size]:
        raise ValueError(f"k is {k_shape}, v {v_shape}; the pool has {pool.heads} heads of {pool.head_size}")
    struct = library.StoreOp(k_THD.data_ptr(), k_stride, v_THD.data_ptr(), v_stride, addressof(pool), ring)
    return Op(struct, k_shape[0], (k_THD, v_THD, keeps))


def _attention(
    q_THD: Tensor,
    kv: LayerKV | LayerRing,
    scale: float,
    out_THD: Tensor,
    *,
    window: int | None,
    sinks_H: Tensor | None,
) -> Op:
    pool, ring, keeps = _places(kv)
    *q_shape, q_stride = _heads("q", q_THD)
    *out_shape, out_stride = _heads("out", out_THD)
    rows, heads, head_size = q_shape
    if out_shape != q_shape or head_size != pool.head_size:
        raise ValueError(f"q is {q_shape} and out {out_shape}; the pool has heads of {pool.head_size}")
    if heads % pool.heads or heads // pool.heads > _MAX_GROUP:
        raise ValueError(f"{heads} query heads cannot share {pool.heads} key/value heads")
    if window is not None and not 0 < window < 1 << 31:
        raise ValueError(f"a window of {window} positions; it must be from 1 to {(1 << 31) - 1}")
    if ring and (window is None or window - 1 > pool.block_rows):
        raise ValueError(f"a window of {window} positions over a ring of {pool.block_rows} rows")
    if sinks_H is not None:
        _expect("sinks", sinks_H, torch.float32, (heads,))
    struct = library.AttentionOp(
        *(q_THD.data_ptr(), q_stride, addressof(pool), ring, out_THD.data_ptr(), out_stride),
        *(heads, window or 0, scale, None if sinks_H is None else sinks_H.data_ptr()),
    )
    return Op(struct, rows, (q_THD, keeps, out_THD, sinks_H))


def _ring_op(ring: LayerRing) -> Op:
    """Of as many rows as can be beside the ring."""
    struct = _ring(ring)
    return Op(library.RingOp(addressof(struct)), struct.own_rows, (struct, ring))


def _recurrence(x: RecurrentRows, states: HeadStates, out_THV: Tensor) -> Op:
    *q_shape, q_stride = _heads("q", x.q_THK)
    *k_shape, k_stride = _heads("k", x.k_THK)
    *v_shape, v_stride = _heads("v", x.v_THV)
    *out_shape, out_stride = _heads("out", out_THV)
    (rows, key_heads, key_size), (_, heads, value_size) = k_shape, v_shape
    if q_shape != k_shape or out_shape != v_shape or v_shape[0] != rows or heads % key_heads:
        raise ValueError(f"q is {q_shape}, k {k_shape}, v {v_shape}, out {out_shape}")
    if value_size % _VECTOR:
        raise ValueError(f"values of {value_size} are not a multiple of {_VECTOR}")
    _expect("decay", x.decay_TH, torch.float32, (rows, heads))
    if x.beta_TH is not None:
        _expect("beta", x.beta_TH, torch.float32, (rows, heads))
    slots, segments = states.slots_PHKV, states.segments_PHKV
    size = (heads, key_size, value_size)
    struct = library.RecurrenceOp(
        *(x.q_THK.data_ptr(), q_stride, x.k_THK.data_ptr(), k_stride, x.v_THV.data_ptr(), v_stride),
        *(x.decay_TH.data_ptr(), None if x.beta_TH is None else x.beta_TH.data_ptr()),
        *(out_THV.data_ptr(), out_stride),
        *_states("slots", slots, size),
        *((None, 0, 0) if segments is None else _states("segments", segments, size)),
        *(key_heads, heads, key_size, value_size),
    )
    return Op(struct, rows, (x, states, out_THV))


def _states(what: str, x_PHKV: Tensor, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Address, stride and number of states."""
    _, key_size, value_size = shape
    inner = (key_size * value_size, value_size, 1)
    if x_PHKV.dtype is not torch.float32 or not x_PHKV.is_cpu:
        raise ValueError(f"{what} must be float32 on the CPU, not {_describe(x_PHKV)}")
    if x_PHKV.shape[1:] != shape or x_PHKV.stride()[1:] != inner:
        raise ValueError(f"{what} must be [P, *{list(shape)}], contiguous but for P, not {_describe(x_PHKV)}")
    return x_PHKV.data_ptr(), x_PHKV.stride(0), len(x_PHKV)


def _rows(rows: Rows) -> library.Rows:
    count, (sequences, width) = len(rows.sequence_T), rows.table_SN.shape
    _expect("sequence", rows.sequence_T, torch.int32, (count,))
    _expect("position", rows.position_T, torch.int32, (count,))
    _expect("table", rows.table_SN, torch.int32, (sequences, width))
    where = library.Rows(
        sequence=rows.sequence_T.data_ptr(),
        position=rows.position_T.data_ptr(),
        table=rows.table_SN.data_ptr(),
        count=count,
        sequences=sequences,
        width=width,
    )
    if rows.store_from_S is not None:
        _expect("store_from", rows.store_from_S, torch.int32, (sequences,))
        where.store_from = rows.store_from_S.data_ptr()
    if rows.rings is not None:
        _add_ring_rows(where, rows.rings)
    return where


def _add_ring_rows(where: library.Rows, rows: RingRows) -> None:
    for name, x in (("slot", rows.slot_S), ("start", rows.start_S), ("valid_from", rows.valid_from_S)):
        _expect(name, x, torch.int32, (where.sequences,))
        setattr(where, name, x.data_ptr())
    for name, x in (("restores", rows.restores_C3), ("captures", rows.captures_C3)):
        _expect(name, x, torch.int32, (len(x), 3))
        setattr(where, name, x.data_ptr())
        setattr(where, f"num_{name}", len(x))


def _places(kv: LayerKV | LayerRing) -> tuple[library.Pool, int | None, object]:
    """The pool that rows are read from, the address of the ring if it is one's, and what both point to."""
    if isinstance(kv, LayerKV):
        pool = _pool(kv)
        return pool, None, (pool, kv)
    ring = _ring(kv)
    return ring.slots, addressof(ring), (ring, kv)


def _ring(ring: LayerRing) -> library.Ring:
    slots, own = _pool(ring.slots), _pool(ring.own)
    segments = library.Pool() if ring.segments is None else _pool(ring.segments)
    for what, pool in (("own rows", own), ("segments", segments)):
        same = (pool.heads, pool.head_size, pool.is_bf16) == (slots.heads, slots.head_size, slots.is_bf16)
        if pool.blocks and not same:
            raise ValueError(f"the {what} of a ring have other heads, or another dtype")
    if own.blocks != 1 or not slots.block_rows or (ring.segments is not None and not segments.blocks):
        raise ValueError("a ring needs rows, one block of own rows beside it, and segments if it is stored")
    return library.Ring(slots, segments, own.k, own.v, own.block_rows)


def _pool(kv: LayerKV) -> library.Pool:
    k, v = kv.k_PBHD, kv.v_PBHD
    blocks, block_rows, heads, head_size = k.shape
    inner = (heads * head_size, head_size, 1)
    for what, pool in (("k", k), ("v", v)):
        if pool.shape != k.shape or pool.stride()[1:] != inner or pool.device.type != "cpu":
            raise ValueError(f"the {what} pool must be a CPU tensor [P, B, H, D] with [B, H, D] contiguous")
    if k.dtype is not v.dtype or k.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the pool is {k.dtype} and {v.dtype}; both must be float32 or both bfloat16")
    if head_size % _VECTOR:
        raise ValueError(f"head size {head_size} is not a multiple of {_VECTOR}")
    bf16 = k.dtype is torch.bfloat16
    strides = (k.stride(0), v.stride(0))
    return library.Pool(k.data_ptr(), v.data_ptr(), *strides, blocks, block_rows, heads, head_size, bf16)


def _logits(logits_TV: Tensor) -> tuple[int, int, int]:
    """Rows, row stride and vocabulary."""
    vocabulary = logits_TV.shape[-1]
    rows, stride = _matrix("logits", logits_TV, vocabulary)
    if not 0 < vocabulary <= 1 << 19:  # up to here sums of weights are exact
        raise ValueError(f"a vocabulary of {vocabulary} cannot be sampled exactly; 1 to 524288 can")
    return rows, stride, vocabulary


def _adjustment(by: Adjustment) -> library.Adjustment:
    count, biases = len(by.token_ids), len(by.bias_ids)
    _expect("token_ids", by.token_ids, torch.int64, (count,))
    _expect("bias_ids", by.bias_ids, torch.int64, (biases,))
    _expect("bias", by.bias, torch.float32, (biases,))
    if not 0 <= by.num_prompt_tokens <= count:
        raise ValueError(f"{by.num_prompt_tokens} of {count} tokens are said to be the prompt's")
    return library.Adjustment(
        *(by.row, by.token_ids.data_ptr(), count, by.num_prompt_tokens),
        *(by.repetition_penalty, by.frequency_penalty, by.presence_penalty),
        *(by.bias_ids.data_ptr(), by.bias.data_ptr(), biases),
    )


def _kind(weights: Sequence[Tensor]) -> tuple[torch.dtype, int]:
    if not weights:
        raise ValueError("no weights to pack")
    return weights[0].dtype, weights[0].shape[1]


def _check_weight(weight: Tensor, dtype: torch.dtype, num_inputs: int) -> None:
    if weight.dtype is not dtype or weight.dim() != 2 or weight.shape[1] != num_inputs:
        raise ValueError(f"a {weight.dtype} weight of {tuple(weight.shape)} among {dtype} [N, {num_inputs}]")
    if weight.stride(1) != 1 or weight.device.type != "cpu":
        raise ValueError("weights must be CPU tensors with contiguous rows")


def _matrix(what: str, x: Tensor, columns: int) -> tuple[int, int]:
    """Rows and row stride of a float32 [T, columns] CPU tensor with contiguous rows."""
    if x.dtype is _FLOAT32 and x.is_cpu:
        shape = x.shape
        if len(shape) == 2 and shape[1] == columns:
            if x.is_contiguous():
                return shape[0], columns
            stride = x.stride()
            if stride[1] == 1:
                return shape[0], stride[0]
    raise ValueError(f"{what} must be float32 [T, {columns}] with contiguous rows, not {_describe(x)}")


def _heads(what: str, x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, head size and row stride of a float32 [T, H, D] CPU tensor with [H, D] contiguous."""
    if x.dtype is _FLOAT32 and x.is_cpu:
        shape, stride = x.shape, x.stride()
        if len(shape) == 3 and stride[2] == 1 and stride[1] == shape[2]:
            return shape[0], shape[1], shape[2], stride[0]
    raise ValueError(f"{what} must be float32 [T, H, D] with [H, D] contiguous, not {_describe(x)}")


def _heads_or_matrix(what: str, x: Tensor) -> tuple[int, int, int, int]:
    """As `_heads`; a matrix has one head."""
    if x.dim() == 3:
        return _heads(what, x)
    rows, stride = _matrix(what, x, x.shape[-1])
    return rows, 1, x.shape[-1], stride


def _expect(what: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{what} must be contiguous {dtype} {list(shape)}, not {_describe(x)}")


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
