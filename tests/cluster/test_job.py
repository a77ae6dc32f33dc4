"""A Ray job that serves from a clone, on a node that has Ray and the dependencies but not shoal."""

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

from tests.cluster.served import ROOT, wait_for

SUBMISSION = "serve"


@dataclass(frozen=True, kw_only=True)
class Node:
    python: Path
    url: str
    """Of its dashboard, which takes jobs."""
    environment: dict[str, str]

    def submit(self, command: str) -> None:
        """As a person does, from the clone. Built kernels go along: another test builds them."""
        ray = [str(self.python), "-m", "ray.scripts.scripts", "job", "submit", "--address", self.url]
        options = ["--no-wait", "--submission-id", SUBMISSION, "--working-dir", "."]
        options += ["--runtime-env", "configs/ray-job.yaml", "--", *command.split()]
        environment = self.environment | {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1"}
        subprocess.run([*ray, *options], cwd=ROOT, env=environment, check=True, capture_output=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """The head of a Ray that nobody else finds, run by an interpreter that cannot import shoal.

    An editable install is found through a .pth file, and such files count only where site-packages are.
    """
    venv.create(tmp_path / "bare")
    (site,) = (tmp_path / "bare").glob("lib/python3.*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "bare" / "bin" / "python"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")
    }
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    lacks = subprocess.run(
        [python, "-c", "import ray, shoal"], env=environment, capture_output=True, check=False
    )
    assert b"No module named 'shoal'" in lacks.stderr
    directory = tempfile.mkdtemp(prefix="shoal-job-", dir="/tmp")  # Ray's socket paths must be short
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        str(python),
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--temp-dir",
        directory,
    ]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--num-cpus=4", f"--object-store-memory={200 << 20}", "--disable-usage-stats"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{ports['dashboard-port']}"
        wait_for(
            lambda: process.poll() is None and answers(f"{url}/api/version"), "Ray takes jobs", within_s=90
        )
        yield Node(python=python, url=url, environment=environment)
    finally:
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [int(probe.getsockname()[1]) for probe in probes]


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def alive(node: Node) -> list[str | None]:
    return [actor.name for actor in list_actors(address=node.url) if actor.state != "DEAD"]


def test_56_a_job_that_is_stopped_cuts_no_stream_and_leaves_nothing(node: Node, checkpoint: Path) -> None:
    node.submit(
        f"python -m shoal.cluster serve --config configs/laptop.yaml {checkpoint} --port 0 --stop-grace 30s "
        "--threads 1 --memory 300MiB --max-model-len 4096 --kv-store-memory 32MiB --require-kernels"
    )
    jobs = JobSubmissionClient(node.url)

    def printed() -> str:
        logs = str(jobs.get_job_logs(SUBMISSION))
        assert not jobs.get_job_status(SUBMISSION).is_terminal(), logs
        return logs if "\nready: " in logs else ""

    logs = wait_for(printed, "the ready line", within_s=120)
    (url,) = [line.removeprefix("ready: ") for line in logs.splitlines() if line.startswith("ready: ")]
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as client:
        wait_for(lambda: answers(url.replace("/v1", "/ready")), "it can place requests")
        body = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{url}/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            stopping = pool.submit(jobs.stop_job, SUBMISSION)
            events = [first, *(line for line in lines if line)]
        stopping.result()
    assert events[-1] == "data: [DONE]", events[-1]
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: jobs.get_job_status(SUBMISSION) == JobStatus.STOPPED, "the job has ended")
    assert "\nstopping" in jobs.get_job_logs(SUBMISSION), "by itself"
    wait_for(lambda: not alive(node), "no actor is left, Ray's own for the job neither")
