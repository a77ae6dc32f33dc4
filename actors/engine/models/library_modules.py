"""What stands in for modules of transformers on the library path."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.actors.engine.models.decoder_config import DYNAMIC_ROPE_TYPES
from shoal.kernels.backend import Backend


class PackedLinear(nn.Module):
    """In the place of nn.Linear, and of the transposed one that GPT-2 has."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._packed = backend.pack([weight_NK], None if bias_N is None else bias_N.float())

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), self._packed.num_outputs)
        return self._backend.linear(rows, self._packed, out).view(*x.shape[:-1], -1)


class WideEmbedding(nn.Module):
    """In the place of nn.Embedding: rows stay in the checkpoint's type and are widened when gathered."""

    def __init__(self, weight_VN: Tensor) -> None:
        super().__init__()
        self.rows_VN = weight_VN  # not a parameter: those become float32

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows_VN[ids].float()


class PinnedRope(nn.Module):
    """In the place of a rope that looks at the longest position of the batch: it has looked at the longest
    that a sequence may have, and keeps what it computed then. See rope.py for why."""

    def __init__(self, rope: nn.Module, max_model_len: int) -> None:
        super().__init__()
        angles = rope(torch.zeros(1), torch.arange(max_model_len)[None])
        self._is_pair = isinstance(angles, tuple)  # cosines and sines, or complex numbers
        for i, table in enumerate(angles if self._is_pair else (angles,)):
            self.register_buffer(f"table{i}", table[0], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        rows = tuple(table[position_ids] for table in self.buffers())
        return rows if self._is_pair else rows[0]


class Given(nn.Module):
    """In the place of the layers when a head's logits are wanted: gives it hidden states of before."""

    hidden: Tensor

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    @property
    def decoder(self) -> "Given":
        """OPT's head asks the decoder within its layers."""
        return self

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._output(last_hidden_state=self.hidden)


def swap_modules(model: nn.Module, backend: Backend) -> None:
    """Only the very classes: one that is derived from them computes something else."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    for parent, name, module in list(_children(model)):
        stand_in: nn.Module
        if type(module) is nn.Linear:
            stand_in = PackedLinear(module.weight, module.bias, backend)
        elif type(module) is Conv1D:
            stand_in = PackedLinear(module.weight.T.contiguous(), module.bias, backend)
        elif type(module) is nn.Embedding:
            stand_in = WideEmbedding(module.weight.data)
        else:
            continue
        setattr(parent, name, stand_in)
        module.register_parameter("weight", None)  # so that no two copies of all weights are ever held


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, module in parent.named_children():
            yield parent, name, module


def pin_ropes(model: nn.Module, max_model_len: int) -> None:
    for parent, name, module in list(_children(model)):
        if getattr(module, "rope_type", None) in DYNAMIC_ROPE_TYPES:
            setattr(parent, name, PinnedRope(module, max_model_len))


def num_bytes(model: nn.Module) -> int:
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, WideEmbedding):
            tensors[module.rows_VN.data_ptr()] = module.rows_VN.nbytes
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return sum(tensors.values()) + packed
