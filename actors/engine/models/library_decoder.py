"""The library path: transformers' own modeling over our paged pool, attention and linears.

Its norms and activations are torch's, whose bits depend on the rows beside them: so it promises a tolerance,
and never shares a cached prefix with the lean path (see `choose.numerics`). What a class of transformers does
with positions and scales is its own affair, and no configuration tells all of it: so every model has to prove
itself when it is loaded.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.model_layout import LayerLayout, ModelLayout, model_layout
from shoal.actors.engine.models.decoder_config import LAYER_TYPES, UnsupportedModel
from shoal.actors.engine.models.library_config import LibraryConfig
from shoal.actors.engine.models.library_modules import Given, num_bytes, pin_ropes, swap_modules
from shoal.actors.engine.models.library_recurrence import StatefulStep, swap_mixers
from shoal.actors.engine.models.library_state import convolution, recurrent
from shoal.kernels.backend import Backend, LayerKV, LayerMemory, RecurrentRows, RingRows, Rows
from shoal.kvstore.layout import KVDtype, Part

ATTENTION = "shoal_paged"
"""Our name in transformers' registries of attention functions and of masks."""

PROOF_TOKENS, PROOF_TOLERANCE = 24, 1e-3


@dataclass(frozen=True)
class Step(StatefulStep):
    """What our attention and recurrences must know of the step that a model computes at the moment."""

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Heads are filled up with zeros to those of the pool, which changes no score and no sum."""
        kv, value_size = self.kv[layer], v_THD.shape[-1]
        assert isinstance(kv, LayerKV), "a ring on the library path"
        q_THD, k_THD, v_THD = (_widen(x, kv.k_PBHD.shape[-1]) for x in (q_THD, k_THD, v_THD))
        self.backend.store(k_THD, v_THD, kv, self.rows)
        out = torch.empty_like(q_THD)
        return self.backend.attention(q_THD, kv, self.rows, scale, out, window=window)[..., :value_size]


@dataclass(slots=True)
class Measure:
    """In the place of a step: attends nowhere, and notes what a model asks for."""

    heads: dict[int, int] = field(default_factory=dict)
    """Key/value heads of each layer that attended."""
    states: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    """What each recurrent layer is to keep."""
    head_size: int = 0
    windows: set[int | None] = field(default_factory=set)
    mask_windows: set[int | None] = field(default_factory=set)
    """Windows that attention was told of, and those in the masks that a model wants made."""

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        if layer in self.heads:
            raise UnsupportedModel("a layer that attends twice")
        self.heads[layer] = k_THD.shape[1]
        self.windows.add(window)
        self.head_size = max(self.head_size, k_THD.shape[2], v_THD.shape[2])
        return torch.zeros(*q_THD.shape[:2], v_THD.shape[2])

    def convolve(self, layer: int, x_TC: Tensor, weight_CK: Tensor) -> Tensor:
        self._note(layer, convolution(*weight_CK.shape))
        return x_TC.clone()

    def recur(self, layer: int, x: RecurrentRows) -> Tensor:
        (_, heads, value_size), key_size = x.v_THV.shape, x.k_THK.shape[2]
        self._note(layer, recurrent(heads, key_size, value_size))
        return x.v_THV.clone()

    def _note(self, layer: int, part: Part) -> None:
        noted = self.states.get(layer, ())
        if part.name in {other.name for other in noted}:
            raise UnsupportedModel(f"a layer with two states that are {part.name}")
        self.states[layer] = (*noted, part)

    def check(self, layer_types: set[str], kept: Sequence[LayerLayout | None]) -> None:
        """kept: what a configuration says of each layer, if it says that not all attend."""
        if kept:
            self._check_states(kept)
            layer_types = layer_types & set(LAYER_TYPES)
        elif self.states or sorted(self.heads) != list(range(len(self.heads))):
            raise UnsupportedModel("layers that do not attend")
        if len(set(self.heads.values())) != 1:
            raise UnsupportedModel(f"layers of different key/value heads: {self.heads}")
        # Some classes put a window, or chunks, into the mask alone; our attention reads no masks.
        if layer_types:  # and some make masks that no layer uses
            told = {"full_attention" if window is None else "sliding_attention" for window in self.windows}
            agree = told == layer_types
        else:
            agree = not self.mask_windows or self.windows <= self.mask_windows <= self.windows | {None}
        if not agree:
            raise UnsupportedModel("attention that is not told of a window that its mask has")

    def _check_states(self, kept: Sequence[LayerLayout | None]) -> None:
        for layer, what in enumerate(kept):
            said = () if what is None else what.slots
            if self.states.get(layer, ()) != said or (layer in self.heads) is not (what is None):
                raise UnsupportedModel(f"layer {layer} keeps {self.states.get(layer)}, not {said}")


_step: ContextVar[Step | Measure] = ContextVar("step")
"""Not a keyword through the model: not every class hands those on to its attention."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention functions: [1, H, T, D] in, [1, T, H, D] out."""
    if softcap is not None or s_aux is not None or attention_mask is not None:
        named = {"a softcap": softcap, "sinks": s_aux, "a mask of its own": attention_mask}
        what = next(name for name, value in named.items() if value is not None)
        raise UnsupportedModel(f"attention with {what}")
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    out = _step.get().attend(layer, q_THD, k_THD, v_THD, scale=scale, window=sliding_window)
    return out[None], None


