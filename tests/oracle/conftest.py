"""The real model, loaded once."""

import pytest

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import smollm2


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    return load_model(smollm2(), CpuBackend(2), max_model_len=2048)
