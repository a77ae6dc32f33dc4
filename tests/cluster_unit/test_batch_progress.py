"""What a person is told while a batch runs, and at its end."""

from io import StringIO
from typing import Any

from rich.console import Console

from shoal.cluster.batch.lines import Problem, Reply
from shoal.cluster.batch.progress import SILENCE_S, progress
from shoal.cluster.batch.tally import Tally, code_of, in_a_line


def reply(prompt: int = 90, completion: int = 10, cached: int = 45) -> Reply:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return Reply(status=200, request_id="", body={"usage": usage})


REFUSED = Reply(status=400, request_id="", body={"error": {"code": "context_length_exceeded"}})


def test_in_a_log_a_line_comes_now_and_then() -> None:
    said, now = StringIO(), 0.0
    tally = Tally(num_lines=40, num_before=10)
    with progress(tally, Console(file=said, width=40), clock=lambda: now) as show:
        for second in range(1, 21):
            now = second * SILENCE_S / 10
            tally.count(reply() if second % 10 else REFUSED)
            show(tally)
    assert said.getvalue().splitlines() == [
        "20 of 40 lines, 1 failed, 30 tokens/s, 405 hit (50%), 60 s to go",
        "30 of 40 lines, 2 failed, 30 tokens/s, 810 hit (50%), 30 s to go",
    ]


def test_on_a_terminal_a_bar_is_drawn() -> None:
    said = StringIO()
    tally = Tally(num_lines=4)
    with progress(tally, Console(file=said, force_terminal=True, width=120)) as show:
        tally.count(reply())
        show(tally)
    assert "1/4" in said.getvalue() and "45 hit (50%)" in said.getvalue()


def test_the_end_in_a_line() -> None:
    tally = Tally(num_lines=2000, num_before=5, num_failed_before=1)
    tally.count(reply(prompt=1200))
    tally.count(REFUSED)
    assert in_a_line(tally, 2.5) == (
        "2,000 lines: 5 answered, 2 failed (context_length_exceeded 1); 1,993 not asked or not answered:"
        " run again to go on; 2 now, in 2.5 s, with 1,200 tokens of prompts (45 of them hit)"
        " and 10 of answers"
    )
    assert in_a_line(Tally(num_lines=0), 0.0) == "0 lines: 0 answered, 0 failed"


def test_a_server_may_tell_nothing_of_tokens_or_nonsense() -> None:
    tally = Tally(num_lines=4)
    usages: list[Any] = [None, 7, {}, {"prompt_tokens": "many", "prompt_tokens_details": []}]
    for usage in usages:
        tally.count(Reply(status=200, request_id="", body={"usage": usage}))
    assert (tally.tokens, tally.cached_tokens, tally.failed) == (0, 0, 0)


def test_what_went_wrong_in_a_word() -> None:
    assert code_of(Problem(code="timeout", message="")) == "timeout"
    assert code_of(REFUSED) == "context_length_exceeded"
    assert code_of(Reply(status=502, request_id="", body={"error": "bad gateway"})) == "http_502"
