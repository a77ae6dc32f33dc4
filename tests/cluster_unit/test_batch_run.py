"""`shoal batch` as a person runs it, in front of a server that answers, refuses and hangs up as told."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner, Result

from shoal.cluster.batch.lines import Question
from shoal.cluster.batch.server import Refusal, Server
from shoal.cluster.cli import app
from tests.api.server import serving
from tests.cluster_unit.batches import CHAT, FakeServer, Says, answers, line, texts, write_input


@contextmanager
def url_of(server: FakeServer) -> Iterator[str]:
    with serving(server.app()) as url:
        yield url


def run(*command: object) -> Result:
    arguments = ["batch", *map(str, command)]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "SHOAL_API_KEY": None})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.jsonl", [line(f"id-{i}", f"prompt {i}") for i in range(20)])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_line_is_answered(source: Path, target: Path) -> None:
    server = FakeServer()
    with url_of(server) as url:
        result = run(source, target, "--url", url, "--json")
    assert result.exit_code == 0, result.output
    assert texts(target) == {f"id-{i}": f"prompt {i}"[::-1] for i in range(20)}
    summary = json.loads(result.stdout)
    assert summary["lines"] == summary["answered"] == 20
    assert (summary["failed"], summary["unanswered"]) == (0, 0)
    assert (summary["prompt_tokens"], summary["completion_tokens"], summary["cached_tokens"]) == (200, 40, 80)
    assert summary["cached_tokens_by_place"] == {"device": 60, "own_store": 20, "other_store": 0}
    assert "20 lines: 20 answered, 0 failed" in result.stderr
    assert answers(target)[0]["response"]["request_id"].startswith("req-")


def test_one_that_is_done_asks_nobody(source: Path, target: Path) -> None:
    with url_of(FakeServer()) as url:
        run(source, target, "--url", url)
    before = target.read_bytes()
    result = run(source, target, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 0, result.output
    assert target.read_bytes() == before


def test_a_torn_answer_is_asked_for_again_and_no_other(source: Path, target: Path) -> None:
    with url_of(FakeServer()) as url:
        run(source, target, "--url", url)
    whole = target.read_bytes()
    kept = whole.splitlines(keepends=True)[:7]
    target.write_bytes(b"".join(kept) + whole.splitlines()[7][:30])
    again = FakeServer()
    with url_of(again) as url:
        assert run(source, target, "--url", f"{url}/v1/").exit_code == 0
    assert len(again.asked) == 13
    assert target.read_bytes().startswith(b"".join(kept))
    assert len(texts(target)) == 20


def test_bad_lines_fail_alone_and_say_why(tmp_path: Path, target: Path) -> None:
    lines = [line("a"), line("b") | {"method": "GET"}, line("a"), line("c") | {"url": "/v1/x"}, line("d")]
    source = write_input(tmp_path / "in.jsonl", lines)
    with source.open("a") as file:
        file.write("nonsense\n")
    with url_of(FakeServer()) as url:
        result = run(source, target, "--url", url, "--ordered", "--json")
    assert result.exit_code == 1
    said = answers(target)
    assert [each["custom_id"] for each in said] == ["a", "b", None, "c", "d", None]
    assert [each["error"] and each["error"]["code"] for each in said] == [
        None,
        "invalid_method",
        "duplicate_custom_id",
        "invalid_url",
        None,
        "invalid_json_line",
    ]
    assert said[2]["error"]["message"] == "custom_id: line 1 has the same"
    assert len({each["id"] for each in said}) == 6
    assert json.loads(result.stdout)["errors"] == {
        "invalid_method": 1,
        "duplicate_custom_id": 1,
        "invalid_url": 1,
        "invalid_json_line": 1,
    }


def test_what_the_server_refuses_is_an_answer_and_may_be_asked_again(source: Path, target: Path) -> None:
    refuses = FakeServer(says=lambda prompt, _: Says(status=400 if prompt.endswith("7") else 200))
    with url_of(refuses) as url:
        result = run(source, target, "--url", url)
    assert result.exit_code == 1
    assert "18 answered, 2 failed (code_400 2)" in result.stderr
    (failed, _) = [each for each in answers(target) if each["response"]["status_code"] == 400]
    assert failed["response"]["body"]["error"]["message"] == "not now" and failed["error"] is None
    with url_of(FakeServer()) as url:
        assert run(source, target, "--url", url).exit_code == 1  # as it was: all have an answer
        assert run(source, target, "--url", url, "--retry-failed").exit_code == 0
    assert len(texts(target)) == 20


def test_who_is_refused_comes_again_when_it_is_told(source: Path, target: Path) -> None:
    busy = FakeServer(
        says=lambda prompt, attempt: Says(status=(429, 503, 200)[min(attempt, 3) - 1], retry_after="0")
    )
    with url_of(busy) as url:
        result = run(source, target, "--url", url)
    assert result.exit_code == 0, result.output
    assert len(busy.asked) == 60
    assert len(texts(target)) == 20


@pytest.mark.parametrize(
    ("says", "code"),
    [
        (Says(raw=b"<html>hello"), "malformed_answer"),
        (Says(status=404, raw=b"<html>no such page"), "http_404"),
    ],
)
def test_what_is_no_json_is_told_in_json(source: Path, target: Path, says: Says, code: str) -> None:
    with url_of(FakeServer(says=lambda prompt, _: says)) as url:
        result = run(source, target, "--url", url, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"] == {code: 20}
    assert "<html>" in target.read_text()


def test_an_answer_that_is_cut_off_is_asked_for_again(source: Path, target: Path) -> None:
    cuts = FakeServer(says=lambda prompt, attempt: Says(ending="cut" if attempt == 1 else "whole"))
    with url_of(cuts) as url:
        assert run(source, target, "--url", url).exit_code == 0
    assert len(cuts.asked) == 40
    assert len(texts(target)) == 20


def test_an_answer_that_never_comes_is_given_up(source: Path, target: Path) -> None:
    hangs = FakeServer(says=lambda prompt, _: Says(ending="never" if prompt.endswith("7") else "whole"))
    with url_of(hangs) as url:
        result = run(source, target, "--url", url, "--timeout", 1)
    assert result.exit_code == 1
    assert "18 answered, 2 failed (timeout 2)" in result.stderr


def test_a_connection_that_is_not_made_in_time_is_tried_again() -> None:
    class Deaf:
        def post(self, url: str, data: bytes) -> None:
            raise aiohttp.ConnectionTimeoutError

    http: Any = Deaf()
    said = asyncio.run(Server(http, "http://x", 1.0).ask(Question(url=CHAT, body={})))
    assert isinstance(said, Refusal)


def test_without_concurrency_the_server_says_how_much_keeps_it_busy(source: Path, target: Path) -> None:
    server = FakeServer(slots=2, waits_for=6)
    with url_of(server) as url:
        assert run(source, target, "--url", url).exit_code == 0
    assert server.most_open == 6
    target.unlink()
    server = FakeServer(slots=2)
    with url_of(server) as url:
        assert run(source, target, "--url", url, "--concurrency", 1).exit_code == 0
    assert server.most_open == 1


def test_those_that_share_a_prefix_are_asked_one_after_the_other(tmp_path: Path, target: Path) -> None:
    shared = [f"{'document ' * 20}{group} {'and its text ' * 20}{i}" for i in range(5) for group in range(4)]
    lines = [line(str(i), prompt) for i, prompt in enumerate(shared)]
    server = FakeServer()
    with url_of(server) as url:
        run(write_input(tmp_path / "in.jsonl", lines), target, "--url", url, "--concurrency", 1, "--ordered")
    groups = [prompt.split()[20] for prompt in server.asked]
    assert sorted(groups[:4]) == ["0", "1", "2", "3"]  # who computes it goes ahead
    assert [a for a, b in pairwise(groups[4:]) if a != b] == groups[:3]
    assert [each["custom_id"] for each in answers(target)] == [str(i) for i in range(20)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--url", "http://127.0.0.1:1"],
            "no server at http://127.0.0.1:1 (Connection refused): check --url",
        ),
        (["--url", "ftp://x"], "--url ftp://x must begin with http:// or https://"),
        (["--url", "http://127.0.0.1:1", "--engines", "2"], "--engines is of a cluster of our own, --url of"),
    ],
)
def test_a_wrong_choice_is_one_line(source: Path, target: Path, flags: list[str], message: str) -> None:
    result = run(source, target, *flags)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_files_that_do_not_fit_each_other(source: Path, target: Path) -> None:
    assert "OUT.jsonl is missing" in run(source).stderr
    assert "OUT is IN" in run(source, source, "--url", "http://x").stderr
    assert "cannot read" in run(target, target.with_name("other"), "--url", "http://x").stderr
    with url_of(FakeServer()) as url:
        run(source, target, "--url", url)
        with source.open("a") as file:
            file.write(json.dumps(line("one-more")) + "\n")
        result = run(source, target, "--url", url)
    assert result.exit_code == 1
    assert "answers another input, or this one before it was changed" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_key_is_sent_and_a_wrong_one_is_said(source: Path, target: Path) -> None:
    with url_of(FakeServer(key="secret")) as url:
        result = run(source, target, "--url", url)
        assert result.exit_code == 1 and "refuses the key (401): check --api-key" in result.stderr
        assert run(source, target, "--url", url, "--api-key", "secret").exit_code == 0


def test_check_says_what_is_wrong_and_asks_nobody(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"temperature": 5},
        {"suffix": "end"},
        {},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    lines = [line(f"id-{i}", **body) for i, body in enumerate(bodies)]
    lines += [lines[3] | {"url": CHAT, "custom_id": "chat"}, line("id-0"), {"custom_id": "x"}]
    source = write_input(tmp_path / "in.jsonl", lines)
    result = run(source, "--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "lines": 7,
        "problems": 4,
        "codes": {"invalid_body": 2, "invalid_method": 1, "duplicate_custom_id": 1},
    }
    assert "line 1: body: temperature: Input should be less than or equal to 2." in result.stderr
    assert "line 2: body: suffix: this value is not supported." in result.stderr
    assert "line 6: custom_id: line 1 has the same" in result.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_check_of_what_is_right(source: Path) -> None:
    result = run(source, "--check")
    assert result.exit_code == 0
    assert result.stderr == "20 lines, 0 problems\n"
