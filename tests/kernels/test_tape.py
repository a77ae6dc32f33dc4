"""A tape computes what its operations compute one by one, for as many rows as a step has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.kernels.backend import Backend, Experts, LayerKV, Linear, Rotary, Rows, Tape
from tests.kernels.helpers import BEST, REFERENCE, rows, same_bits

MAX_ROWS, SIZE, HEADS, KV_HEADS, HEAD_SIZE = 6, 32, 4, 2, 16
TABLE = torch.arange(1, 4, dtype=torch.int32).view(1, 3)


class Layer:
    """A small decoder layer over buffers of MAX_ROWS rows."""

    def __init__(self, backend: Backend) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.norm, self.head_norm = random(SIZE), random(HEAD_SIZE)
        self.qkv_weight: Linear = backend.pack([random((HEADS + 2 * KV_HEADS) * HEAD_SIZE, SIZE)])
        self.out_weight: Linear = backend.pack([random(SIZE, HEADS * HEAD_SIZE)])
        self.gate_up: Linear = backend.pack_gate_up(random(48, SIZE), random(48, SIZE))
        self.down: Linear = backend.pack([random(SIZE, 48)])
        self.router: Linear = backend.pack([random(3, SIZE)])
        self.experts = Experts(
            gate_up=tuple(backend.pack_gate_up(random(24, SIZE), random(24, SIZE)) for _ in range(3)),
            down=tuple(backend.pack([random(SIZE, 24)]) for _ in range(3)),
            top=2,
            gate="clamped_swiglu",
        )
        self.sinks = random(HEADS)
        self.rotary = Rotary(cos=random(64, HEAD_SIZE // 2), sin=random(64, HEAD_SIZE // 2))
        pool = torch.zeros(4, 2, 16, KV_HEADS, HEAD_SIZE)
        self.kv = LayerKV(k_PBHD=pool[:, 0], v_PBHD=pool[:, 1])
        self.embedding = random(9, SIZE).bfloat16()
        self.ids = torch.tensor([8, 0, 3, 3, 7, 1])
        self.x = random(MAX_ROWS, SIZE)
        self.normed = torch.zeros(MAX_ROWS, SIZE)
        self.qkv = torch.zeros(MAX_ROWS, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        self.attended = torch.zeros(MAX_ROWS, HEADS, HEAD_SIZE)
        self.mlp = torch.zeros(MAX_ROWS, 48)
        self.logits = torch.zeros(MAX_ROWS, 3)

    def play(self, tape: Tape) -> None:
        tape.gather(self.embedding, self.ids, self.x)
        tape.rms_norm(self.x, self.norm, 1e-5, self.normed)
        tape.linear(self.normed, self.qkv_weight, self.qkv.flatten(1))
        tape.rms_norm(self.qkv[:, :HEADS], self.head_norm, 1e-5, self.qkv[:, :HEADS])
        tape.rotate(self.qkv[:, : HEADS + KV_HEADS], self.rotary)
        tape.store(self.qkv[:, HEADS : HEADS + KV_HEADS], self.qkv[:, HEADS + KV_HEADS :], self.kv)
        tape.attention(self.qkv[:, :HEADS], self.kv, 0.25, self.attended, window=3, sinks_H=self.sinks)
        tape.add_linear(self.attended.flatten(1), self.out_weight, self.x)
        tape.gated_linear(self.x, self.gate_up, self.mlp, gate="gelu_tanh")
        tape.add_linear(self.mlp, self.down, self.x)
        tape.add_rms_norm(self.normed, self.norm, 1e-5, self.x)
        tape.linear(self.x, self.router, self.logits)
        tape.add_experts(self.normed, self.logits, self.experts, self.x)


def one_by_one(backend: Backend, layer: Layer, where: Rows) -> None:
    n = len(where.position_T)
    qkv = layer.qkv[:n]
    backend.gather(layer.embedding, layer.ids[:n], layer.x[:n])
    backend.rms_norm(layer.x[:n], layer.norm, 1e-5, layer.normed[:n])
    backend.linear(layer.normed[:n], layer.qkv_weight, qkv.flatten(1))
    backend.rms_norm(qkv[:, :HEADS], layer.head_norm, 1e-5, qkv[:, :HEADS])
    backend.rotate(qkv[:, : HEADS + KV_HEADS], layer.rotary, where)
    backend.store(qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :], layer.kv, where)
    backend.attention(
        *(qkv[:, :HEADS], layer.kv, where, 0.25, layer.attended[:n]), window=3, sinks_H=layer.sinks
    )
    backend.add_linear(layer.attended[:n].flatten(1), layer.out_weight, layer.x[:n])
    backend.gated_linear(layer.x[:n], layer.gate_up, layer.mlp[:n], gate="gelu_tanh")
    backend.add_linear(layer.mlp[:n], layer.down, layer.x[:n])
    backend.add_rms_norm(layer.normed[:n], layer.norm, 1e-5, layer.x[:n])
    backend.linear(layer.x[:n], layer.router, layer.logits[:n])
    backend.add_experts(layer.normed[:n], layer.logits[:n], layer.experts, layer.x[:n])


def recorded(backend: Backend) -> tuple[Layer, Callable[[Rows], None]]:
    layer = Layer(backend)
    return layer, backend.record(layer.play)


@pytest.mark.parametrize("backend", [BEST, REFERENCE], ids=lambda b: b.name)
def test_a_tape_computes_what_its_operations_do(backend: Backend) -> None:
    layer, run = recorded(backend)
    other = Layer(backend)
    for first, count in ((0, 4), (4, 1), (5, MAX_ROWS)):  # a prompt, a token, as many as fit
        where = rows([(0, p) for p in range(first, first + count)], TABLE)
        run(where)
        one_by_one(backend, other, where)
        assert same_bits(layer.x, other.x)  # rows past the step's included: nobody touched them


def test_a_step_longer_than_the_buffers_is_refused() -> None:
    _, run = recorded(BEST)
    with pytest.raises(ValueError, match="7 rows for a tape of 6"):
        run(rows([(0, p) for p in range(MAX_ROWS + 1)], TABLE))


def test_a_row_without_a_place_is_refused() -> None:
    _, run = recorded(BEST)
    with pytest.raises(ValueError, match="out of range"):
        run(rows([(0, 48)], TABLE))


def test_what_is_recorded_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="rows"):
        BEST.record(lambda tape: tape.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, torch.zeros(3, 8)))
