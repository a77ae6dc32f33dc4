"""The exact CPU backend: our C++ kernels, called through ctypes, which releases the GIL.

A decode step makes some 250 of these calls, so each does few and cheap things: it checks what would corrupt
memory and hands over addresses. What describes a whole step or a layer is looked at once.
"""

from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import TypeVar, cast
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from shoal.kernels import library
from shoal.kernels.backend import LayerKV, Linear, Rotary, Rows, Sampling

# Names the bits, of every instruction set alike. Bump it with any change that alters a bit of any output:
# computed keys and values are shared under this name.
NUMERICS_ID = "shoal-exact-1"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT32 = torch.float32  # one lookup less in what every call checks
_MAX_GROUP = 512
_VECTOR = 16

T = TypeVar("T")


class PackedLinear:
    """Panels in memory of the library's own, given back when the object dies."""

    def __init__(self, dtype: torch.dtype, num_outputs: int, num_inputs: int, *, gate_up: bool) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"weights are {dtype}; float32, bfloat16 and float16 can be packed")
        lib = library.load()
        address = lib.shoal_linear_new(_DTYPES[dtype], num_outputs, num_inputs, gate_up)
        if not address:
            raise MemoryError(f"no memory for a [{num_outputs}, {num_inputs}] matrix")
        finalize(self, lib.shoal_linear_free, address)
        self.address: int = address
        self.dtype = dtype
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.gate_up = gate_up
        self.num_bytes: int = lib.shoal_linear_num_bytes(address)

    def fill(self, weight_NK: Tensor, *, first: int, part: int, threads: int) -> None:
        _check_weight(weight_NK, self.dtype, self.num_inputs)
        rows, stride = weight_NK.shape[0], weight_NK.stride(0)
        library.load().shoal_linear_fill(
            self.address, part, first, rows, weight_NK.data_ptr(), stride, threads
        )


