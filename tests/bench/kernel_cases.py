"""The kernels in SmolLM2-135M's shape, over random weights, keys and values that no cache holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.actors.engine.models.decoder_config import DecoderConfig
from shoal.actors.engine.models.lean_decoder import LeanDecoder
from shoal.actors.engine.models.lean_weights import DecoderWeights, GatedMlp, Layer
from shoal.kernels.backend import LayerKV, Linear, Rotary, Rows, Sampling, Tape
from shoal.kernels.cpu import CpuBackend, PackedLinear

Heads = tuple[int, int, int]
"""Query heads, key/value heads, size."""

BLOCK_ROWS, POSITIONS, MAX_ROWS, MAX_SEQUENCES = 128, 8192, 1024, 32
OUT_OF_CACHE_BYTES = 256 << 20
CONFIG = DecoderConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    windows=(None,) * 30,
    attention_scale=64**-0.5,
)
SMALL: Heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
WIDE: Heads = (32, 8, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kernel: str
    shape: str
    run: Callable[[], object]
    num_bytes: float = 0
    """Read from memory by one run; 0: what it reads was just written, and lies in a cache."""
    flops: float = 0
    """A fused multiply-add is two; 0: not counted."""
    times: int = 1
    """How many operations a run is."""


class World:
    """A model whose layers lie apart, and the operations over it."""

    def __init__(self, threads: int) -> None:
        self.backend = CpuBackend(threads)
        self._generator = torch.Generator().manual_seed(0)
        self._weights = self._random_weights()
        angles = torch.outer(
            torch.arange(POSITIONS + 1.0), 1e4 ** -torch.linspace(0, 1, CONFIG.head_dim // 2)
        )
        self._rotary = Rotary(cos=angles.cos(), sin=angles.sin())
        rotaries = (self._rotary,) * CONFIG.num_layers
        self._decoder = LeanDecoder(
            CONFIG, self._weights, rotaries, self.backend, max_rows=MAX_ROWS, max_logits=MAX_SEQUENCES
        )

    def linears(self, rows: int) -> list[Case]:
        """All of a step, but for the head."""
        c = CONFIG
        x, hidden, wide = (torch.randn(rows, n) for n in (c.hidden_size, c.hidden_size, c.intermediate_size))
        qkv = torch.empty(rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

        def play(tape: Tape) -> None:
            for layer in self._weights.layers:
                assert isinstance(layer.mlp, GatedMlp)
                tape.linear(x, layer.qkv, qkv)
                tape.linear(x, layer.attention_out, hidden)
                tape.gated_linear(x, layer.mlp.gate_up, wide)
                tape.linear(wide, layer.mlp.down, hidden)

        case = Case(
            kernel="linears of 30 layers",
            shape=f"{rows} rows",
            run=partial(self.backend.record(play), nowhere(rows)),
            num_bytes=sum(w.num_bytes for w in self._matrices()),
            flops=rows * self._flops_per_row(),
        )
        return [case]

    def attention(self, heads: Heads, batch: int, context: int, chunk: int = 1) -> list[Case]:
        """The last `chunk` rows of each sequence. As many layers take turns as no cache holds."""
        query_heads, kv_heads, size = heads
        one_layer = kv_bytes(heads, batch, context)
        layers = max(1, OUT_OF_CACHE_BYTES // one_layer) if chunk == 1 else 1
        kv, rows = paged(heads, batch, context, chunk, layers=layers)
        q = torch.randn(batch * chunk, query_heads, size, generator=self._generator)
        out = torch.empty_like(q)

        def play(tape: Tape) -> None:
            for layer in kv:
                tape.attention(q, layer, size**-0.5, out)

        which = f"chunk of {chunk}" if chunk > 1 else f"{batch} rows"
        case = Case(
            kernel="attention",
            shape=f"{query_heads}/{kv_heads} heads of {size}, {which}, context {context}",
            run=partial(self.backend.record(play), rows),
            num_bytes=layers * one_layer,
            flops=layers * attention_flops(heads, batch, context, chunk),
            times=layers,
        )
        return [case]

    def small_operations(self, rows: int) -> list[Case]:
        """Norm, rope and store move what the operation before them left in a cache."""
        c = CONFIG
        x, out = torch.randn(rows, c.hidden_size), torch.empty(rows, c.hidden_size)
        qkv = torch.randn(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, k, v = qkv[:, : -c.num_kv_heads], qkv[:, c.num_heads : -c.num_kv_heads], qkv[:, -c.num_kv_heads :]
        (kv,), where = paged(SMALL, 1, rows, rows, layers=1)
        tapes: dict[str, Callable[[Tape], None]] = {
            "rms_norm": lambda tape: tape.rms_norm(x, self._weights.final_norm_N, 1e-5, out),
            "rotate": lambda tape: tape.rotate(qk, self._rotary),
            "store": lambda tape: tape.store(k, v, kv),
        }
        return [
            Case(kernel=name, shape=f"{rows} rows", run=partial(self.backend.record(play), where))
            for name, play in tapes.items()
        ]

    def sampling(self, rows: int) -> list[Case]:
        logits = torch.randn(rows, CONFIG.vocab_size, generator=self._generator) * 3

        def case(name: str, *, temperature: float = 1, top_k: int = 0, top_p: float = 1) -> Case:
            how = Sampling(
                temperature_T=torch.full((rows,), float(temperature)),
                top_k_T=torch.full((rows,), top_k, dtype=torch.int32),
                top_p_T=torch.full((rows,), float(top_p)),
                min_p_T=torch.zeros(rows),
                seed_T=torch.arange(rows),
                position_T=torch.arange(rows),
            )
            run = partial(self.backend.sample, logits, how)
            return Case(kernel="sample", shape=f"{rows} rows of {CONFIG.vocab_size}, {name}", run=run)

        greedy, plain = case("greedy", temperature=0), case("plain")
        return [greedy, plain, case("top-k 50", top_k=50), case("top-p 0.9", top_p=0.9)]

    def step(self, batch: int, context: int, chunk: int = 1) -> list[Case]:
        """From token ids to logits of each sequence's last row."""
        c = CONFIG
        kv, rows = paged(SMALL, batch, context, chunk, layers=c.num_layers)
        ids = torch.randint(c.vocab_size, (batch * chunk,), generator=self._generator).numpy()

        def run() -> None:
            hidden = self._decoder.hidden_states(ids, rows, kv)
            self._decoder.logits(hidden[chunk - 1 :: chunk].contiguous())

        head_flops = 2 * batch * c.vocab_size * c.hidden_size
        attended = c.num_layers * attention_flops(SMALL, batch, context, chunk)
        case = Case(
            kernel="whole step",
            shape=f"{batch * chunk} rows, context {context}",
            run=run,
            num_bytes=self._weights.num_bytes
            - self._weights.embedding_VN.nbytes
            + c.num_layers * kv_bytes(SMALL, batch, context),
            flops=batch * chunk * self._flops_per_row() + head_flops + attended,
        )
        return [case]

    def _random_weights(self) -> DecoderWeights:
        """Spread as trained ones are, so that they pack as those do."""
        c, backend = CONFIG, self.backend

        def random(outputs: int, inputs: int) -> Tensor:
            weight = torch.randn(outputs, inputs, generator=self._generator)
            return weight.mul_(inputs**-0.5).bfloat16()

        qkv = random((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)
        out = random(c.hidden_size, c.num_heads * c.head_dim)
        gate, up = random(c.intermediate_size, c.hidden_size), random(c.intermediate_size, c.hidden_size)
        down, embedding = random(c.hidden_size, c.intermediate_size), random(c.vocab_size, c.hidden_size)
        norm = torch.ones(c.hidden_size)

        def layer() -> Layer:
            return Layer(
                attention_norm_N=norm,
                qkv=backend.pack([qkv]),
                q_norm_D=None,
                k_norm_D=None,
                sinks_H=None,
                attention_out=backend.pack([out]),
                attention_out_norm_N=None,
                mlp_norm_N=norm,
                mlp=GatedMlp(gate_up=backend.pack_gate_up(gate, up), down=backend.pack([down])),
                mlp_out_norm_N=None,
            )

        return DecoderWeights(
            embedding_VN=embedding,
            layers=tuple(layer() for _ in range(c.num_layers)),
            final_norm_N=norm,
            head=backend.pack([embedding]),
        )

    def _matrices(self) -> list[PackedLinear]:
        found: list[Linear] = []
        for layer in self._weights.layers:
            assert isinstance(layer.mlp, GatedMlp)
            found += [layer.qkv, layer.attention_out, layer.mlp.gate_up, layer.mlp.down]
        return [w for w in found if isinstance(w, PackedLinear)]

    def _flops_per_row(self) -> float:
        return 2.0 * sum(w.num_outputs * w.num_inputs * (2 if w.gate_up else 1) for w in self._matrices())


def cases(world: World) -> Iterator[Callable[[], list[Case]]]:
    """Makers of cases: what one needs is gone before the next is made."""
    for rows in (1, 4, 8, 32, 128, 1024):
        yield partial(world.linears, rows)
    for heads, batches in ((SMALL, (1, 8, 32)), (WIDE, (1, 8))):
        for batch in batches:
            for context in (512, 2048, 8192):
                yield partial(world.attention, heads, batch, context)
        for context in (512, 2048, 8192):
            yield partial(world.attention, heads, 1, context, 512)
    for rows in (32, MAX_ROWS):
        yield partial(world.small_operations, rows)
    yield partial(world.sampling, 32)
    for batch in (1, 8, 32):
        yield partial(world.step, batch, 256)
    yield partial(world.step, 1, MAX_ROWS, MAX_ROWS)


def paged(
    heads: Heads, batch: int, context: int, chunk: int, *, layers: int
) -> tuple[tuple[LayerKV, ...], Rows]:
    """A full pool of `batch` sequences in scattered blocks, and the last `chunk` rows of each."""
    _, kv_heads, size = heads
    per_sequence = -(-context // BLOCK_ROWS)
    blocks = batch * per_sequence
    pool = torch.empty(blocks + 1, layers, 2, BLOCK_ROWS, kv_heads, size).normal_()
    kv = tuple(LayerKV(k_PBHD=pool[:, i, 0], v_PBHD=pool[:, i, 1]) for i in range(layers))
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)) + 1
    positions = torch.arange(context - chunk, context, dtype=torch.int32)
    rows = Rows(
        sequence_T=torch.arange(batch, dtype=torch.int32).repeat_interleave(chunk),
        position_T=positions.repeat(batch),
        table_SN=order.int().view(batch, per_sequence),
    )
    return kv, rows


def nowhere(rows: int) -> Rows:
    """For operations that look at no position."""
    zeros = torch.zeros(rows, dtype=torch.int32)
    return Rows(sequence_T=zeros, position_T=zeros, table_SN=torch.zeros(1, 1, dtype=torch.int32))


def kv_bytes(heads: Heads, batch: int, context: int) -> int:
    """Of one layer, float32."""
    _, kv_heads, size = heads
    return 2 * 4 * batch * context * kv_heads * size


def attention_flops(heads: Heads, batch: int, context: int, chunk: int) -> float:
    query_heads, _, size = heads
    return 4.0 * batch * query_heads * size * sum(range(context - chunk + 1, context + 1))
