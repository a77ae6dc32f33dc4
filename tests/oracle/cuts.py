"""Every cut of a prompt: taken up at each boundary, from each place where its beginning can be had.

    python -m tests.oracle.cuts NAME ...

compares, for each of these models, the logits after each cut with those of an engine that has seen nothing:
their bits, or on the library path themselves, within a tolerance. Without a name it says which there are.
"""

import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from torch import Tensor

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.model_layout import RING, ModelLayout
from shoal.actors.engine.models.deepseek_v4_layout import WINDOW
from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, PrefixSource, StoreId
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import (
    gemma3_270m,
    smollm2,
    tiny_deepseek_v4,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_library,
    tiny_mistral,
)
from tests.fake_store import OTHER, OWN, Stores
from tests.oracle.recording import Recording, Served, Setup, digest, greedy, serve

AFTER = 32
"""Positions after a cut whose logits are compared."""
NUM_OTHERS, OTHER_TOKENS, OTHER_OUTPUT = 8, 40, 6


class Place(StrEnum):
    DEVICE = "device"
    BESIDE_OTHERS = "device, beside 8 others"
    OWN_STORE = "own store"
    OTHER_STORE = "other store"
    PREEMPTED = "preempted"


@dataclass(frozen=True, kw_only=True)
class Subject:
    loaded: LoadedModel
    block_size: int
    """At least AFTER, so that the last boundary within a prompt is the cut."""
    num_blocks: int
    """Of the prompt."""
    num_dropped: int = 0
    tolerance: float = 0.0
    """Of logits; 0 compares their bits."""
    snapshot_every: int = 1

    def __post_init__(self) -> None:
        assert self.block_size >= AFTER

    @property
    def setup(self) -> Setup:
        return Setup(
            backend=CpuBackend(2),
            block_size=self.block_size,
            num_blocks=2 * self.num_blocks + 4 * NUM_OTHERS,
            max_model_len=(self.num_blocks + 2) * self.block_size,
            num_dropped_layers=self.num_dropped,
            snapshot_every=self.snapshot_every,
            prefix_cache="radix",
        )

    @property
    def num_rings(self) -> int:
        return sum(placed.part.name in {RING, WINDOW} for placed in self._layout.slots.parts)

    @property
    def num_recomputed(self) -> int:
        """Tokens before a boundary."""
        return self._layout.rule.recomputed_tokens(self.block_size)

    @property
    def _layout(self) -> ModelLayout:
        return self.loaded.config.layout(
            block_size=self.block_size,
            dtype="float32",
            max_model_len=self.setup.max_model_len,
            num_dropped_layers=self.num_dropped,
        )

    def tokens(self, seed: int, length: int) -> list[int]:
        choose = random.Random(seed)
        return [choose.randrange(3, self.loaded.config.vocab_size) for _ in range(length)]

    @property
    def others(self) -> list[EngineRequest]:
        return [
            greedy(f"other {i}", self.tokens(1 + i, OTHER_TOKENS + i), OTHER_OUTPUT)
            for i in range(NUM_OTHERS)
        ]


