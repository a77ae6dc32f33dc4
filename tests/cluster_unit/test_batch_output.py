"""An output survives whatever moment its writer is killed at: each answer is there once, and whole."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.batch.index import Answer, BatchError
from shoal.cluster.batch.lines import Problem, Reply
from shoal.cluster.batch.output import Output

DIGEST, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
GOOD = Reply(status=200, request_id="r", body={"text": "line\nbreak, \u2028 and ü"})
BAD = Reply(status=503, request_id="r", body={"error": {}})
GONE = Problem(code="connection_error", message="x")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def written(path: Path, *numbers: int, outcome: Reply | Problem = GOOD) -> None:
    with closing(Output(path, DIGEST)) as output:
        list(output.recover())
        for number in numbers:
            output.append(number, str(number), outcome)


def recovered(path: Path, *, with_failed: bool = True) -> list[int]:
    with closing(Output(path, DIGEST)) as output:
        return [answer.number for answer in output.recover(with_failed=with_failed)]


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_what_was_written_is_found_again(path: Path) -> None:
    written(path, 3, 1)
    written(path, 2)
    assert recovered(path) == [3, 1, 2]


def test_a_torn_line_is_cut_off_and_the_next_begins_there(path: Path) -> None:
    written(path, 1, 2)
    os.truncate(path, path.stat().st_size - 1)  # all of it but the line break
    written(path, 3)
    assert ids(path) == ["1", "3"]


def test_zeros_that_a_loss_of_power_left_are_cut_off(path: Path) -> None:
    written(path, 1)
    with path.open("ab") as file:
        file.write(bytes(100))
    assert recovered(path) == [1]
    assert ids(path) == ["1"]


@given(
    numbers=st.permutations(range(1, 8)),
    cuts=st.lists(st.integers(min_value=0, max_value=2000), max_size=4),
)
def test_any_prefix_of_any_sequence_of_writes_resumes_to_the_same_set(
    numbers: list[int], cuts: list[int]
) -> None:
    """The model is a list of (end of line, number): what is whole in the prefix is answered."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        for cut in [*cuts, None]:
            with closing(Output(path, DIGEST)) as output:
                have = [answer.number for answer in output.recover()]
                for number in numbers:
                    if number not in have:
                        output.append(number, str(number), GOOD)
            assert sorted(ids(path)) == [str(number) for number in range(1, 8)]
            if cut is None:
                return
            ends = list(_ends(path))
            os.truncate(path, min(cut, path.stat().st_size))
            assert recovered(path) == [number for end, number in ends if end <= cut]


def _ends(path: Path) -> Iterator[tuple[int, int]]:
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        yield end, int(json.loads(line)["custom_id"])


def test_another_input_is_refused_and_nothing_is_changed(path: Path) -> None:
    written(path, 1)
    before = path.read_bytes()
    with closing(Output(path, OTHER)) as output, pytest.raises(BatchError, match="answers another input"):
        list(output.recover())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"my diary", b"my diary\n", b"{}\n", b"[]\n", b'{"id": 7, "error": null, "response": null}\n', bytes(9)],
)
def test_a_file_of_something_else_is_refused_and_nothing_is_changed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with closing(Output(path, DIGEST)) as output, pytest.raises(BatchError, match="remove it"):
        list(output.recover())
    assert path.read_bytes() == content


def test_two_processes_do_not_write_one_file(path: Path) -> None:
    with closing(Output(path, DIGEST)), pytest.raises(BatchError, match="another process writes"):
        Output(path, DIGEST)
    Output(path, DIGEST).close()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"cannot write .*: No such file"):
        Output(tmp_path / "none" / "out", DIGEST)
    with pytest.raises(BatchError, match=r"cannot write .*: Is a directory"):
        Output(tmp_path, DIGEST)


def test_failures_are_counted_and_may_be_forgotten(path: Path) -> None:
    written(path, 1)
    written(path, 2, outcome=BAD)
    written(path, 3, outcome=GONE)
    assert recovered(path, with_failed=False) == [1]
    with closing(Output(path, DIGEST)) as output:
        list(output.recover())
        assert output.num_failed == 2
        output.rewrite([answer for answer in output.recover(with_failed=False)])
        assert output.num_failed == 0
        output.append(3, "3", GOOD)
    assert ids(path) == ["1", "3"]


def test_rewritten_in_another_order_it_is_still_ours(path: Path) -> None:
    written(path, 3, 1, 2)
    with closing(Output(path, DIGEST)) as output:
        answers = sorted(output.recover(), key=lambda answer: answer.number)
        assert not output.is_ordered
        output.rewrite(answers)
        with pytest.raises(BatchError, match="another process writes"):
            Output(path, DIGEST)
        list(output.recover())
        assert output.is_ordered
    assert ids(path) == ["1", "2", "3"]
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_a_rewrite_that_is_killed_has_changed_nothing_and_the_next_is_whole(path: Path) -> None:
    written(path, 2, 1)
    before = path.read_bytes()
    with closing(Output(path, DIGEST)) as output:

        def killed() -> Iterator[Answer]:
            yield from list(output.recover())[:1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            output.rewrite(killed())
    assert path.read_bytes() == before
    with closing(Output(path, DIGEST)) as output:
        output.rewrite(sorted(output.recover(), key=lambda answer: answer.number))
    assert ids(path) == ["1", "2"]
