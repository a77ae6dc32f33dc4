"""What a runner asks of a model, whichever path computes it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.actors.engine.model_layout import ModelLayout
from shoal.kernels.backend import Backend, LayerMemory, Rows
from shoal.kvstore.layout import KVDtype


class ModelShape(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def layout(
        self,
        *,
        block_size: int,
        dtype: KVDtype,
        max_model_len: int,
        num_dropped_layers: int = 0,
        num_draft_tokens: int = 0,
    ) -> ModelLayout:
        """What the layers keep of a sequence. dtype: of keys and values.

        Raises ValueError, for the operator to read, if there are fewer layers that could be dropped.
        """
        ...


class Weights(Protocol):
    @property
    def num_bytes(self) -> int: ...


class Decoder(Protocol):
    """Computes a step's packed rows. What a call returns may be overwritten by the next."""

    def hidden_states(
        self, token_ids_T: NDArray[np.int64], rows: Rows, kv: tuple[LayerMemory, ...]
    ) -> Tensor:
        """float32 [T, hidden_size] that `logits` understands; keeps of every row what layers keep on the way.

        kv: of every layer, as the model's layout has it. The lean decoder computes only the first layers if
        there are fewer.

        token_ids_T: T at most the `max_rows` it was made for. No tensor, since torch lets go of the GIL with
        every operation and every tensor that ends: the engine's thread, which has just heard of the step
        before, would take it, and keep this one from starting.
        """
        ...

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """float32 [R, vocab_size] of R rows of hidden states, R at most `max_logits`."""
        ...


class MakeDecoder(Protocol):
    def __call__(self, backend: Backend, *, max_rows: int, max_logits: int) -> Decoder: ...
