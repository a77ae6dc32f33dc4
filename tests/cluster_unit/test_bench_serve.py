"""`shoal bench serve` from its command line to its files."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cluster.bench.cli import app
from tests.api.server import serving
from tests.cluster_unit.fake_openai import Answer, FakeOpenAI


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
def url(fake: FakeOpenAI) -> Iterator[str]:
    with serving(fake.app()) as url:
        yield url


def bench(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["serve", "--url", url, "--input-len", "8", *arguments], env={"COLUMNS": "200"}
    )


def measured(url: str, folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "bench.json"
    result = bench(url, "--output-len", "3", "--json", str(path), *arguments)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_closed_loop(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    document = measured(url, tmp_path, "--num-requests", "6", "--concurrency", "2", "--warmup", "1", "--rows")
    summary = document["summary"]
    assert (summary["planned"], summary["sent"], summary["completed"], summary["failed"]) == (6, 6, 6, 0)
    assert (summary["input_tokens"], summary["output_tokens"], summary["cached_tokens"]) == (60, 18, 24)
    assert summary["tokens_counted_by"] == "usage"
    assert document["config"]["concurrency"] == 2
    assert document["server"]["model"] == "fake"
    assert [row["session"] for row in sorted(document["requests"], key=lambda row: row["session"])] == [
        *range(1, 7)  # session 0 warmed up
    ]
    assert len(fake.bodies) == 1 + 1 + 6  # the first asked what the server takes
    body = fake.bodies[-1]
    assert (body["temperature"], body["seed"], body["stream"], body["ignore_eos"]) == (0, 0, True, True)


def test_an_open_loop(url: str, tmp_path: Path) -> None:
    document = measured(
        url, tmp_path, "--num-requests", "5", "--rate", "500", "--arrivals", "fixed", "--rows"
    )
    due = sorted(row["due_s"] for row in document["requests"])
    assert [later - earlier for earlier, later in pairwise(due)] == pytest.approx([0.002] * 4, abs=2e-6)
    assert all(row["sent_s"] >= row["due_s"] for row in document["requests"])
    assert document["summary"]["full_load"] is None


def test_conversations(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    document = measured(url, tmp_path, "--workload", "multi-turn", "--turns", "3", "--num-requests", "4")
    assert document["summary"]["planned"] == 6  # two whole conversations
    last = max(fake.bodies, key=lambda body: len(body["messages"]))
    assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert last["messages"][1]["content"] == "one two three"


def test_token_ids(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    measured(
        url, tmp_path, "--prompt-format", "token_ids", "--workload", "shared-prefix", "--num-requests", "1"
    )
    assert len(fake.bodies[-1]["prompt"]) == 512 + 8


@pytest.mark.parametrize(
    "refused", [{"ignore_eos"}, {"ignore_eos", "stream_options"}], ids=["ignore_eos", "usage too"]
)
def test_fields_that_a_server_refuses_are_left_out(
    fake: FakeOpenAI, url: str, tmp_path: Path, refused: set[str]
) -> None:
    fake.refused_fields = frozenset(refused)
    document = measured(url, tmp_path, "--num-requests", "2")
    assert not refused & set(fake.bodies[-1])
    assert "the server refuses ignore_eos" in document["notes"]
    by_usage = "stream_options" not in refused
    assert document["summary"]["tokens_counted_by"] == ("usage" if by_usage else "events")
    assert document["summary"]["output_tokens"] == 6


def test_failures_are_shown_and_counted(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    fake.answer = lambda body: Answer(status=503) if len(fake.bodies) % 2 == 0 else Answer()
    path = tmp_path / "bench.json"
    result = bench(url, "--num-requests", "4", "--concurrency", "1", "--json", str(path))
    assert result.exit_code == 0
    assert "2 x http_503: no engine is ready" in result.output
    assert json.loads(path.read_text())["summary"]["failures"] == {
        "http_503": {"count": 2, "example": "no engine is ready"}
    }


def test_when_everything_fails_so_does_the_command(fake: FakeOpenAI, url: str) -> None:
    fake.answer = lambda body: Answer() if len(fake.bodies) == 1 else Answer(ending="cut_off")
    result = bench(url, "--num-requests", "2")
    assert result.exit_code == 1
    assert "2 x cut_off: the stream ended without [DONE]" in result.output


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Also where the tests were started in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_reports_what_was_measured(fake: FakeOpenAI, url: str, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        if len(fake.bodies) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            return Answer(ending="hang")
        return Answer()

    fake.answer = answer
    path = tmp_path / "bench.json"
    result = bench(url, "--num-requests", "9", "--concurrency", "1", "--json", str(path))
    assert "interrupted: 1 requests were running and are not counted" in result.output
    document = json.loads(path.read_text())
    assert document["interrupted"]
    assert (document["summary"]["completed"], document["summary"]["unfinished"]) == (2, 1)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = bench(f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    expected = f"error: no server at http://127.0.0.1:{port}/v1 (Connection refused): check --url"
    assert expected in result.output


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=401), "refuses the key (no engine is ready): check --api-key"),
        (Answer(status=503), "http_503: no engine is ready"),
        (Answer(ending="cut_off"), "cut_off: the stream ended without [DONE]"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(
    fake: FakeOpenAI, url: str, answer: Answer, message: str
) -> None:
    fake.answer = lambda body: answer
    result = bench(url)
    assert result.exit_code == 1
    assert message in result.output
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "1"], "--rate is an open loop and --concurrency a closed one"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--duration", "-1"], "--duration must be above 0"),
        (["--turns", "2"], "--turns means nothing to --workload random"),
        (["--prompt-format", "token_ids", "--endpoint", "chat"], "needs --endpoint completions"),
        (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (["--rows"], "choose --json"),
        (["--plot", "bench.txt"], "must end in one of .png, .svg, .pdf"),
        (["--output-len", "many"], "'many' is not a length"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_sent(arguments: list[str], message: str) -> None:
    result = bench("http://127.0.0.1:1", *arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_a_plot(url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    result = bench(url, "--num-requests", "4", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shoal.cluster.bench.cli.find_spec", lambda name: None)
    result = bench("http://127.0.0.1:1", "--plot", str(tmp_path / "bench.png"))
    assert result.exit_code == 1
    assert "--plot needs matplotlib: pip install 'shoal[bench]'" in result.output
