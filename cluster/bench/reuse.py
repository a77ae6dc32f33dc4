"""What a cached prefix saves of the time to the first token, by where it is found.

Each round has a fresh prompt. One engine computes all of it; then it is asked again with the prefix on its
device, and with the prefix in its own node's store only; last the engine of the other node is asked, which
finds it there too. The rest of the prompt, one block, is computed in every case. What engines save meanwhile
is part of what they take: they are configured as a cluster's are.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.actors.messages import CachedTokens, PrefixSource
from shoal.cluster.console import write

Place = Literal["computed", "device", "own store", "other store"]
PLACES: tuple[Place, ...] = ("computed", "device", "own store", "other store")
LEAST_TOKEN_ID, MOST_TOKEN_ID = 5, 255
"""Every vocabulary has these."""


class ReuseError(Exception):
    """What was measured is not what was meant to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ttft_s: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of these."""
    cached: CachedTokens


class Engine(Protocol):
    def ask(self, prompt: Sequence[int], sources: tuple[PrefixSource, ...] = ()) -> Answer: ...

    def forget(self) -> None:
        """All that is cached on its device."""
        ...


class Store(Protocol):
    def sources(self, prompt: Sequence[int]) -> tuple[PrefixSource, ...]:
        """Of all blocks of the prompt, and what else goes with them, once it has them."""
        ...

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    here: Engine
    store: Store
    """On the same node."""
    there: Engine
    other_store: Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    place: Place
    ttft_s: float
    """The median of all rounds."""
    ratio: float
    """Of ttft_s to that of computing the whole prompt in the same round; the median too."""
    best_ttft_s: float
    best_ratio: float
    """The best to the best."""
    cached_tokens: CachedTokens
    all_ttft_s: tuple[float, ...]
    """By round."""


def measure(
    nodes: TwoNodes, prefix_tokens: int, *, block_size: int, rounds: int, console: Console
) -> list[Row]:
    """prefix_tokens: whole blocks. The prompt has one more, which is not reused: its last token is computed.

    Raises ReuseError if a prefix was not where it was to be, or changed what came out.
    """
    draw = random.Random(0)
    answers = []
    for turn in track(range(rounds + 1), "time to first token", console=console):
        is_warm_up = not turn  # a short prompt is enough for it
        num_cached = min(prefix_tokens, 2 * block_size) if is_warm_up else prefix_tokens
        prompt = [draw.randint(LEAST_TOKEN_ID, MOST_TOKEN_ID) for _ in range(num_cached + block_size)]
        taken = play(nodes, prompt)
        check(taken, num_cached)
        if not is_warm_up:
            answers.append(taken)
    return rows_of(answers)


def play(nodes: TwoNodes, prompt: Sequence[int]) -> dict[Place, Answer]:
    forgetful: Iterable[Engine | Store] = (nodes.here, nodes.there, nodes.store, nodes.other_store)
    for each in forgetful:
        each.forget()
    answers: dict[Place, Answer] = {"computed": nodes.here.ask(prompt)}
    sources = nodes.store.sources(prompt)
    answers["device"] = nodes.here.ask(prompt)
    nodes.here.forget()
    answers["own store"] = nodes.here.ask(prompt, sources)
    answers["other store"] = nodes.there.ask(prompt, sources)
    return answers


def check(answers: Mapping[Place, Answer], num_cached: int) -> None:
    expected: dict[Place, CachedTokens] = {
        "computed": CachedTokens(),
        "device": CachedTokens(device=num_cached),
        "own store": CachedTokens(own_store=num_cached),
        "other store": CachedTokens(other_store=num_cached),
    }
    computed = answers["computed"]
    for place, answer in answers.items():
        if answer.cached != expected[place]:
            raise ReuseError(f"{place}: {answer.cached}, and not {expected[place]}, were found")
        if (answer.token_ids, answer.logprobs) != (computed.token_ids, computed.logprobs):
            raise ReuseError(f"{place}: {answer.token_ids} came out, and {computed.token_ids} when computed")


def rows_of(answers: Sequence[Mapping[Place, Answer]]) -> list[Row]:
    """answers: of each round."""
    ttft_s = {place: tuple(turn[place].ttft_s for turn in answers) for place in PLACES}
    return [_row(place, ttft_s[place], ttft_s["computed"], answers[0][place].cached) for place in PLACES]


def _row(place: Place, ttft_s: Sequence[float], computed_s: Sequence[float], cached: CachedTokens) -> Row:
    ratios = [seconds / whole_s for seconds, whole_s in zip(ttft_s, computed_s, strict=True)]
    return Row(
        place=place,
        ttft_s=round(median(ttft_s), 4),
        ratio=round(median(ratios), 4),
        best_ttft_s=round(min(ttft_s), 4),
        best_ratio=round(min(ttft_s) / min(computed_s), 4),
        cached_tokens=cached,
        all_ttft_s=tuple(round(seconds, 4) for seconds in ttft_s),
    )


def as_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def report(rows: Sequence[Row], about: Mapping[str, Any], json_file: Path | None, console: Console) -> None:
    table = Table("prefix found", "tokens reused", "TTFT s", "of computing", "best s", "of computing")
    for row in rows:
        table.add_row(
            "nowhere" if row.place == "computed" else row.place,
            f"{row.cached_tokens.total:,}",
            f"{row.ttft_s:.3f}",
            f"{row.ratio:.1%}",
            f"{row.best_ttft_s:.3f}",
            f"{row.best_ratio:.1%}",
        )
    console.print(table)
    if json_file is not None:
        write(json_file, as_json(rows, about), console)
