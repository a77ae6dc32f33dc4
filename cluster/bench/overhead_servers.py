"""Whoever takes part in `shoal bench overhead`, all up at the same time; whoever is not asked is idle."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.actors.messages import ModelCard
from shoal.cluster.bench.instant_engine import BLOCK_SIZE, FINGERPRINT, front_door
from shoal.cluster.bench.overhead import DIRECT
from shoal.cluster.bench.rust_routers import RouterName, router
from shoal.cluster.bench.server_process import free_port, running
from shoal.cluster.sources.checkpoint import Checkpoint

START_DEADLINE_S = 60.0
MODEL_LEN = 131_072
"""Nothing is computed, so nothing is too long."""


@contextmanager
def started(
    checkpoint: Checkpoint, num_engines: int, routers: Sequence[RouterName], peer_python: Path | None
) -> Iterator[dict[str, str]]:
    """Their URLs by name. Raises PeerError."""
    card = ModelCard(
        name=checkpoint.name,
        checkpoint=str(checkpoint.directory),
        max_model_len=MODEL_LEN,
        block_size=BLOCK_SIZE,
        fingerprint=FINGERPRINT,
    )
    with ExitStack() as stack:
        direct = stack.enter_context(dummy(card.name))
        servers = {DIRECT: direct, "shoal": stack.enter_context(front_door(card, num_engines))}
        for name in routers:
            servers[name.value] = stack.enter_context(router(name, direct, peer_python))
        yield servers


@contextmanager
def dummy(model: str) -> Iterator[str]:
    """Serves a model of that name, and computes nothing."""
    port = free_port()
    command = [sys.executable, "-m", "shoal.cluster.bench.http_dummy", str(port), model]
    url = f"http://127.0.0.1:{port}"
    with running("the server that answers at once", command, url, env=os.environ, within_s=START_DEADLINE_S):
        yield url
