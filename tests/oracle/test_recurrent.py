"""Recurrent models on the library path: transformers' logits within 1e-4, and no state that nobody keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.actors.engine.build import LoadedModel, load_model
from shoal.actors.engine.models import library_state
from shoal.actors.engine.models.choose import PROVEN_IN_LIBRARY
from shoal.actors.engine.models.decoder_config import UnsupportedModel
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.reference import TorchBackend
from tests.checkpoints import tiny_library
from tests.oracle.cuts import RECURRENT
from tests.oracle.stepping import Pages
from tests.oracle.test_library import theirs

BACKEND = CpuBackend(2)
TOKENS = [(7 * i * i + 3 * i) % 500 for i in range(300)]
OTHER = [(11 * i * i + 5 * i + 1) % 500 for i in range(70)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=RECURRENT.values())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_library(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, BACKEND, max_model_len=512)


def pages(loaded: LoadedModel) -> Pages:
    return Pages(loaded, BACKEND, [TOKENS, OTHER])


@torch.inference_mode()
def test_logits_in_every_kind_of_step(checkpoint: Path, loaded: LoadedModel) -> None:
    peer = theirs(checkpoint)
    assert type(peer).__name__ in PROVEN_IN_LIBRARY
    expected, other = (peer(torch.tensor([ids]), use_cache=False).logits[0] for ids in (TOKENS, OTHER))
    for sizes in ((300,), (64, 1, 7, 128), (16,) * 18, (1,) * 20):
        assert (pages(loaded).in_chunks(sizes) - expected).abs().max() < TOLERANCE, sizes

    mixed = pages(loaded)  # a chunk, a prompt and single tokens together
    first, early = mixed.step((0, 0, 100), (1, 0, 69))
    late, second = mixed.step((1, 69, 70), (0, 100, 101))
    (third,) = mixed.step((0, 101, 300))
    assert (torch.cat([first, second, third]) - expected).abs().max() < TOLERANCE
    assert (torch.cat([early, late]) - other).abs().max() < TOLERANCE


@torch.inference_mode()
def test_the_state_within_a_chunk_is_that_of_its_boundary(loaded: LoadedModel) -> None:
    """Captured at each boundary on the way through one chunk; then taken up at each, in a slot of NaN."""
    whole = pages(loaded)
    expected = whole.in_chunks([300])
    for boundary in range(16, 300, 16):
        whole.take_up(0, start=boundary, boundary=boundary)
        (resumed,) = whole.step((0, boundary, min(300, boundary + 40)))
        assert (resumed - expected[boundary : boundary + 40]).abs().max() < TOLERANCE, boundary


@torch.inference_mode()
def test_a_state_that_was_not_restored_is_felt(loaded: LoadedModel) -> None:
    """Else nothing here would show that state is kept."""
    whole = pages(loaded)
    whole.in_chunks([300])
    whole.take_up(0, start=160, boundary=160, without=0)
    (resumed,) = whole.step((0, 160, 200))
    assert resumed.isnan().all()


def test_drafts_and_dropped_layers_are_none_of_theirs(loaded: LoadedModel) -> None:
    layout = loaded.config.layout(block_size=16, dtype="float32", max_model_len=512)
    assert layout.whole_states
    with pytest.raises(ValueError, match="speculative"):
        layout.check_drafts(1)
    with pytest.raises(ValueError, match=r"cannot drop 1 sliding layers: .* 0 have a window"):
        loaded.config.layout(block_size=16, dtype="float32", max_model_len=512, num_dropped_layers=1)


@torch.inference_mode()
def test_without_kernels(tmp_path: Path) -> None:
    checkpoint, backend = tiny_library("Qwen3_5TextConfig", tmp_path), TorchBackend()
    expected = theirs(checkpoint)(torch.tensor([OTHER]), use_cache=False).logits[0]
    ours = Pages(load_model(checkpoint, backend, max_model_len=256), backend, [OTHER]).in_chunks([40, 1])
    assert (ours - expected).abs().max() < TOLERANCE


def test_24_state_that_is_not_what_was_registered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_library("Lfm2Config", tmp_path)
    monkeypatch.setitem(library_state._STATES, "lfm2", lambda hf: ())
    with pytest.raises(UnsupportedModel, match=r"layer 0 keeps .*convolution.*, not "):
        load_model(checkpoint, BACKEND, max_model_len=64)


def test_24_state_that_nobody_registered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP that looks at the token before, as RWKV's does: what it should keep is in no slot."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP  # noqa: PLC0415

    forward: Any = Lfm2MLP.forward

    def shifted(self: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(self, x)
        return y + nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]

    monkeypatch.setattr(Lfm2MLP, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="its logits are off by"):
        load_model(tiny_library("Lfm2Config", tmp_path), BACKEND, max_model_len=64)


def test_a_recurrent_architecture_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 2}'
    )
    with pytest.raises(
        UnsupportedModel, match=r"Mamba2ForCausalLM \(with .*\) is not supported; supported: .*Lfm2"
    ):
        load_model(tmp_path, BACKEND, max_model_len=64)
