"""`shoal keys`: a file of keys as a person keeps it."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.actors.ingress.keys import hash_of, parse_keys, read_keys
from shoal.cluster.cli import app

ALICE = ["--name", "alice", "--tenant", "acme", "--requests-per-minute", "60", "--max-concurrent", "4"]


def keys(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], env={"COLUMNS": "200"})


def new(*arguments: str) -> str:
    """The key, alone on stdout."""
    result = keys("new", *arguments)
    assert result.exit_code == 0, result.output
    key, end = result.stdout.split("\n")
    assert end == ""
    return key


def error_of(*arguments: str) -> str:
    result = keys(*arguments)
    assert (result.exit_code, result.output.count("\n")) == (1, 1), result.output
    return result.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_key_is_shown_once_and_its_hash_is_kept(path: Path) -> None:
    key = new(*ALICE, "--file", str(path))
    other = new("--name", "bob", "--tokens-per-minute", "1000", "--file", str(path))
    alice, bob = read_keys(path)
    assert (alice.hash, bob.hash) == (hash_of(key), hash_of(other))
    assert (alice.whose, alice.requests_per_minute, alice.max_concurrent) == ("acme", 60, 4)
    assert (bob.whose, bob.tokens_per_minute) == ("bob", 1000)
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(path.parent.iterdir()) == [path], "nothing else is left there"


def test_without_a_file_what_to_add_is_shown() -> None:
    result = keys("new", *ALICE)
    key = result.stdout.strip()
    [alice] = parse_keys("keys:\n" + result.stderr.split("\n", 1)[1])
    assert (alice.name, alice.hash) == ("alice", hash_of(key))


def test_comments_links_and_who_may_read_it_stay(path: Path) -> None:
    target = path.with_name("target.yaml")
    target.write_text(f"# ours\nkeys:\n  - name: first  # of all\n    hash: {hash_of('a')}")
    os.chmod(target, 0o640)
    path.symlink_to(target)
    new(*ALICE, "--file", str(path))
    assert path.is_symlink()
    assert target.read_text().startswith("# ours\nkeys:\n  - name: first  # of all\n")
    assert [entry.name for entry in read_keys(path)] == ["first", "alice"]
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"keys: [{{name: a, hash: '{hash_of('a')}'}}]", "does not end with a list below `keys:`"),
        ("keys: []", "does not end with a list below `keys:`"),
        ("keys: [", "not YAML"),
        (f"keys:\n  - name: alice\n    hash: {hash_of('a')}\n", "--name alice: "),
    ],
)
def test_what_cannot_be_added_to_stays_as_it_was(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    assert message in error_of("new", *ALICE, "--file", str(path))
    assert path.read_text() == text


def test_a_folder_that_is_not_there(path: Path) -> None:
    assert "No such file" in error_of("new", *ALICE, "--file", str(path / "below"))


def test_a_name_that_is_none() -> None:
    assert "name: String should match pattern" in error_of("new", "--name", "a b")


def test_check_says_who_may_come_in(path: Path) -> None:
    new(*ALICE, "--file", str(path))
    new("--name", "bob", "--tenant", "acme", "--file", str(path))
    assert keys("check", str(path)).stdout.splitlines() == [
        "2 key(s) of 1 tenant(s)",
        "alice: tenant acme; requests_per_minute 60, max_concurrent 4",
        "bob: tenant acme; no limits",
    ]
    path.write_text("keys: 1")
    assert "keys: Input should be a valid list" in error_of("check", str(path))
