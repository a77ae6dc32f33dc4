"""Models that several tests serve, each loaded once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from shoal.actors.engine.build import DEVICE, LoadedModel, load_model
from shoal.actors.engine.models.decoder_config import DecoderConfig, load_config
from shoal.actors.engine.models.lean_decoder import LeanDecoder
from shoal.actors.engine.models.lean_weights import DecoderWeights
from shoal.actors.engine.models.rope import rope_frequencies, rotary_tables
from shoal.kernels.cpu import CpuBackend
from tests.checkpoints import smollm2
from tests.oracle.cuts import SUBJECTS, Subject

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    return load_model(smollm2(), CpuBackend(2), max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def shallow(smol: LoadedModel) -> LoadedModel:
    """Its first layers and its head: as strict where it is served often, since every operation is here, and a
    bit that differs in any layer differs in the logits."""
    assert isinstance(smol.config, DecoderConfig) and isinstance(smol.weights, DecoderWeights)
    weights = replace(smol.weights, layers=smol.weights.layers[:4])
    config = replace(smol.config, num_layers=4, windows=smol.config.windows[:4])
    ropes = rope_frequencies(load_config(smollm2()), MAX_MODEL_LEN, config.head_dim)
    decoder = partial(LeanDecoder, config, weights, rotary_tables(ropes[:4], MAX_MODEL_LEN, DEVICE))
    return replace(smol, config=config, weights=weights, decoder=decoder)


@pytest.fixture(scope="session")
def subject_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: SUBJECTS[name](tmp_path_factory.mktemp(name)))
