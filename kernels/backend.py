"""What a device must be able to compute for the lean decoder: one small set of operations.

Shapes are written as suffixes: T rows of a step's packed batch, S sequences, K inputs, N outputs, H heads,
D head size, V vocabulary, P paged blocks, B rows a block, C copies. Activations are float32 on the CPU.

On the exact path a row's result depends on that row alone: never on its neighbours, the number of rows, the
thread count or the instruction set. `CpuBackend` keeps that promise to the bit, `TorchBackend` within
rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


class Linear(Protocol):
    """A weight matrix prepared by one backend; only that backend can read it."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


Gate = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""What a gated MLP makes of its two products:

silu            silu(gate) * up
gelu_tanh       gelu(gate) * up, gelu by its tanh approximation (Hendrycks & Gimpel 2016)
clamped_swiglu  gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7, up within -7..7 (gpt-oss)
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Experts:
    """Gated MLPs, of which each row takes the `top` that its router's logits like best.

    The lower id comes first among equals. The weights are a softmax over the logits of those taken alone.
    """

    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    top: int
    gate: Gate

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in (*self.gate_up, *self.down))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class RingRows:
    """What layers with a ring must know of a step's sequences and of the segments it names.

    Each sequence's rows are neighbours then, from position `start_S[s]` on, in order.
    """

    slot_S: Tensor
    """int32 [S]"""
    start_S: Tensor
    """int32 [S]: the first position that the step computes of each"""
    valid_from_S: Tensor
    """int32 [S], at most start_S: layers that are not stored have no rows before it; nobody looks there"""
    restores_C3: Tensor
    """int32 [C, 3]: (sequence, boundary, segment that has the rows before it). A boundary lies behind `start`
    where rows before it are computed again; what a segment has of these is not needed."""
    captures_C3: Tensor
    """int32 [C, 3]: the same, of boundaries whose last row the step computes"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Rows:
    """Where each row of a step stands: its sequence, its position, and the sequences' block tables.

    A row at position p of sequence s lives in block `table_SN[s, p // B]` at offset `p % B`, and attends to
    positions up to p of its own sequence. Without rings, rows of one sequence need not be neighbours.
    """

    sequence_T: Tensor
    """int32 [T]"""
    position_T: Tensor
    """int32 [T]"""
    table_SN: Tensor
    """int32 [S, blocks], padded with 0"""
    store_from_S: Tensor | None = None
    """int32 [S]: rows before it are in their blocks already and stay as they are; None writes all"""
    rings: RingRows | None = None
    """Needed by layers that keep something in slots, and by these alone."""

    @property
    def needed_rings(self) -> RingRows:
        """Raises ValueError in a step without slots."""
        if self.rings is None:
            raise ValueError("a step without slots for a layer that keeps something in them")
        return self.rings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Rotary:
    """Cosines and sines of every position: float32 [positions, rotated / 2], pairs (i, i + rotated / 2)."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class LayerKV:
    """One layer's view of the paged pool: [P, B, H, D], [B, H, D] contiguous, float32 or bfloat16."""

    k_PBHD: Tensor
    v_PBHD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class LayerRing:
    """One sliding-window layer's rows: each sequence's last ones in its slot, the step's own beside them.

    A step goes through a layer in this order: `restore`, `store`, `attention`, `capture`, `commit`. Keys
    before the step are read from the ring, and only `commit` changes it: so it need not hold a chunk.
    """

    slots: LayerKV
    """A block is a slot: the row of position p lies at p % B."""
    segments: LayerKV | None
    """A block is a segment: the last B rows before a boundary, in order of their positions. None: the layer
    is not stored."""
    own: LayerKV
    """[1, B, H, D]: row t of the step is row t. All layers may share it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class HeadStates:
    """What linear attention keeps of a sequence, instead of keys and values: a matrix of each head.

    float32 [P, H, K, V], [H, K, V] contiguous. segments: None if it is not stored.
    """

    slots_PHKV: Tensor
    segments_PHKV: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class RecurrentRows:
    """What each row of a step does to the states of its heads: float32, see `Backend.recurrence`."""

    q_THK: Tensor
    k_THK: Tensor
    """Of as many heads as v, or of fewer, each of which serves as many neighbours."""
    v_THV: Tensor
    decay_TH: Tensor
    beta_TH: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class LayerParts:
    """What a layer keeps that is no attention of ours, by name: [P, *shape], strided in P alone.

    P are blocks, slots or segments. What `slots` has and `segments` has not is never saved.
    """

    blocks: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    segments: Mapping[str, Tensor]


LayerMemory = LayerKV | LayerRing | LayerParts
"""What a layer computes with; how it is used is for the layer to say."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Adjustment:
    """What one row of logits is changed by before its token is drawn: bias, then penalties."""

    row: int
    token_ids: Tensor
    """int64 [n]: prompt, then output"""
    num_prompt_tokens: int
    repetition_penalty: float
    """divides the positive logits of all that occurs in prompt or output, multiplies the negative ones"""
    frequency_penalty: float
    """taken from a logit as often as its token is in the output"""
    presence_penalty: float
    """taken once if it is there at all"""
    bias_ids: Tensor
    """int64 [m]; an id may come again"""
    bias: Tensor
    """float32 [m], added to their logits; minus infinity forbids a token"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sampling:
    """How to draw each row's next token. Row t draws from (seed, position) alone.

    Filters apply in this order: temperature, min_p, top_k, top_p.
    """

    temperature_T: Tensor
    """float32 [T]; 0 takes the largest logit, the lowest id among equals"""
    top_k_T: Tensor
    """int32 [T]; 0 keeps all"""
    top_p_T: Tensor
    """float32 [T] in (0, 1]"""
    min_p_T: Tensor
    """float32 [T] in [0, 1]: the least share of the likeliest token's probability that is kept"""
    seed_T: Tensor
    """int64 [T]"""
    position_T: Tensor
    """int64 [T]: the position the drawn token will take"""
    adjustments: Sequence[Adjustment] = ()
    """At most one a row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Logprobs:
    """Natural logarithms of probabilities under the logits as they are; minus infinity for NaN."""

    logprob_R: Tensor
    """float64 [R]: of each row's own token"""
    top_ids_RK: Tensor
    """int64 [R, K]: each row's likeliest tokens, likeliest first, the lower id first among equals"""
    top_RK: Tensor
    """float64 [R, K]: theirs"""


