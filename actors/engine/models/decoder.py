"""What a runner asks of a model, whichever path computes it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.kernels.backend import Backend, LayerKV, LayerRing, Rows


class ModelShape(Protocol):
    """What decides how wide logits are and how many bytes a token's keys and values take."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: positions that a token sees, if only its last rows need be kept; None is all."""
        ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class Weights(Protocol):
    @property
    def num_bytes(self) -> int: ...


class Decoder(Protocol):
    """Computes a step's packed rows. What a call returns may be overwritten by the next."""

    def hidden_states(
        self, token_ids_T: NDArray[np.int64], rows: Rows, kv: tuple[LayerKV | LayerRing, ...]
    ) -> Tensor:
        """float32 [T, hidden_size] that `logits` understands; stores every row's K/V on the way.

        kv: of every layer. The lean decoder computes only the first layers if there are fewer.

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
