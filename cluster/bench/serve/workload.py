"""What is sent: sessions, each a few turns, drawn by name from a seed. Plain: no network, no clock.

Session i is the same in every process, whatever was drawn before it: two runs with one seed send the same.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

WorkloadName = Literal["random", "shared-prefix", "multi-turn"]
PromptFormat = Literal["text", "token_ids"]
Passage = str | tuple[int, ...]

KNOBS: Mapping[WorkloadName, Mapping[str, int]] = {
    "random": {},
    "shared-prefix": {"groups": 4, "prefix_len": 512},
    "multi-turn": {"groups": 1, "prefix_len": 0, "turns": 4},
}
"""What a workload may be told beside lengths, with the defaults."""

FIRST_ID, LAST_ID = 1_000, 9_999
"""Ordinary tokens of nearly every vocabulary: special ones stand before or far behind."""

_TEXT = (
    "about above after again all along also and any are around ask away back been being below best better "
    "big book both but call came can car case change city close come could cut day does done door down draw "
    "each early earth easy eat end even ever every eye face family far farm fast father few field find fire "
    "first food for found four from full game girl give good got great green ground grow half hand hard has "
    "have head help her here high him his home horse hour house how idea into just keep kind know land "
    "large last late learn left let life light like line list live long look low made main make man many "
    "mark men mile money more most mother move much must name near need never new next night north note now "
    "number off often old once one only open order other our out over own page paper part people place plan "
    "plant point power press put quick quite rain read real red rest right river road rock room run said "
    "same say school sea second see set she ship short should show side since six size sleep small some "
    "song soon sound south space stand start state stay still stop story street strong study such sun table "
    "take talk tell ten than that their them then there these they thing think this three through time too "
    "top town tree true try turn two under unit until use very voice walk war warm watch water way week "
    "well went were west what when where which white who why will wind with wood word work world would "
    "write year you young"
)
WORDS = tuple(_TEXT.split())
"""Each is one token in most vocabularies, behind a space, so a passage of n words has about n tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length in tokens, or a range from which each is drawn evenly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Of "256" or "128:512". Raises ValueError."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"{text!r} is not a length; write it like 256 or 128:512")
        return cls(int(match[1]), int(match[2] or match[1]))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    name: WorkloadName = "random"
    prompt_format: PromptFormat = "text"
    input_len: Lengths = Lengths(256, 256)
    """Of each turn, without prefix, history and what a chat template adds."""
    output_len: Lengths = Lengths(64, 64)
    groups: int | None = None
    prefix_len: int | None = None
    turns: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in get_args(WorkloadName):
            raise ValueError(f"--workload {self.name}: choose one of {', '.join(KNOBS)}")
        for knob in ("groups", "prefix_len", "turns"):
            value: int | None = getattr(self, knob)
            flag = f"--{knob.replace('_', '-')}"
            if value is not None and knob not in KNOBS[self.name]:
                raise ValueError(f"{flag} means nothing to --workload {self.name}")
            if value is not None and value < (0 if knob == "prefix_len" else 1):
                raise ValueError(f"{flag} {value} is too small")
        if self.name == "multi-turn" and self.prompt_format == "token_ids":
            raise ValueError("--workload multi-turn needs --prompt-format text: replies come back as text")

    def knob(self, name: str) -> int:
        """As told, else the workload's default; without any: one turn, one group, no prefix."""
        told: int | None = getattr(self, name)
        return told if told is not None else KNOBS[self.name].get(name, 0 if name == "prefix_len" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    passage: Passage
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One conversation. Where requests are independent it has one turn."""

    index: int
    group: int
    prefix: Passage
    """Shared by the sessions of a group; may be empty."""
    turns: tuple[Turn, ...]


class Workload:
    def __init__(self, config: WorkloadConfig) -> None:
        self._config = config
        self._prefixes = [
            self._passage(config.knob("prefix_len"), random.Random(f"{config.seed}/prefix/{group}"))
            for group in range(config.knob("groups"))
        ]

    @property
    def turns(self) -> int:
        return self._config.knob("turns")

    def session(self, index: int) -> Session:
        rng = random.Random(f"{self._config.seed}/session/{index}")  # seeds by the text's SHA-512
        group = index % len(self._prefixes)
        turns = tuple(
            Turn(
                passage=self._passage(self._config.input_len.draw(rng), rng),
                output_len=self._config.output_len.draw(rng),
            )
            for _ in range(self.turns)
        )
        return Session(index=index, group=group, prefix=self._prefixes[group], turns=turns)

    def _passage(self, num_tokens: int, rng: random.Random) -> Passage:
        if self._config.prompt_format == "text":
            return " ".join(rng.choices(WORDS, k=num_tokens))
        return tuple(rng.choices(range(FIRST_ID, LAST_ID + 1), k=num_tokens))
