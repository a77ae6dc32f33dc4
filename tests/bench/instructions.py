"""One layer of SmolLM2, once, on one thread, BATCH rows at context 256: for tools that count instructions.

Without torch, whose import would take such tools longer than all else:

    valgrind --tool=callgrind --callgrind-out-file=OUT python -m tests.bench.instructions BATCH
    callgrind_annotate --inclusive=yes --threshold=100 OUT | grep ':shoal_[a-z_]*_avx2 '
"""

import random
import struct
import sys
from ctypes import addressof, c_float, c_int, create_string_buffer, sizeof

from shoal.kernels import library

HIDDEN, MLP, HEADS, KV_HEADS, SIZE, CONTEXT = 576, 1536, 9, 3, 64, 256
FUSED = (HEADS + 2 * KV_HEADS) * SIZE
BFLOAT16, PERIOD = 1, 1021


class Memory:
    """Random numbers, the same 1,021 over and over, and matrices of them; nothing is given back."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def floats(self, count: int, *, first_byte: int = 0) -> int:
        """The address of so many; with first_byte 2 of so many bfloat16, the upper halves of floats."""
        some = b"".join(struct.pack("<f", random.gauss())[first_byte:] for _ in range(PERIOD))
        memory = create_string_buffer(some * (count // PERIOD + 1))
        self._kept.append(memory)
        return addressof(memory)

    def matrix(self, outputs: int, inputs: int, *, gate_up: bool = False) -> int:
        """Spread as trained weights are, so that it packs as they do."""
        weights, lib = self.floats(outputs * inputs, first_byte=2), library.load()
        address: int = lib.shoal_linear_new(BFLOAT16, outputs, inputs, gate_up, False)
        for part in range(1 + gate_up):
            lib.shoal_linear_fill(address, part, 0, outputs, weights, inputs, 1)
        lib.shoal_linear_settle(address, 1)
        return address


def layer(batch: int, memory: Memory, pool: library.Pool) -> list[tuple[library.Function, library.Op]]:
    k, matrix = library.kernels(), memory.matrix
    x, normed, ones = (memory.floats(n * HIDDEN) for n in (batch, batch, 1))
    qkv, attended, mlp = (memory.floats(batch * n) for n in (FUSED, HIDDEN, MLP))
    angles = memory.floats(CONTEXT * SIZE // 2)
    first_k, first_v = (qkv + sizeof(c_float) * SIZE * n for n in (HEADS, HEADS + KV_HEADS))
    norm = library.RmsNormOp(x, HIDDEN, ones, normed, HIDDEN, 1, HIDDEN, 1e-5)
    rotate = library.RotateOp(qkv, FUSED, HEADS + KV_HEADS, SIZE, angles, angles, CONTEXT, SIZE // 2)
    store = library.StoreOp(first_k, FUSED, first_v, FUSED, addressof(pool))
    attention = library.AttentionOp(
        q=qkv,
        q_stride=FUSED,
        pool=addressof(pool),
        out=attended,
        out_stride=HIDDEN,
        q_heads=HEADS,
        scale=SIZE**-0.5,
    )
    return [
        (k.rms_norm, norm),
        (k.linear, library.LinearOp(matrix(FUSED, HIDDEN), normed, HIDDEN, qkv, FUSED, False)),
        (k.rotate, rotate),
        (k.store, store),
        (k.attention, attention),
        (k.linear, library.LinearOp(matrix(HIDDEN, HIDDEN), attended, HIDDEN, x, HIDDEN, True)),
        (k.rms_norm, norm),
        (k.linear, library.LinearOp(matrix(MLP, HIDDEN, gate_up=True), normed, HIDDEN, mlp, MLP, False)),
        (k.linear, library.LinearOp(matrix(HIDDEN, MLP), mlp, MLP, x, HIDDEN, True)),
    ]


def main() -> None:
    batch, memory = int(sys.argv[1]), Memory()
    block = CONTEXT * KV_HEADS * SIZE  # a sequence has one
    keys, values = memory.floats(batch * block), memory.floats(batch * block)
    pool = library.Pool(keys, values, block, block, batch, CONTEXT, KV_HEADS, SIZE, False)
    operations = layer(batch, memory, pool)
    calls = (library.Call * len(operations))(*(library.Call(kernel, op) for kernel, op in operations))
    sequences, positions = (c_int * batch)(*range(batch)), (c_int * batch)(*[CONTEXT - 1] * batch)
    rows = library.Rows(
        sequence=addressof(sequences),
        position=addressof(positions),
        table=addressof(sequences),  # block i is sequence i's
        count=batch,
        sequences=batch,
        width=1,
    )
    if library.load().shoal_run_tape(addressof(calls), len(operations), addressof(rows), 1):
        raise RuntimeError("a row is out of range")
    print(library.instruction_sets()[0])


if __name__ == "__main__":
    main()
