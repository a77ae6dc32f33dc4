"""A private Ray for the whole folder, and clusters started in it the way a person starts them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.checkpoints import tiny_llama
from tests.cluster.served import ROOT, Served

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token under the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    os.environ["PYTHONPATH"] = str(ROOT / ".src")  # for Ray's workers, where shoal is not installed
    directory = tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp")  # Ray's socket paths must be short
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        _temp_dir=directory,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def served(ray_address: str, checkpoint: Path) -> Iterator[Served]:
    """Two engines, shared by a module's tests; each leaves it as ready as it found it.

    Without stores, so that what an engine has computed dies with it.
    """
    with Served.start(checkpoint, ray_address, "--kv-store-memory", "0", engines=2) as cluster:
        cluster.wait_until_ready()
        yield cluster
