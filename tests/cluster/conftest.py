"""A private Ray for the whole folder, and clusters started in it the way a person starts them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import tiny_llama
from tests.cluster.served import Served, private_ray


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    with private_ray() as address:
        yield address


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
