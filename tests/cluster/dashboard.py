"""Every panel of the dashboard has data: `python -m tests.cluster.dashboard`.

A cluster of two engines under some load, one of which is killed; a real Prometheus scrapes Ray's nodes, by
Ray's own discovery file, and the ingress; then each panel's queries are asked. Ends with 1 if one of them
has no data, if what has happened is not counted, or if what Ray shows is not what is documented.

Prometheus is Debian's package: `apt-get install prometheus`.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray

from shoal.cluster.bench.server_process import free_port
from tests.checkpoints import tiny_llama
from tests.cluster.served import ROOT, Served, wait_for
from tests.exported_metrics import Described, by_vllms_names, told_to_ray

SCRAPE_S = 2
WINDOW = "1m"
LOAD_S = 45.0
DASHBOARD = ROOT / "configs" / "grafana" / "shoal.json"
LARGER: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}
"""Than other tests' model, whose prompts are sooner computed than fetched."""

VARIABLES = {"$__rate_interval": WINDOW, "$model": ".*", "$engine": ".*"}


@contextmanager
def ray_with_a_dashboard() -> Iterator[tuple[str, Path]]:
    """Its address, and the file that names its nodes to Prometheus: only a dashboard writes that."""
    os.environ["PYTHONPATH"] = str(ROOT / ".src")
    directory = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))
    try:
        context = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=True,
            dashboard_port=free_port(),
            object_store_memory=400 << 20,
            log_to_driver=False,
            _temp_dir=str(directory),
        )
        print(f"Ray's dashboard: http://{context.dashboard_url}", flush=True)
        yield ray.get_runtime_context().gcs_address, directory / "prom_metrics_service_discovery.json"
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def prometheus(discovery: Path, ingress_url: str) -> Iterator[httpx.Client]:
    directory = Path(tempfile.mkdtemp(prefix="shoal-prometheus-"))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)]}]},
            {
                "job_name": "shoal",
                "static_configs": [{"targets": [ingress_url.removeprefix("http://")]}],
            },
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # YAML is a superset of it
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml"]
    command += [f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=10) as client:
            wait_for(lambda: _is_up(client), "both of Prometheus's targets are up")
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(directory)


def _is_up(client: httpx.Client) -> bool:
    try:
        targets = client.get("targets").json()["data"]["activeTargets"]
    except (httpx.TransportError, ValueError):
        return False
    return {target["labels"]["job"] for target in targets if target["health"] == "up"} == {"ray", "shoal"}


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    answer = client.get("query", params={"query": query}).json()
    if answer["status"] != "success":
        raise ValueError(f"{query}: {answer['error']}")
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def drive(served: Served, seconds: float) -> int:
    """Conversations that share their beginnings, of several clients at once; how many were answered.

    In their midst an engine is killed: they go on on the other one, and its successor fetches what it needs.
    """
    until, num_answered, lock = time.monotonic() + seconds, 0, threading.Lock()
    killing = threading.Timer(
        seconds / 4, lambda: os.kill(served.pid(served.engine_names()[0]), signal.SIGKILL)
    )
    killing.start()

    def converse(client: int) -> None:
        nonlocal num_answered
        with httpx.Client(base_url=served.url, timeout=60) as http:
            for turn in range(10_000):
                if time.monotonic() > until:
                    return
                prompt = f"{client % 3} " * 600 + "the quick brown fox " * (1 + turn % 5)
                body = {"prompt": prompt, "max_tokens": 400 if client % 2 else 24, "stream": turn % 2 == 0}
                assert http.post("/v1/completions", json=body).status_code == 200
                if turn % 10 == 9:
                    assert http.post("/v1/completions", json={"prompt": 7}).status_code == 400
                with lock:
                    num_answered += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(converse, range(8)))
    killing.join()
    return num_answered


def without_data(client: httpx.Client, cluster: str) -> list[str]:
    """Asks everything that the dashboard asks, and says what came."""
    board, failures = json.loads(DASHBOARD.read_text()), []
    for panel in board["panels"]:
        if panel["type"] == "row":
            print(f"\n{panel['title']}")
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$cluster", cluster)
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            series = ask(client, query)
            values = [float(one["value"][1]) for one in series]
            shown = ", ".join(f"{value:.3g}" for value in values[:6])
            print(f"  {panel['title']} [{target['legendFormat']}]: {len(series)} series: {shown}")
            if all(map(math.isnan, values)):
                failures.append(f"{panel['title']}: no data for {query}")
    return failures


def unseen(client: httpx.Client, cluster: str) -> list[str]:
    """What has happened, and is not counted."""
    happened = {
        "the engine that was killed": 'ray_shoal_restarts_total{role="engine", %s}',
        "an answer that went on": "ray_shoal_continuations_total{%s}",
        "its prefix, computed again": "ray_shoal_recomputed_tokens_total{%s}",
        "a prefix that the next engine fetched": "ray_shoal_kv_fetches_total{%s}",
        "a request that was refused": 'ray_shoal_requests_total{outcome="refused", %s}',
        "an answer": "vllm:generation_tokens_total",
    }
    where = f'shoal_cluster="{cluster}"'
    queries = {what: f"sum({name % where if '%' in name else name}) > 0" for what, name in happened.items()}
    return [f"{what} is not seen: {query}" for what, query in queries.items() if not ask(client, query)]


def names_that_differ(client: httpx.Client, cluster: str) -> list[str]:
    """Between what was scraped and what is documented."""
    scraped = {
        one["metric"]["__name__"]
        for one in ask(client, f'group by (__name__) ({{shoal_cluster="{cluster}", job="ray"}})')
    }
    theirs = {name for family in by_vllms_names() for name in Described.of(family).series}
    at_ingress = {one["metric"]["__name__"] for one in ask(client, 'group by (__name__) ({job="shoal"})')}
    return [
        *(f"Ray shows {name}, which nobody documented" for name in sorted(scraped - told_to_ray())),
        *(f"Ray does not show {name}" for name in sorted(told_to_ray() - scraped)),
        *(f"the ingress does not show {name}" for name in sorted(theirs - at_ingress)),
    ]


def told_twice(client: httpx.Client, cluster: str) -> list[str]:
    """One process, one endpoint: the same series of two workers would be counted twice."""
    query = f'count by (process) (group by (process, WorkerId) ({{shoal_cluster="{cluster}"}})) > 1'
    return [f"{one['metric']['process']} is told by several workers" for one in ask(client, query)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LOAD_S, help="of load")
    parser.add_argument("--stay", action="store_true", help="serve on until Enter is pressed")
    args = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("error: no prometheus on PATH: apt-get install prometheus", file=sys.stderr)
        return 2
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_with_a_dashboard() as (address, discovery),
        Served.start(
            tiny_llama(Path(folder), max_position_embeddings=4096, **LARGER), address, engines=2
        ) as served,
    ):
        served.wait_until_ready()
        wait_for(discovery.exists, "Ray's discovery file")
        with prometheus(discovery, served.url) as client:
            print(f"{drive(served, args.seconds)} requests answered", flush=True)
            failures = without_data(client, served.name)
            failures += unseen(client, served.name)
            failures += names_that_differ(client, served.name) + told_twice(client, served.name)
            print()
            for failure in failures:
                print(failure)
            print(f"{len(failures)} failures", flush=True)
            if args.stay:
                print(f"Prometheus: {client.base_url}, ingress: {served.url}; Enter ends all", flush=True)
                sys.stdin.readline()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
