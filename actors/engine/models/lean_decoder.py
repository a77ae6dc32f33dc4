"""The lean decoder: one readable module for the families of decoder_config.py, on the exact path.

On the exact path every operation is a backend's, whose result for a row depends on that row alone. So a
token's logits are the same bits in a prompt, in a chunk of one, or beside other requests. Not even gathers
are torch's: its OpenMP threads spin for milliseconds after an operation that they share, on the cores that
our kernels want.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.actors.engine.models.decoder_config import DecoderConfig
from shoal.actors.engine.models.lean_weights import DecoderWeights, Layer, Mixture
from shoal.kernels.backend import Backend, LayerMemory, LayerParts, LayerRing, Linear, Rotary, Rows, Tape


class LeanDecoder:
    """Computes hidden states and logits of a step's packed rows.

    Its buffers are allocated once for `max_rows` rows, so a step allocates nothing that grows with it (only
    a mixture of experts does, for its own time: its rows, sorted by expert), and its layers are recorded once
    over them. What a call returns is overwritten by the next.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        rotaries: tuple[Rotary, ...],
        backend: Backend,
        *,
        max_rows: int,
        max_logits: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rotaries = rotaries
        self._backend = backend
        self._recorded: tuple[tuple[LayerMemory, ...], Callable[[Rows], None]] | None = None

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.float32, device=rotaries[0].cos.device)

        self._ids_T = torch.zeros(max_rows, dtype=torch.int64, device=rotaries[0].cos.device)
        self._ids_array = self._ids_T.numpy()
        self._residual = buffer(max_rows, config.hidden_size)
        self._normed = buffer(max_rows, config.hidden_size)
        self._qkv = buffer(max_rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._attended = buffer(max_rows, config.num_heads * config.head_dim)
        self._inner = buffer(max_rows, config.num_experts or config.intermediate_size)
        self._logits = buffer(max_logits, config.vocab_size)

    def hidden_states(
        self, token_ids_T: NDArray[np.int64], rows: Rows, kv: tuple[LayerMemory, ...]
    ) -> Tensor:
        """Hidden states before the final norm, float32 [T, hidden_size]; stores every row's K/V on the way.

        token_ids_T: int64 [T], T at most max_rows.
        """
        num_rows = len(token_ids_T)
        self._ids_array[:num_rows] = token_ids_T
        if self._recorded is None or self._recorded[0] is not kv:  # once for each pool, that is
            self._recorded = kv, self._backend.record(lambda tape: self._layers(tape, kv))
        self._recorded[1](rows)
        return self._residual[:num_rows]

    def _layers(self, tape: Tape, kv: tuple[LayerMemory, ...]) -> None:
        """The model, or as many of its first layers as `kv` has, on all rows of the buffers: a step of fewer
        rows computes its own."""
        config, x, normed = self._config, self._residual, self._normed
        qkv_THD = self._qkv.view(len(x), -1, config.head_dim)
        first_v = config.num_heads + config.num_kv_heads
        qk_THD, v_THD = qkv_THD[:, :first_v], qkv_THD[:, first_v:]
        q_THD, k_THD = qk_THD[:, : config.num_heads], qk_THD[:, config.num_heads :]
        attended_THD = self._attended.view(len(x), config.num_heads, config.head_dim)

        tape.gather(self._weights.embedding_VN, self._ids_T, x, scale=config.embedding_scale)
        layers = zip(self._weights.layers, kv, config.windows, self._rotaries, strict=False)
        for layer, layer_kv, window, rotary in layers:
            tape.rms_norm(x, layer.attention_norm_N, config.rms_norm_eps, normed)
            tape.linear(normed, layer.qkv, self._qkv)
            if layer.q_norm_D is not None and layer.k_norm_D is not None:
                tape.rms_norm(q_THD, layer.q_norm_D, config.rms_norm_eps, q_THD)
                tape.rms_norm(k_THD, layer.k_norm_D, config.rms_norm_eps, k_THD)
            tape.rotate(qk_THD, rotary)
            assert not isinstance(layer_kv, LayerParts), "a layer that does not attend on the lean path"
            if isinstance(layer_kv, LayerRing):
                tape.restore(layer_kv)
            tape.store(k_THD, v_THD, layer_kv)
            tape.attention(
                *(q_THD, layer_kv, config.attention_scale, attended_THD),
                window=window,
                sinks_H=layer.sinks_H,
            )
            if isinstance(layer_kv, LayerRing):
                tape.capture(layer_kv)
                tape.commit(layer_kv)
            self._add(tape, self._attended, layer.attention_out, layer.attention_out_norm_N)
            tape.rms_norm(x, layer.mlp_norm_N, config.rms_norm_eps, normed)
            self._mlp(tape, layer)

    def _mlp(self, tape: Tape, layer: Layer) -> None:
        if isinstance(layer.mlp, Mixture):
            tape.linear(self._normed, layer.mlp.router, self._inner)
            tape.add_experts(self._normed, self._inner, layer.mlp.experts, self._residual)
        else:
            tape.gated_linear(self._normed, layer.mlp.gate_up, self._inner, gate=self._config.gate)
            self._add(tape, self._inner, layer.mlp.down, layer.mlp_out_norm_N)

    def _add(self, tape: Tape, x_TK: Tensor, w: Linear, norm_N: Tensor | None) -> None:
        """To the residual: x @ w.T, normed by itself if there is a norm."""
        if norm_N is None:
            tape.add_linear(x_TK, w, self._residual)
        else:
            tape.linear(x_TK, w, self._normed)
            tape.add_rms_norm(self._normed, norm_N, self._config.rms_norm_eps, self._residual)

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """float32 [R, vocab_size] of R rows of hidden states, R at most max_logits."""
        num_rows = hidden_RN.shape[0]
        normed = self._normed[:num_rows]
        self._backend.rms_norm(hidden_RN, self._weights.final_norm_N, self._config.rms_norm_eps, normed)
        return self._backend.linear(normed, self._weights.head, self._logits[:num_rows])
