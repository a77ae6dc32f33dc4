"""What a person sees while they wait."""

import io

import pytest
from rich.console import Console

from shoal.cluster.sources.progress import BarProgress, LineProgress, terminal_progress


def test_a_log_gets_lines_at_the_start_every_ten_seconds_and_at_the_end() -> None:
    now, lines = 0.0, list[str]()
    progress = LineProgress(lines.append, clock=lambda: now)

    with progress.step("downloading x") as step:
        step.add_total(3_000_000)
        step.add_total(2_000_000)
        for _ in range(4):
            now += 4.0
            step.advance(1_000_000)

    assert lines == ["downloading x ...", "downloading x: 3 of 5 MB", "downloading x: done in 16.0 s"]


def test_a_failed_step_is_not_called_done() -> None:
    lines: list[str] = []

    with pytest.raises(KeyboardInterrupt), LineProgress(lines.append).step("downloading x"):
        raise KeyboardInterrupt

    assert lines == ["downloading x ..."]


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    progress = BarProgress(Console(file=screen, force_terminal=True, width=100))

    with progress.step("downloading [x]") as step:
        step.add_total(10_000_000)
        step.advance(5_000_000)

    assert "5.0/10.0 MB" in screen.getvalue()
    assert "downloading [x]: done in" in screen.getvalue()


def test_without_a_terminal_there_are_only_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal_progress().step("downloading x"):
        pass

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "downloading x ..."
