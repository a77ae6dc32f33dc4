"""`shoal bench overhead` without Ray: what is asked of a server, and what is made of its times."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cluster.bench.cli import app
from shoal.cluster.bench.contender import PeerError
from shoal.cluster.bench.overhead import (
    DIRECT,
    OverheadError,
    Plan,
    Row,
    Turn,
    bodies,
    measure,
    report,
    rows_of,
)
from shoal.cluster.bench.overhead_servers import dummy
from shoal.cluster.bench.server_process import free_port, running

SMALL = Plan(rounds=2, requests=3, concurrency=4, requests_at_once=8, input_len=5)


def silence() -> Console:
    return Console(file=io.StringIO())


def test_each_prompt_is_another_and_one_token_is_asked_for() -> None:
    asked = [json.loads(body) for body in bodies("m", SMALL)]
    assert len({body["prompt"] for body in asked}) == len(asked)
    assert {len(body["prompt"].split()) for body in asked} == {5}
    assert {(body["model"], body["max_tokens"]) for body in asked} == {("m", 1)}


def test_the_best_round_counts_and_what_is_added_is_over_the_direct_one() -> None:
    turns = {
        DIRECT: [Turn(latencies_s=(0.001,) * 3, requests_per_s=900.0)],
        "shoal": [
            Turn(latencies_s=(0.009,) * 3, requests_per_s=310.0),
            Turn(latencies_s=(0.005,) * 3, requests_per_s=290.0),
        ],
    }
    direct, ours = rows_of(turns)
    assert direct == Row(
        server=DIRECT, p50_ms=1.0, p90_ms=1.0, p99_ms=1.0, added_p50_ms=None, requests_per_s=900.0
    )
    assert (ours.p50_ms, ours.added_p50_ms, ours.requests_per_s) == (5.0, 4.0, 310.0)


def test_a_server_that_answers_at_once_is_measured(tmp_path: Path) -> None:
    with dummy("m") as url:
        rows = measure({DIRECT: url, "again": url}, "m", SMALL, silence())
    assert [row.server for row in rows] == [DIRECT, "again"]
    assert all(row.requests_per_s > 0 < row.p50_ms for row in rows)
    report(rows, SMALL, tmp_path / "rows.json", silence())
    said = json.loads((tmp_path / "rows.json").read_text())
    assert said["plan"]["concurrency"] == 4
    assert [row["server"] for row in said["rows"]] == [DIRECT, "again"]


def test_one_that_refuses_or_is_gone_ends_the_run_with_its_name() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OverheadError, match=r"^direct: ClientConnectorError"):
        measure({DIRECT: url}, "m", SMALL, silence())


def test_a_program_that_ends_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such flag')"]
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(PeerError, match="no such flag"), running("x", command, url, env={}, within_s=60):
        pytest.fail("it never answered")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vs", "smg"], "pip install smg"),
        (["--vs", "vllm-router", "--peer-python", "/nowhere/python"], "there is no vllm-router beside"),
        (["--requests", "1"], "--requests must be at least 2"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["overhead", *arguments])
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())