class CpuBackend:
    """The same bits whatever the instruction set, the threads and the other rows. Safe for many callers."""

    numerics_id = NUMERICS_ID

    def __init__(self, threads: int, isa: str | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; at least 1 is needed")
        self._kernels = library.kernels(isa)
        self._threads = threads
        self._seen: WeakKeyDictionary[object, object] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return f"cpu-{self._kernels.isa}"

    def pack(self, weights_NK: Sequence[Tensor]) -> PackedLinear:
        num_outputs, (dtype, num_inputs) = sum(len(w) for w in weights_NK), _kind(weights_NK)
        linear = PackedLinear(dtype, num_outputs, num_inputs, gate_up=False)
        first = 0
        for weight in weights_NK:
            linear.fill(weight, first=first, part=0, threads=self._threads)
            first += len(weight)
        return linear

    def pack_gate_up(self, gate_NK: Tensor, up_NK: Tensor) -> PackedLinear:
        dtype, num_inputs = _kind((gate_NK, up_NK))
        if len(gate_NK) != len(up_NK):
            raise ValueError(f"gate has {len(gate_NK)} outputs, up {len(up_NK)}")
        linear = PackedLinear(dtype, len(gate_NK), num_inputs, gate_up=True)
        for part, weight in enumerate((gate_NK, up_NK)):
            linear.fill(weight, first=0, part=part, threads=self._threads)
        return linear

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> Tensor:
        return self._linear(x_TK, w, out_TN, False, False)

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> Tensor:
        return self._linear(x_TK, w, residual_TN, False, True)

    def silu_mul_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor) -> Tensor:
        return self._linear(x_TK, gate_up, out_TN, True, False)

    def _linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor, gate_up: bool, add: bool) -> Tensor:
        if not isinstance(w, PackedLinear) or w.gate_up is not gate_up:
            raise ValueError(f"{w!r} is not a {'gate-up' if gate_up else 'plain'} matrix of this backend")
        rows, x_stride = _matrix("x", x_TK, w.num_inputs)
        out_rows, out_stride = _matrix("out", out_TN, w.num_outputs)
        if out_rows != rows:
            raise ValueError(f"x has {rows} rows, out {out_rows}")
        self._kernels.linear(
            w.address, x_TK.data_ptr(), x_stride, out_TN.data_ptr(), out_stride, rows, add, self._threads
        )
        return out_TN

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, out_TN: Tensor) -> Tensor:
        size = x_TN.shape[-1]
        rows, x_stride = _matrix("x", x_TN, size)
        out_rows, out_stride = _matrix("out", out_TN, size)
        _expect("weight", weight_N, torch.float32, (size,))
        if out_rows != rows:
            raise ValueError(f"x has {rows} rows, out {out_rows}")
        self._kernels.rms_norm(
            *(x_TN.data_ptr(), x_stride, weight_N.data_ptr(), eps),
            *(out_TN.data_ptr(), out_stride, rows, size, self._threads),
        )
        return out_TN

    def rotate(self, x_THD: Tensor, rotary: Rotary, rows: Rows) -> None:
        count, heads, head_size, stride = _heads("x", x_THD)
        where = self._once(rows, _rows)
        cos, sin, positions, half = self._once(rotary, _rotary)
        if count != where.count or 2 * half > head_size:
            raise ValueError(f"x is {tuple(x_THD.shape)} for {where.count} rows, {2 * half} rotated")
        failed = self._kernels.rotate(
            *(x_THD.data_ptr(), stride, heads, head_size, cos, sin, positions, half),
            *(addressof(where), self._threads),
        )
        if failed:
            raise ValueError(f"a position is outside the {positions} that have an angle")

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV, rows: Rows) -> None:
        where, pool = self._once(rows, _rows), self._once(kv, _pool)
        shape = (where.count, pool.heads, pool.head_size)
        *k_shape, k_stride = _heads("k", k_THD)
        *v_shape, v_stride = _heads("v", v_THD)
        if tuple(k_shape) != shape or tuple(v_shape) != shape:
            raise ValueError(f"k is {k_shape} and v {v_shape}; rows and pool need {shape}")
        failed = self._kernels.store(
            *(k_THD.data_ptr(), k_stride, v_THD.data_ptr(), v_stride),
            *(addressof(pool), addressof(where), self._threads),
        )
        if failed:
            raise ValueError("a row's sequence, position or block is outside the table or the pool")

    def attention(self, q_THD: Tensor, kv: LayerKV, rows: Rows, scale: float, out_THD: Tensor) -> Tensor:
        where, pool = self._once(rows, _rows), self._once(kv, _pool)
        count, heads, head_size, q_stride = _heads("q", q_THD)
        *out_shape, out_stride = _heads("out", out_THD)
        if out_shape != [count, heads, head_size] or count != where.count or head_size != pool.head_size:
            raise ValueError(
                f"q is {tuple(q_THD.shape)} and out {tuple(out_THD.shape)} for {where.count} rows "
                f"and heads of {pool.head_size}"
            )
        if heads % pool.heads or heads // pool.heads > _MAX_GROUP:
            raise ValueError(f"{heads} query heads cannot share {pool.heads} key/value heads")
        failed = self._kernels.attention(
            *(q_THD.data_ptr(), q_stride, heads, addressof(pool), addressof(where), scale),
            *(out_THD.data_ptr(), out_stride, self._threads),
        )
        if failed:
            raise ValueError("a row's sequence, position or block is outside the table or the pool")
        return out_THD

    def sample(self, logits_TV: Tensor, how: Sampling) -> Tensor:
        vocabulary = logits_TV.shape[-1]
        rows, stride = _matrix("logits", logits_TV, vocabulary)
        if not 0 < vocabulary <= 1 << 19:  # up to here sums of weights are exact
            raise ValueError(f"a vocabulary of {vocabulary} cannot be sampled exactly; 1 to 524288 can")
        _expect("temperature", how.temperature_T, torch.float32, (rows,))
        _expect("top_k", how.top_k_T, torch.int32, (rows,))
        _expect("top_p", how.top_p_T, torch.float32, (rows,))
        _expect("seed", how.seed_T, torch.int64, (rows,))
        _expect("position", how.position_T, torch.int64, (rows,))
        token_T = torch.empty(rows, dtype=torch.int64)
        self._kernels.sample(
            *(logits_TV.data_ptr(), stride, rows, vocabulary),
            *(how.temperature_T.data_ptr(), how.top_k_T.data_ptr(), how.top_p_T.data_ptr()),
            *(how.seed_T.data_ptr(), how.position_T.data_ptr(), token_T.data_ptr(), self._threads),
        )
        return token_T

    def _once(self, key: object, look: Callable[..., T]) -> T:
        """What `look` makes of a frozen argument: checked when first seen, kept as long as that lives."""
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = look(key)
        return cast(T, found)


def _rows(rows: Rows) -> library.Rows:
    count, (sequences, width) = len(rows.sequence_T), rows.table_SN.shape
    _expect("sequence", rows.sequence_T, torch.int32, (count,))
    _expect("position", rows.position_T, torch.int32, (count,))
    _expect("table", rows.table_SN, torch.int32, (sequences, width))
    pointers = (rows.sequence_T.data_ptr(), rows.position_T.data_ptr(), rows.table_SN.data_ptr())
    return library.Rows(*pointers, count, sequences, width)


def _rotary(rotary: Rotary) -> tuple[int, int, int, int]:
    positions, half = rotary.cos.shape
    _expect("cos", rotary.cos, torch.float32, (positions, half))
    _expect("sin", rotary.sin, torch.float32, (positions, half))
    return rotary.cos.data_ptr(), rotary.sin.data_ptr(), positions, half


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


def _expect(what: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{what} must be contiguous {dtype} {list(shape)}, not {_describe(x)}")


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