@dataclass
class Logits:
    """Of every position that was looked at: their bits, or with a tolerance themselves."""

    tolerance: float
    of: dict[SequenceId, dict[int, bytes | Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def look(self, sequence: SequenceId, position: int, logits: Tensor) -> None:
        ours = logits.clone() if self.tolerance else digest(logits)
        earlier = self.of[sequence].setdefault(position, ours)
        assert self.agree(earlier, ours), f"position {position} was computed twice, with other logits"

    def agree(self, a: bytes | Tensor | None, b: bytes | Tensor) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return bool((a - b).abs().max() < self.tolerance)
        return a == b


@dataclass(frozen=True, kw_only=True)
class Cut:
    boundary: int
    """In tokens, of so much of the prompt as was asked for."""
    num_cached: int
    num_expected: int
    wrong: tuple[int, ...]
    """Positions from the boundary on whose logits are others than when nothing was cached."""
    tokens: tuple[int, ...]
    """That came out."""

    @property
    def right(self) -> bool:
        return not self.wrong and self.num_cached == self.num_expected


class Cuts:
    """One prompt, computed by an engine that knew nothing, and then from every cut."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._prompt = subject.tokens(0, subject.num_blocks * subject.block_size + AFTER)
        cold, logits = replace(subject.setup, prefix_cache="naive"), Logits(subject.tolerance)
        serve(subject.loaded, cold, [greedy("it", self._prompt, 1)], look=logits.look)
        self._cold = logits.of[SequenceId(1)]

    def of(self, place: Place, lengths: Iterable[int] | None = None, *, num_output: int = 1) -> Iterator[Cut]:
        """All of them, in one engine, whose blocks, slots and segments hold what others have left there.

        lengths: so much of the prompt is asked for; if none are given, AFTER tokens beyond each boundary.
        """
        self._logits = Logits(self._subject.tolerance)
        block_size = self._subject.block_size
        served, source = self._engine_and_source(place)
        ends = range(block_size, (self._subject.num_blocks + 1) * block_size, block_size)
        for length in lengths or [end + AFTER for end in ends]:
            i = (length - 1) // block_size
            request = greedy(f"cut {length}", self._prompt[:length], num_output)
            if source is not None:
                served.engine.reset_prefix_cache()
                entries = PrefixSource(store_id=source, first=0, end=i, segments=tuple(range(i)))
                request = replace(request, sources=(entries,))
            sequence = served.submit(request, watch=True)
            if place is Place.BESIDE_OTHERS:
                for other in self._subject.others:
                    served.submit(other)
            if place is Place.PREEMPTED:
                served.step()
                served.preempt(sequence)
            yield self._cut(i * block_size, served.serve(), request, sequence)

    def cold(self, length: int, *, num_output: int) -> tuple[int, ...]:
        """The tokens that come out of so much of the prompt, where nothing is cached."""
        setup = replace(self._subject.setup, prefix_cache="naive")
        recording = serve(self._subject.loaded, setup, [greedy("it", self._prompt[:length], num_output)])
        return tuple(recording.tokens["it"])

    def _engine_and_source(self, place: Place) -> tuple[Served, StoreId | None]:
        stores = Stores()
        first = self._engine(stores)
        first.serve([greedy("whole", self._prompt, 1)])
        if place is Place.OTHER_STORE:
            elsewhere = Stores()
            elsewhere.has[OTHER] = stores.has[OWN]
            return self._engine(elsewhere), OTHER
        return first, OWN if place is Place.OWN_STORE else None

    def _engine(self, stores: Stores) -> Served:
        subject, look = self._subject, self._logits.look
        served = Served(subject.loaded, subject.setup, watch=(), look=look, stores=stores)
        served.serve(self._subject.others)
        return served

    def _cut(self, boundary: int, recording: Recording, request: EngineRequest, sequence: SequenceId) -> Cut:
        """What is cached of a boundary so near that it must be computed again from the start is of no use."""
        ours = self._logits.of[sequence]
        positions = range(boundary, len(request.prompt_token_ids))
        return Cut(
            boundary=boundary,
            num_cached=recording.num_cached_tokens[request.request_id],
            num_expected=max(0, boundary - self._subject.num_recomputed),
            wrong=tuple(p for p in positions if not self._logits.agree(ours.get(p), self._cold[p])),
            tokens=tuple(recording.tokens[request.request_id]),
        )


def assert_every_cut_is_right(subject: Subject) -> None:
    """From every place."""
    cuts = Cuts(subject)
    for place in Place:
        done = list(cuts.of(place))
        assert len(done) == subject.num_blocks
        assert [cut for cut in done if not cut.right] == [], place


def _mistral(window: int, block_size: int, scratch: Path) -> Subject:
    """Five windows, and at least eight blocks."""
    checkpoint = tiny_mistral(
        scratch, num_hidden_layers=4, sliding_window=window, max_position_embeddings=8192
    )
    return _subject(checkpoint, block_size, max(8, 5 * window // block_size + 1))


def _subject(checkpoint: Path, block_size: int, num_blocks: int, *, tolerance: float = 0.0) -> Subject:
    loaded = load_model(checkpoint, CpuBackend(2), max_model_len=(num_blocks + 2) * block_size)
    return Subject(loaded=loaded, block_size=block_size, num_blocks=num_blocks, tolerance=tolerance)


def _recurrent(config: str, scratch: Path) -> Subject:
    return _subject(tiny_library(config, scratch), 32, 8, tolerance=1e-4)


def _deepseek_v4(window: int, scratch: Path) -> Subject:
    """Blocks end where the longest stretches do. Within 1e-5 of the largest logits, which come to 7."""
    return _subject(tiny_deepseek_v4(scratch, sliding_window=window), 32, 8, tolerance=7e-5)


RECURRENT = {
    "qwen3-next": "Qwen3NextConfig",
    "qwen3.5": "Qwen3_5TextConfig",
    "granite": "GraniteMoeHybridConfig",
    "nemotron": "NemotronHConfig",
    "lfm2": "Lfm2Config",
}


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    **{f"mistral-{window}": partial(_mistral, window, 32) for window in (8, 64, 200)},
    "mistral-512": partial(_mistral, 512, 64),
    "gemma3": lambda scratch: _subject(tiny_gemma3(scratch), 32, 8),
    "gpt-oss": lambda scratch: _subject(tiny_gpt_oss(scratch, num_hidden_layers=6), 32, 8),
    **{name: partial(_recurrent, config) for name, config in RECURRENT.items()},
    **{f"deepseek-v4-{window}": partial(_deepseek_v4, window) for window in (16, 128)},
    "smollm2": lambda _: _subject(smollm2(), 128, 8),
    "gemma3-270m": lambda _: _subject(gemma3_270m(), 128, 21),
}
"""Each is given an empty folder that it may write to."""


def main(names: list[str]) -> int:
    if not names or not SUBJECTS.keys() >= set(names):
        print(f"name some of: {', '.join(SUBJECTS)}")
        return 2
    all_right = True
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            subject = SUBJECTS[name](Path(scratch))
        for num_dropped in range(min(3, subject.num_rings) + 1):
            cuts = Cuts(replace(subject, num_dropped=num_dropped))
            for place in Place:
                done = list(cuts.of(place))
                wrong = [cut for cut in done if not cut.right]
                all_right = all_right and not wrong
                right = f"{len(done) - len(wrong)} of {len(done)} cuts right"
                print(f"{name}, {num_dropped} layers dropped, {place}: {right}", *wrong, flush=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
