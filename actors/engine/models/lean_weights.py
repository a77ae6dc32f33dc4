"""The lean decoder's weights, read from a checkpoint and packed for one backend."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shoal.actors.engine.models.decoder_config import DecoderConfig, UnsupportedModel
from shoal.actors.engine.models.weights import CheckpointTensors
from shoal.kernels.backend import Backend, Experts, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    gate_up: Linear
    down: Linear

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    router: Linear
    experts: Experts

    @property
    def num_bytes(self) -> int:
        return self.router.num_bytes + self.experts.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x += attention(norm(x)); x += mlp(norm(x)). Projections that read the same input are one linear.

    A family that has norms of what is added has the `_out_norm`s.
    """

    attention_norm_N: Tensor
    qkv: Linear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    sinks_H: Tensor | None
    attention_out: Linear
    attention_out_norm_N: Tensor | None
    mlp_norm_N: Tensor
    mlp: GatedMlp | Mixture
    mlp_out_norm_N: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.qkv.num_bytes + self.attention_out.num_bytes + self.mlp.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    embedding_VN: Tensor
    """In the checkpoint's dtype: rows are gathered and widened, which is exact."""
    layers: tuple[Layer, ...]
    final_norm_N: Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        return self.embedding_VN.nbytes + self.head.num_bytes + sum(la.num_bytes for la in self.layers)

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
                _Reader(tensors, f"model.layers.{i}.", config, backend).layer()
                for i in range(config.num_layers)
            ),
            final_norm_N=_norm(tensors["model.norm.weight"], config),
            head=backend.pack([head]),
        )
        if unread := sorted(name for name in tensors.unread if not _may_stay_unread(name)):
            raise UnsupportedModel(
                f"the checkpoint has tensors of no {config.family}: {', '.join(unread[:3])}"
            )
        return weights


def _may_stay_unread(name: str) -> bool:
    """Old checkpoints carry their rope's frequencies; some, a copy of the embedding as their head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _norm(weight_N: Tensor, config: DecoderConfig) -> Tensor:
    return weight_N.float() + config.norm_offset if config.norm_offset else weight_N.float()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Of one layer."""

    tensors: CheckpointTensors
    prefix: str
    config: DecoderConfig
    backend: Backend

    def layer(self) -> Layer:
        config, qkv = self.config, tuple(f"self_attn.{name}_proj" for name in "qkv")
        mlp_norm = "pre_feedforward_layernorm" if config.branch_norms else "post_attention_layernorm"
        return Layer(
            attention_norm_N=self._norm("input_layernorm"),
            qkv=self._packed(*qkv, has_bias=config.qkv_bias),
            q_norm_D=self._norm("self_attn.q_norm") if config.head_norms else None,
            k_norm_D=self._norm("self_attn.k_norm") if config.head_norms else None,
            sinks_H=self._tensor("self_attn.sinks").float() if config.sinks else None,
            attention_out=self._packed("self_attn.o_proj", has_bias=config.attention_out_bias),
            attention_out_norm_N=self._norm("post_attention_layernorm") if config.branch_norms else None,
            mlp_norm_N=self._norm(mlp_norm),
            mlp=self._mixture() if config.num_experts else self._gated_mlp(),
            mlp_out_norm_N=self._norm("post_feedforward_layernorm") if config.branch_norms else None,
        )

    def _gated_mlp(self) -> GatedMlp:
        has_bias, gate, up = self.config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"
        matrices = (self._tensor(f"{name}.weight") for name in (gate, up))
        biases = (self._bias(name) if has_bias else None for name in (gate, up))
        return GatedMlp(
            gate_up=self.backend.pack_gate_up(*matrices, *biases),
            down=self._packed("mlp.down_proj", has_bias=has_bias),
        )

    def _mixture(self) -> Mixture:
        """All experts of a layer lie in one tensor, [experts, inputs, outputs]; gate and up take turns."""
        gate_up_EKN, gate_up_bias_EN, down_EKN, down_bias_EN = (
            self._tensor(f"mlp.experts.{name}")
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        gate_up, down = [], []
        for gate_up_KN, bias_N in zip(gate_up_EKN, gate_up_bias_EN.float(), strict=True):
            matrices = (gate_up_KN[:, part::2].T.contiguous() for part in (0, 1))
            biases = (bias_N[part::2].contiguous() for part in (0, 1))
            gate_up.append(self.backend.pack_gate_up(*matrices, *biases))
        for down_KN, bias_N in zip(down_EKN, down_bias_EN.float(), strict=True):
            down.append(self.backend.pack([down_KN.T.contiguous()], bias_N))
        experts = Experts(
            gate_up=tuple(gate_up),
            down=tuple(down),
            top=self.config.experts_per_token,
            gate=self.config.gate,
        )
        return Mixture(router=self._packed("mlp.router", has_bias=True), experts=experts)

    def _packed(self, *names: str, has_bias: bool) -> Linear:
        bias = torch.cat([self._bias(name) for name in names]) if has_bias else None
        return self.backend.pack([self._tensor(f"{name}.weight") for name in names], bias)

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def _norm(self, name: str) -> Tensor:
        return _norm(self._tensor(f"{name}.weight"), self.config)

    def _bias(self, name: str) -> Tensor:
        return self._tensor(f"{name}.bias").float()
