"""`shoal bench reuse`: who is asked in which order, what is believed of the answers, and what a person sees.

Nodes are stood in for by dictionaries and a clock that says how long each answer took.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.actors.messages import CachedTokens, PrefixSource, StoreId
from shoal.cluster.bench import reuse
from shoal.cluster.bench.cli import app
from shoal.cluster.bench.reuse import Answer, ReuseError, TwoNodes, check, measure, rows_of
from tests.checkpoints import tiny_llama

BLOCK, PREFIX = 16, 64
STORE = StoreId("store")
COMPUTE_S, DEVICE_S, OWN_S, OTHER_S = 10.0, 0.5, 0.8, 1.2


@dataclass
class FakeStore:
    prompts: set[tuple[int, ...]] = field(default_factory=set)

    def sources(self, prompt: Sequence[int]) -> tuple[PrefixSource, ...]:
        assert tuple(prompt) in self.prompts, "nobody has saved it"
        return (PrefixSource(store_id=STORE, first=0, end=len(prompt) // BLOCK),)

    def forget(self) -> None:
        self.prompts.clear()


@dataclass
class FakeEngine:
    """Answers with the prompt's first tokens."""

    own: FakeStore
    of_another: FakeStore
    device: set[tuple[int, ...]] = field(default_factory=set)
    num_asked: int = 0

    def ask(self, prompt: Sequence[int], sources: tuple[PrefixSource, ...] = ()) -> Answer:
        self.num_asked += 1
        name, cached = tuple(prompt), len(prompt) - BLOCK
        if name in self.device:
            taken = (DEVICE_S, CachedTokens(device=cached))
        elif sources and name in self.own.prompts:
            taken = (OWN_S, CachedTokens(own_store=cached))
        elif sources and name in self.of_another.prompts:
            taken = (OTHER_S, CachedTokens(other_store=cached))
        else:
            taken = (COMPUTE_S, CachedTokens())
        self.device.add(name)
        self.own.prompts.add(name)
        return Answer(ttft_s=taken[0], token_ids=name[:2], logprobs=(-1.0, -2.0), cached=taken[1])

    def forget(self) -> None:
        self.device.clear()


def two_nodes() -> tuple[TwoNodes, FakeEngine]:
    store, other_store = FakeStore(), FakeStore()
    here, there = FakeEngine(store, other_store), FakeEngine(other_store, store)
    return TwoNodes(here=here, store=store, there=there, other_store=other_store), here


def answers() -> dict[reuse.Place, Answer]:
    nodes, _ = two_nodes()
    return reuse.play(nodes, range(PREFIX + BLOCK))


def test_every_place_is_measured_in_turns() -> None:
    nodes, here = two_nodes()
    rows = measure(nodes, PREFIX, block_size=BLOCK, rounds=3, console=Console(file=io.StringIO()))
    assert [row.place for row in rows] == ["computed", "device", "own store", "other store"]
    assert [row.ttft_s for row in rows] == [COMPUTE_S, DEVICE_S, OWN_S, OTHER_S]
    assert [row.ratio for row in rows] == [1.0, 0.05, 0.08, 0.12]
    assert [row.cached_tokens.total for row in rows] == [0, PREFIX, PREFIX, PREFIX]
    assert here.num_asked == 3 * (3 + 1), "each round, and once to warm up"


def test_a_ratio_is_to_the_same_round() -> None:
    rounds = [
        {place: replace(answer, ttft_s=speed * answer.ttft_s) for place, answer in answers().items()}
        for speed in (1.0, 3.0, 2.0)
    ]
    device = next(row for row in rows_of(rounds) if row.place == "device")
    assert device.all_ttft_s == (0.5, 1.5, 1.0)
    assert (device.ttft_s, device.ratio) == (1.0, 0.05), "though the machine was not equally fast"
    assert (device.best_ttft_s, device.best_ratio) == (0.5, 0.05)


def test_a_prefix_found_elsewhere_is_no_measurement() -> None:
    taken = answers()
    taken["other store"] = taken["device"]
    with pytest.raises(ReuseError, match=r"other store: CachedTokens\(device=64"):
        check(taken, PREFIX)


@pytest.mark.parametrize("wrong", [{"token_ids": (0, 2)}, {"logprobs": (-1.0, -2.0000001)}])
def test_a_prefix_that_changes_the_output_is_no_measurement(wrong: dict[str, tuple[float, ...]]) -> None:
    taken = answers()
    taken["own store"] = replace(taken["own store"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ReuseError, match=r"own store: .* came out"):
        check(taken, PREFIX)


def test_the_report_is_a_table_and_json(tmp_path: Path) -> None:
    out = io.StringIO()
    rows = rows_of([answers()])
    reuse.report(rows, {"threads": 2}, tmp_path / "rows.json", Console(file=out, width=120))
    assert "5.0%" in out.getvalue()
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["threads"] == 2
    other = written["rows"][3]
    assert (other["place"], other["ttft_s"], other["ratio"]) == ("other store", OTHER_S, 0.12)
    assert other["cached_tokens"] == {"device": 0, "own_store": 0, "other_store": PREFIX}


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["reuse", "/nowhere/at/all"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert result.output.startswith("error: /nowhere/at/all is not a directory")


def test_a_prefix_longer_than_the_model_is_one_line(tmp_path: Path) -> None:
    checkpoint = str(tiny_llama(tmp_path))
    result = CliRunner().invoke(app, ["reuse", checkpoint, "--prefix-tokens", "400"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert result.output == "error: --prefix-tokens 512 is too long: the model ends at 512 tokens\n"