class Tape(Protocol):
    """The operations of a layer, recorded before it is known which rows a step will have.

    Tensors are of as many rows as any step may have; a step of fewer computes the first rows.
    """

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> None: ...

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> None: ...

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> None: ...

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> None: ...

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> None: ...

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> None: ...

    def rotate(self, x_THD: Tensor, rotary: Rotary) -> None: ...

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing) -> None: ...

    def attention(
        self,
        q_THD: Tensor,
        kv: LayerKV | LayerRing,
        scale: float,
        out_THD: Tensor,
        *,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> None: ...

    def restore(self, ring: LayerRing) -> None: ...

    def capture(self, ring: LayerRing) -> None: ...

    def commit(self, ring: LayerRing) -> None: ...


class Backend(Protocol):
    """The operations. Every `out` may be given (float32, last dimension contiguous) and is returned."""

    @property
    def name(self) -> str: ...

    @property
    def numerics_id(self) -> str:
        """Names the bits: two backends with one id compute the same bits from the same inputs."""
        ...

    def pack(self, weights_NK: Sequence[Tensor], bias_N: Tensor | None = None) -> Linear:
        """Stack matrices by rows into one linear. float32, bfloat16 or float16, all of one dtype.

        bias_N: of all the rows together, float32. Where `x @ w.T` is written below, the bias is added to the
        finished product, before anything else is done with it.
        """
        ...

    def pack_gate_up(
        self,
        gate_NK: Tensor,
        up_NK: Tensor,
        gate_bias_N: Tensor | None = None,
        up_bias_N: Tensor | None = None,
    ) -> Linear:
        """The two halves of a gated MLP, for `gated_linear`; both have a bias, or neither."""
        ...

    def linear(self, x_TK: Tensor, w: Linear, out_TN: Tensor) -> Tensor:
        """out = x @ w.T"""
        ...

    def add_linear(self, x_TK: Tensor, w: Linear, residual_TN: Tensor) -> Tensor:
        """residual += x @ w.T, in place."""
        ...

    def gated_linear(self, x_TK: Tensor, gate_up: Linear, out_TN: Tensor, *, gate: Gate = "silu") -> Tensor:
        """out = gate of x @ gate.T and x @ up.T"""
        ...

    def add_experts(self, x_TN: Tensor, logits_TE: Tensor, experts: Experts, residual_TN: Tensor) -> Tensor:
        """residual += the weighted sum of what each row's experts make of it, in place.

        logits_TE: float32, a router's, of all experts.
        """
        ...

    def gather(self, table_VN: Tensor, id_T: Tensor, out_TN: Tensor, *, scale: float = 1.0) -> Tensor:
        """out = table[id] * scale, in float32. id_T: int64; the table float32, bfloat16 or float16."""
        ...

    def rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, out: Tensor) -> Tensor:
        """Root mean square norm (Zhang & Sennrich 2019) of the last dimension; `out` may be `x`.

        x: [T, N]; or [T, H, N] with [H, N] contiguous, each head by itself.
        """
        ...

    def add_rms_norm(self, x: Tensor, weight_N: Tensor, eps: float, residual: Tensor) -> Tensor:
        """residual += rms_norm(x), in place."""
        ...

    def rotate(self, x_THD: Tensor, rotary: Rotary, rows: Rows) -> None:
        """Rotary position embedding (Su et al. 2021, RoFormer, eq. 34) of the first `rotated` of D, in place.

        x_THD may be a slice of wider rows: only [H, D] must be contiguous.
        """
        ...

    def store(self, k_THD: Tensor, v_THD: Tensor, kv: LayerKV | LayerRing, rows: Rows) -> None:
        """Write this step's keys and values into the pool, or beside the ring, rounded to its dtype."""
        ...

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
        """softmax(scale * q @ k.T) @ v over positions of the row's sequence; grouped heads.

        A row at position p sees positions 0..p, or the last `window` of them: p - window + 1..p. Over a ring
        there must be a window, at most one longer than the ring, and the bits are those of paged rows.
        sinks_H: float32, of each query head a logit that takes its share of the softmax and has no value.
        """
        ...

    def restore(self, ring: LayerRing, rows: Rows) -> None:
        """Copy the segments that the step restores to their sequences' slots, as far as a ring is long."""
        ...

    def capture(self, ring: LayerRing, rows: Rows) -> None:
        """Fill the segments that the step names, from the ring as it was before and the step's own rows.

        Of a layer that is not stored there are none, and nothing is restored either.
        """
        ...

    def commit(self, ring: LayerRing, rows: Rows) -> None:
        """Write the step's own rows to the ring, each sequence's last ones if they do not all fit."""
        ...

    def recurrence(self, x: RecurrentRows, states: HeadStates, rows: Rows, out_THV: Tensor) -> Tensor:
        """Each row's own change to the state S of each head, then what it reads there, in order of positions:

        S = decay * S; S += k (v - k.T S) beta, or without beta S += k v; out = q.T S

        That is the gated delta rule (Yang et al. 2024), or without beta the selective state of Mamba 2 (Dao &
        Gu 2024). The state before position 0 is zero, whatever the slot has. A segment that the step captures
        gets the state after its last row; what the step restores is in the slot already.
        """
        ...

    def record(self, layers: Callable[[Tape], None]) -> Callable[[Rows], None]:
        """What `layers` puts on a tape, to be run on the same tensors for the rows of any step."""
        ...

    def sample(self, logits_TV: Tensor, how: Sampling) -> Tensor:
        """int64 [T]: one token a row. The logits stay as they are."""
        ...

    def logprobs(self, logits_TV: Tensor, row_R: Tensor, token_R: Tensor, top: int) -> Logprobs:
        """How likely row_R[i] makes token_R[i], and its `top` likeliest, as far as there are so many.

        int64, both. Rows are named so that none is copied.
        """
        ...
