"""The command line: what a person can mend is one line, said before anything is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cluster.cli import app
from shoal.kvstore.sizes import parse_size
from tests.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("checkpoint")))


def error_of(*command: str) -> str:
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code in (1, 2), result.output
    assert result.exit_code == 2 or result.output.count("\n") == 1, "one line"
    return result.output


def serve(*arguments: str) -> str:
    """The error that `shoal serve` ends with."""
    return error_of("serve", *arguments)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "9999"], "--max-model-len 9999 must be from 1 to the model's own 512"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1, got 0"),
        (["--memory", "lots"], "--memory: 'lots' is not a memory size; write it like 4GiB or 512MiB"),
        (["--block-size", "17"], "--block-size must be a multiple of 16, got 17"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["--max-num-batched-tokens", "8"], "a full decode step would not fit"),
        (["--revision", "main"], "needs a hub id"),
        (["--kv-cache-dtype", "fp8"], "float32"),
        (["--port", "70000"], "--port must be at most 65535, got 70000"),
        (["--kv-store-memory", "some"], "--kv-store-memory: 'some' is not a memory size"),
        (["--kv-write-policy", "sometimes"], "write_through"),
        (["--routing-policy", "magic"], "greedy_prefix"),
        (["--num-dropped-layers", "-1"], "--num-dropped-layers"),
        (["--speculative", "magic"], "ngram"),
        (
            ["--speculative", "ngram", "--num-draft-tokens", "0"],
            "--num-draft-tokens must be at least 1, got 0",
        ),
        (["--speculative", "ngram", "--num-draft-tokens", "449"], "at most max_num_batched_tokens (512)"),
        (["--num-draft-tokens", "4"], "without speculative drafts nothing"),
        (["--num-dropped-layers", "1"], "cannot drop 1 sliding layers"),
        (["--kv-store-memory", "900GiB"], "needs an object store of 1500GiB; /dev/shm has"),
        (["--engines", "0"], "--engines must be at least 1, got 0"),
        (["--ingresses", "0"], "--ingresses must be at least 1, got 0"),
        (["--stop-grace", "soon"], "--stop-grace: 'soon' is not a duration; write it like 30s or 5m"),
        (["--name", "a b"], "--name may have letters"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read (No such file or directory)"),
        (["--port", "65534", "--ingresses", "3"], "--port 65534 leaves no room for 3 ingresses"),
        (["--start-timeout", "0"], "--start-timeout"),
        (["--port", "0", "--ingresses", "30000"], "choose --host or lower --ingresses"),
        (["--api-key", ""], "--api-key must not be empty: say it, or leave it out"),
        (["--admin-key", " "], "--admin-key must not be empty: say it, or leave it out"),
        (["--api-keys", "/nowhere.yaml"], "--api-keys /nowhere.yaml: No such file or directory"),
        (["--ssl-certfile", "/nowhere.pem"], "--ssl-certfile /nowhere.pem: No such file or directory"),
        (["--ssl-keyfile", "/nowhere.pem"], "--ssl-certfile is missing: say it too"),
    ],
)
def test_a_wrong_choice_is_one_line(checkpoint: str, flags: list[str], message: str) -> None:
    assert message in serve(checkpoint, *flags)


def test_a_model_that_is_not_there() -> None:
    assert "/nowhere/at/all is not a directory" in serve("/nowhere/at/all")


def test_a_bench_of_a_model_that_is_not_there() -> None:
    assert "/nowhere/at/all is not a directory" in error_of("bench", "engine", "/nowhere/at/all")


def test_an_unsupported_architecture_is_refused_with_the_list_of_what_is_supported(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OpusForCausalLM"))
    assert "architecture OpusForCausalLM is not supported; supported: LlamaForCausalLM" in serve(
        str(tmp_path)
    )


def test_a_ray_that_does_not_answer(checkpoint: str) -> None:
    message = "no Ray at 127.0.0.1:1 (Connection refused): check --address or RAY_ADDRESS"
    assert message in serve(checkpoint, "--address", "127.0.0.1:1")


def test_a_ray_of_our_own_that_does_not_start(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("\nThe last lines of its log:\nOSError: Address already in use\n12:01 INFO server\n")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", init)
    assert "Ray does not start here (OSError: Address already in use)" in serve(checkpoint)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5G", 3 << 29), ("2 kb", 2048), ("1048576", 1 << 20)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_0_is_a_size_where_none_is_an_answer() -> None:
    assert (parse_size("0", or_none=True), parse_size("2KiB", or_none=True)) == (0, 2048)
    with pytest.raises(ValueError, match="is not a memory size"):
        parse_size("0")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 elephants", "1e9", "0.5", 400 * "9" + "TiB"])
@pytest.mark.parametrize("or_none", [False, True])
def test_what_is_not_a_size(text: str, or_none: bool) -> None:
    with pytest.raises(ValueError, match="is not a memory size"):
        parse_size(text, or_none=or_none)