def no_mask(*_: object, local_size: int | None = None, **__: object) -> None:
    """The signature of transformers' mask functions."""
    if isinstance(step := _step.get(), Measure):
        step.mask_windows.add(local_size)


def _widen(x_THD: Tensor, head_size: int) -> Tensor:
    missing = head_size - x_THD.shape[-1]
    return nn.functional.pad(x_THD, (0, missing)) if missing else x_THD.contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """A loaded model in two halves, and the shape of its keys and values, as measured."""

    layers: nn.Module
    head: nn.Module
    given: Given
    vocab_size: int
    kept: tuple[LayerLayout | None, ...]
    """What each layer keeps beside keys and values; None attends."""
    num_kv_heads: int
    head_dim: int
    num_bytes: int

    def layout(
        self,
        *,
        block_size: int,
        dtype: KVDtype,
        max_model_len: int,
        num_dropped_layers: int = 0,
        num_draft_tokens: int = 0,
    ) -> ModelLayout:
        """Attention is all paged: which layers have a window is known to it alone, when it is called."""
        return model_layout(
            self.kept,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            max_model_len=max_model_len,
            num_dropped_layers=num_dropped_layers,
            num_draft_tokens=num_draft_tokens,
        )

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        checkpoint: Path,
        config: LibraryConfig,
        backend: Backend,
        *,
        max_model_len: int,
    ) -> Self:
        """Raises UnsupportedModel if the model does not compute over our pool what it computes by itself."""
        from transformers import (  # noqa: PLC0415
            AttentionInterface,
            AttentionMaskInterface,
            AutoModelForCausalLM,
        )

        AttentionInterface.register(ATTENTION, paged_attention)
        AttentionMaskInterface.register(ATTENTION, no_mask)
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", local_files_only=True, trust_remote_code=False
        )
        try:
            swap_modules(model, backend)
            model.float()
            pin_ropes(model, max_model_len)
            expected = _own_logits(model)
            model.set_attn_implementation(ATTENTION)
            swap_mixers(model.base_model, _step.get)
            loaded = cls._in_halves(model, config)
            loaded._prove(backend, expected)
        except (UnsupportedModel, AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedModel(f"{config.architecture} cannot be served: {reason}") from error
        return loaded

    @classmethod
    def _in_halves(cls, model: Any, config: LibraryConfig) -> Self:
        layers, measure = model.base_model, Measure()
        nothing = torch.zeros(1, dtype=torch.int64)
        given = Given(type(_forward(layers, nothing, nothing, measure)))
        measure.check(set(getattr(model.config, "layer_types", None) or ()), config.layers)
        size = num_bytes(model)
        setattr(model, model.base_model_prefix, given)
        return cls(
            layers=layers,
            head=model,
            given=given,
            vocab_size=config.vocab_size,
            kept=config.layers or (None,) * len(measure.heads),
            num_kv_heads=next(iter(measure.heads.values())),
            head_dim=-(-measure.head_size // 16) * 16,
            num_bytes=size,
        )

    def _prove(self, backend: Backend, expected: Tensor) -> None:
        """Two sequences in one batch and in chunks must have the logits that each has by itself.

        So must one that is taken up in its middle, from what was kept of it there, in another's slot.
        """
        size, half = PROOF_TOKENS, PROOF_TOKENS // 2
        memory = self._memory_for(2 * size // half + 1)
        decoder = LibraryDecoder(self, backend, max_rows=2 * size, max_logits=2 * size)
        tokens, got = _proof_tokens(self.vocab_size), torch.empty_like(expected)

        def compute(
            *pieces: tuple[int, int, int], slots: tuple[int, int] = (1, 2), restore: bool = False
        ) -> None:
            where = _proof_rows(pieces, slots, half, restore=restore)
            at = where.sequence_T, where.position_T
            hidden = decoder.hidden_states(tokens[at].numpy(), where, memory.layers)
            got[at] = decoder.logits(hidden)

        compute((0, 0, half))
        compute((1, 0, size - 1), (0, half, half + 1))
        compute((1, size - 1, size), (0, half + 1, size))
        _check_proof(got, expected, "over paged keys and values, and kept state,")
        compute((0, half, size), slots=(2, 1), restore=True)
        _check_proof(got, expected, "taken up from kept state,")

    def _memory_for(self, num_blocks: int) -> DeviceMemory:
        """Blocks of half a proof's tokens, filled with what is NaN in any type of floats."""
        layout = self.layout(block_size=PROOF_TOKENS // 2, dtype="float32", max_model_len=PROOF_TOKENS)
        memory = DeviceMemory(
            layout,
            num_blocks=num_blocks,
            num_slots=3,
            num_segments=num_blocks,
            max_rows=2 * PROOF_TOKENS,
            device=torch.device("cpu"),
        )
        for piece in (memory.blocks, memory.slots, memory.segments):
            if piece is not None:
                piece.fill_(0xFF)
        return memory


def _proof_rows(
    pieces: Sequence[tuple[int, int, int]], slots: tuple[int, int], block_size: int, *, restore: bool
) -> Rows:
    """pieces: (sequence, start, end). Every boundary that they come by is captured, to the segment of the
    block's number."""
    where = [(s, p) for s, start, end in pieces for p in range(start, end)]
    sequence_T, position_T = torch.tensor(where, dtype=torch.int32).T.contiguous()
    table_SN = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    start_S = torch.zeros(2, dtype=torch.int32)
    copies: list[tuple[int, int, int]] = []
    for s, start, end in pieces:
        start_S[s] = start
        boundaries = range((start // block_size + 1) * block_size, end + 1, block_size)
        copies += [(s, b, int(table_SN[s, b // block_size - 1])) for b in boundaries]
    restores = [(s, start, int(table_SN[s, start // block_size - 1])) for s, start, _ in pieces if restore]
    rings = RingRows(
        slot_S=torch.tensor(slots, dtype=torch.int32),
        start_S=start_S,
        valid_from_S=torch.zeros(2, dtype=torch.int32),
        restores_C3=torch.tensor(restores, dtype=torch.int32).view(-1, 3),
        captures_C3=torch.tensor(copies, dtype=torch.int32).view(-1, 3),
    )
    return Rows(sequence_T=sequence_T, position_T=position_T, table_SN=table_SN, rings=rings)


def _check_proof(got: Tensor, expected: Tensor, how: str) -> None:
    error = float((got - expected).abs().max() / expected.abs().max())
    if not error < PROOF_TOLERANCE:
        raise UnsupportedModel(f"{how} its logits are off by {error:.1e}")


class LibraryDecoder:
    """A `Decoder`. It allocates what transformers allocates: a step's peak is measured, not bounded here."""

    def __init__(self, model: LibraryModel, backend: Backend, *, max_rows: int, max_logits: int) -> None:
        self._model = model
        self._backend = backend

    def hidden_states(
        self, token_ids_T: NDArray[np.int64], rows: Rows, kv: tuple[LayerMemory, ...]
    ) -> Tensor:
        step = Step(self._backend, rows, kv)
        out = _forward(self._model.layers, torch.from_numpy(token_ids_T), rows.position_T.long(), step)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden_RN: Tensor) -> Tensor:
        self._model.given.hidden = hidden_RN[None]
        ids = torch.zeros(1, len(hidden_RN), dtype=torch.int64)
        logits: Tensor = self._model.head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


def _forward(layers: nn.Module, ids_T: Tensor, position_T: Tensor, step: Step | Measure) -> Any:
    token = _step.set(step)
    try:
        return layers(input_ids=ids_T[None], position_ids=position_T[None], use_cache=False)
    finally:
        _step.reset(token)


def _own_logits(model: Any) -> Tensor:
    """Of the proof's two sequences, by transformers' own attention: float32 [2, PROOF_TOKENS, V]."""
    model.set_attn_implementation("eager")
    logits = [model(ids[None], use_cache=False).logits[0] for ids in _proof_tokens(model.config.vocab_size)]
    return torch.stack(logits).float()


def _proof_tokens(vocab_size: int) -> Tensor:
    return (torch.arange(2 * PROOF_TOKENS) * 7919 % vocab_size).view(2, PROOF_TOKENS)
