"""A Ray on this machine whose autoscaler adds and removes nodes: each is a raylet here."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

HEAD_ID = "f" * 51 + "00000"
"""The fake provider takes this node for the head."""

START_DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


class Nodes(FakeMultiNodeProvider):
    """Those of Ray's tests, which refuse to be told their memory: they take the machine's."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, float], labels: Any
    ) -> None:
        told = {name: amount for name, amount in resources.items() if name != "memory"}
        create: Any = super().create_node_with_resources_and_labels
        create(node_config, tags, count, told, labels)


@contextmanager
def growing_ray(worker: Mapping[str, float], *, max_workers: int, idle_s: float) -> Iterator[str]:
    """A head that hosts no engines, and no more than so many workers with these resources, each as long as
    something wants it; yields its address. Ray's own AutoscalingCluster needs a file that its wheel lacks."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))  # Ray's socket paths must be short
    port = _free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"  # type: ignore[no-untyped-call]
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(_config(address, worker, max_workers, idle_s)))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
    command += [f"--autoscaling-config={config}", f"--temp-dir={folder}", "--num-cpus=0"]
    command += ["--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats"]
    command += [
        f"--{name}={_free_port()}" for name in ("ray-client-server-port", "dashboard-agent-listen-port")
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / '.src'}",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    try:
        subprocess.run(
            command, env=environment, check=True, timeout=START_DEADLINE_S, stdout=subprocess.DEVNULL
        )
        yield address
    finally:
        ray.shutdown()
        _end_all(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _config(address: str, worker: Mapping[str, float], max_workers: int, idle_s: float) -> dict[str, Any]:
    return {
        "cluster_name": "growing",
        "max_workers": max_workers,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",
            "module": f"{__name__}.Nodes",
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": dict(worker),
                "node_config": {},
                "min_workers": 0,
                "max_workers": max_workers,
            },
        },
        "head_node_type": "ray.head.default",
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{
            name: []
            for name in (
                "initialization_commands",
                "setup_commands",
                "head_setup_commands",
                "worker_setup_commands",
                "head_start_ray_commands",
                "worker_start_ray_commands",
                "cluster_synced_files",
                "rsync_exclude",
                "rsync_filter",
            )
        },
        "file_mounts_sync_continuously": False,
    }


def _free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_all(folder: str) -> None:
    """Every process of it names its folder. `ray stop` would end others' too."""
    ours = [p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(ours, timeout=10)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
