"""The lean decoder: one readable module for llama, mistral, qwen2 and qwen3, on the exact path.

On the exact path every operation is a backend's, whose result for a row depends on that row alone. So a
token's logits are the same bits in a prompt, in a chunk of one, or beside other requests. Not even gathers
are torch's: its OpenMP threads spin for milliseconds after an operation that they share, on the cores that
our kernels want.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.actors.engine.models.decoder_config import DecoderConfig, UnsupportedModel
from shoal.actors.engine.models.weights import CheckpointTensors
from shoal.kernels.backend import Backend, LayerKV, Linear, Rotary, Rows, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x += attention(norm(x)); x += mlp(norm(x)). Projections that read the same input are one linear."""

    attention_norm_N: Tensor
    qkv: Linear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    attention_out: Linear
    mlp_norm_N: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    embedding_VN: Tensor
    """In the checkpoint's dtype: rows are gathered and widened, which is exact."""
    layers: tuple[Layer, ...]
    final_norm_N: Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        linears = [w for la in self.layers for w in (la.qkv, la.attention_out, la.gate_up, la.down)]
        return self.embedding_VN.nbytes + sum(linear.num_bytes for linear in [*linears, self.head])

    @classmethod
    def load(cls, tensors: CheckpointTensors, config: DecoderConfig, backend: Backend) -> Self:
        """Read llama's names. Norms and biases are widened to float32, matrices packed in their own dtype.

        Raises UnsupportedModel for a tensor that is missing, and for one that the decoder has no use for.
        """
        embedding = tensors["model.embed_tokens.weight"].clone()  # off the file's mapping
        head = embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        weights = cls(
            embedding_VN=embedding,
            layers=tuple(
                _layer(tensors, f"model.layers.{i}.", config, backend) for i in range(config.num_layers)
            ),
            final_norm_N=tensors["model.norm.weight"].float(),
            head=backend.pack([head]),
        )
        if unread := sorted(name for name in tensors.unread if not _may_stay_unread(name)):
            raise UnsupportedModel(f"the checkpoint has tensors of no llama: {', '.join(unread[:3])}")
        return weights


def _may_stay_unread(name: str) -> bool:
    """Old checkpoints carry their rope's frequencies; some, a copy of the embedding as their head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _layer(tensors: CheckpointTensors, prefix: str, config: DecoderConfig, backend: Backend) -> Layer:
    def matrix(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    def norm(name: str) -> Tensor:
        return matrix(name).float()

    def bias(exists: bool, *names: str) -> Tensor | None:
        return torch.cat([tensors[f"{prefix}{name}.bias"].float() for name in names]) if exists else None

    qkv, out = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
    gate, up, down = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    return Layer(
        attention_norm_N=norm("input_layernorm"),
        qkv=backend.pack([matrix(name) for name in qkv], bias(config.qkv_bias, *qkv)),
        q_norm_D=norm("self_attn.q_norm") if config.head_norms else None,
        k_norm_D=norm("self_attn.k_norm") if config.head_norms else None,
        attention_out=backend.pack([matrix(out)], bias(config.attention_out_bias, out)),
        mlp_norm_N=norm("post_attention_layernorm"),
        gate_up=backend.pack_gate_up(
            matrix(gate), matrix(up), bias(config.mlp_bias, gate), bias(config.mlp_bias, up)
        ),
        down=backend.pack([matrix(down)], bias(config.mlp_bias, down)),
    )


class LeanDecoder:
    """Computes hidden states and logits of a step's packed rows.

    Its buffers are allocated once for `max_rows` rows, so a step allocates nothing that grows with it, and
    its layers are recorded once over them. What a call returns is overwritten by the next.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        rotary: Rotary,
        backend: Backend,
        *,
        max_rows: int,
        max_logits: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rotary = rotary
        self._backend = backend
        self._recorded: tuple[tuple[LayerKV, ...], Callable[[Rows], None]] | None = None

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.float32, device=rotary.cos.device)

        self._ids_T = torch.zeros(max_rows, dtype=torch.int64, device=rotary.cos.device)
        self._ids_array = self._ids_T.numpy()
        self._residual = buffer(max_rows, config.hidden_size)
        self._normed = buffer(max_rows, config.hidden_size)
        self._qkv = buffer(max_rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._attended = buffer(max_rows, config.num_heads * config.head_dim)
        self._mlp = buffer(max_rows, config.intermediate_size)
        self._logits = buffer(max_logits, config.vocab_size)

    def hidden_states(self, token_ids_T: NDArray[np.int64], rows: Rows, kv: tuple[LayerKV, ...]) -> Tensor:
        """Hidden states before the final norm, float32 [T, hidden_size]; stores every row's K/V on the way.

        token_ids_T: int64 [T], T at most max_rows.
        """
        num_rows = len(token_ids_T)
        self._ids_array[:num_rows] = token_ids_T
        if self._recorded is None or self._recorded[0] is not kv:  # once for each pool, that is
            self._recorded = kv, self._backend.record(lambda tape: self._layers(tape, kv))
        self._recorded[1](rows)
        return self._residual[:num_rows]

    def _layers(self, tape: Tape, kv: tuple[LayerKV, ...]) -> None:
        """The model, on all rows of the buffers: a step of fewer rows computes its own."""
        config, x, normed = self._config, self._residual, self._normed
        qkv_THD = self._qkv.view(len(x), -1, config.head_dim)
        first_v = config.num_heads + config.num_kv_heads
        qk_THD, v_THD = qkv_THD[:, :first_v], qkv_THD[:, first_v:]
        q_THD, k_THD = qk_THD[:, : config.num_heads], qk_THD[:, config.num_heads :]
        attended_THD = self._attended.view(len(x), config.num_heads, config.head_dim)
        scale = config.head_dim**-0.5

        tape.gather(self._weights.embedding_VN, self._ids_T, x)
        for layer, layer_kv, window in zip(self._weights.layers, kv, config.windows, strict=True):
            tape.rms_norm(x, layer.attention_norm_N, config.rms_norm_eps, normed)
            tape.linear(normed, layer.qkv, self._qkv)
            if layer.q_norm_D is not None and layer.k_norm_D is not None:
                tape.rms_norm(q_THD, layer.q_norm_D, config.rms_norm_eps, q_THD)
                tape.rms_norm(k_THD, layer.k_norm_D, config.rms_norm_eps, k_THD)
            tape.rotate(qk_THD, self._rotary)
            tape.store(k_THD, v_THD, layer_kv)
            tape.attention(q_THD, layer_kv, scale, attended_THD, window=window)
            tape.add_linear(self._attended, layer.attention_out, x)
            tape.rms_norm(x, layer.mlp_norm_N, config.rms_norm_eps, normed)
            tape.silu_mul_linear(normed, layer.gate_up, self._mlp)
            tape.add_linear(self._mlp, layer.down, x)

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """float32 [R, vocab_size] of R rows of hidden states, R at most max_logits."""
        num_rows = hidden_RN.shape[0]
        normed = self._normed[:num_rows]
        self._backend.rms_norm(hidden_RN, self._weights.final_norm_N, self._config.rms_norm_eps, normed)
        return self._backend.linear(normed, self._weights.head, self._logits[:num_rows])
