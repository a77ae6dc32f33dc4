"""From a configuration to an engine, on a tiny model."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.actors.engine import build
from shoal.actors.engine import fingerprint as fingerprints
from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.fingerprint import digest_content, digest_weights, fingerprint
from shoal.actors.engine.memory_plan import NotEnoughMemory
from shoal.actors.engine.models.decoder_config import load_config
from shoal.actors.engine.runner import ModelRunner, TokenRows
from shoal.actors.messages import (
    CachedTokens,
    EngineRequest,
    FinishReason,
    IngressId,
    RequestId,
    SamplingParams,
    TokenChunk,
)
from shoal.cluster.footprint import Limits, footprint
from shoal.kernels.backend import LayerKV
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.library import KernelsUnavailable
from shoal.kvstore.boundary import BoundaryRule
from tests.checkpoints import tiny_deepseek_v4, tiny_library, tiny_llama, tiny_mistral

MIB = 1 << 20


def a_config(checkpoint: Path, **changes: int | bool | str) -> EngineConfig:
    numbers = {"max_model_len": 256, "memory_bytes": 64 * MIB, "threads": 1, "block_size": 16}
    return EngineConfig(checkpoint=str(checkpoint), **{**numbers, **changes})  # type: ignore[arg-type]


def test_an_engine_is_built_within_its_memory_and_serves(tmp_path: Path) -> None:
    built = build.build_engine(a_config(tiny_llama(tmp_path), max_num_seqs=4))
    memory = built.memory
    assert memory.block_bytes == 16 * 2 * 2 * 2 * 16 * 4, "16 tokens, 2 layers, K and V, 2 heads of 16 floats"
    used_bytes = memory.weights_bytes + memory.step_peak_bytes
    assert used_bytes > 0
    assert 64 * MIB - 8192 < used_bytes + memory.num_blocks * memory.block_bytes <= 64 * MIB
    assert built.largest_step_s > 0

    assert serve(built, (3, 4, 5), 2)[-1].finish_reason is FinishReason.LENGTH


def serve(built: build.BuiltEngine, prompt: tuple[int, ...], max_tokens: int) -> list[TokenChunk]:
    request = EngineRequest(
        request_id=RequestId("r"),
        attempt=1,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        sampling=SamplingParams(temperature=0.0),
    )
    built.engine.submit([request], IngressId("i"))
    replies = []
    while built.engine.has_work:
        replies += [reply.chunk for reply in built.engine.step()]
    assert [chunk.finish_reason for chunk in replies[:-1]] == [None] * (max_tokens - 1)
    built.engine.check()
    return replies


def test_an_engine_of_deepseek_v4_takes_up_what_it_has_kept(tmp_path: Path) -> None:
    built = build.build_engine(a_config(tiny_deepseek_v4(tmp_path), block_size=32, max_num_seqs=4))
    slot, segment = built.layout.slots.num_bytes, built.layout.segments.num_bytes
    assert built.memory.state_bytes == 2 * 5 * slot and built.memory.segment_bytes == segment == 4 * 19 * 128
    prompt = tuple(range(3, 103))
    cold, hit = (serve(built, prompt, 8) for _ in range(2))
    assert [chunk.token_ids for chunk in cold] == [chunk.token_ids for chunk in hit]
    assert [chunks[0].cached_tokens for chunks in (cold, hit)] == [
        CachedTokens(),
        CachedTokens(device=96 - 4),
    ]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose tokens see 24 positions."""
    return tiny_mistral(tmp_path_factory.mktemp("mistral"))


def test_an_engine_with_rings_has_slots_and_segments_within_its_memory(windowed: Path) -> None:
    built = build.build_engine(a_config(windowed, max_num_seqs=4, num_dropped_layers=1))
    memory, layout = built.memory, built.layout
    assert layout.rings is not None and layout.rings.num_layers == 2
    assert layout.rule == BoundaryRule(num_segments=2, num_recomputed=2)
    row = 2 * 2 * 16 * 4  # K and V, 2 heads of 16 floats
    assert memory.state_bytes == 2 * 5 * 2 * 24 * row, "staging too, floor(1.2 * 4) + 1 slots, 2 rings of 24"
    assert (memory.block_bytes, memory.segment_bytes) == (0, 1 * 16 * row), "one layer is stored"
    used_bytes = memory.weights_bytes + memory.step_peak_bytes + memory.state_bytes
    assert (
        64 * MIB - memory.segment_bytes < used_bytes + memory.num_segments * memory.segment_bytes <= 64 * MIB
    )
    assert memory.num_blocks == memory.num_segments, "a block is only a number, and each may have a segment"
    for part, count in ((built.device.slots, 5), (built.device.segments, memory.num_segments)):
        assert part is not None and len(part) == count


def test_what_is_in_blocks_and_segments_is_named_by_the_fingerprint(windowed: Path) -> None:
    """Engines with other layers in rings, or with fewer stored, cannot read each other's bytes."""
    roots = {
        build.build_engine(a_config(windowed, **changes)).fingerprint
        for changes in ({}, {"num_dropped_layers": 1}, {"max_model_len": 24})
    }
    assert len(roots) == 3


def test_more_dropped_layers_than_a_model_has_are_refused(windowed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot drop 3 sliding layers: of the model's 2 layers, 2 have"):
        build.build_engine(a_config(windowed, num_dropped_layers=3))
    with pytest.raises(ValueError, match=r"cannot drop 1 sliding layers: .* 0 have .* max_model_len 256"):
        build.build_engine(a_config(tiny_llama(tmp_path), num_dropped_layers=1))


def test_82_an_engine_that_could_not_hold_one_sequence_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="one sequence of max_model_len 256 needs 16 KV blocks of 8KiB"):
        build.build_engine(a_config(tiny_llama(tmp_path), memory_bytes=100_000))


def test_without_kernels_an_engine_that_requires_them_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(threads: int, *, require_kernels: bool) -> None:
        raise KernelsUnavailable("no C++ compiler")

    monkeypatch.setattr(build, "choose_backend", unavailable)
    with pytest.raises(ValueError, match="--require-kernels, but no C\\+\\+ compiler"):
        build.build_engine(a_config(tmp_path, require_kernels=True))


@pytest.mark.parametrize(
    ("name", "least"), [("max_model_len", 2), ("memory_bytes", 1), ("threads", 1), ("num_dropped_layers", 0)]
)
def test_least_values(tmp_path: Path, name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {least}"):
        a_config(tmp_path, **{name: least - 1})


def test_a_fingerprint_names_all_that_keys_and_values_depend_on(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    here = fingerprint(config, numerics_id="n", content=b"c")
    same = replace(config, checkpoint="elsewhere", threads=2, max_model_len=128, memory_bytes=1)
    assert here == fingerprint(same, numerics_id="n", content=b"c")
    different = [
        fingerprint(config, numerics_id="m", content=b"c"),
        fingerprint(config, numerics_id="n", content=b"d"),
        fingerprint(replace(config, block_size=32), numerics_id="n", content=b"c"),
        fingerprint(replace(config, kv_cache_dtype="bfloat16"), numerics_id="n", content=b"c"),
    ]
    assert len({here, *different}) == 1 + len(different)


def test_content_is_weights_and_configuration_wherever_they_are(tmp_path: Path) -> None:
    checkpoint, other = tiny_llama(tmp_path / "a"), tiny_llama(tmp_path / "b", seed=1)
    config = a_config(checkpoint)
    here = digest_content(config)
    assert here == digest_content(a_config(tiny_llama(tmp_path / "copy")))
    different = [
        digest_content(a_config(other)),
        digest_content(a_config(tiny_llama(tmp_path / "c", rope_theta=1e5))),
    ]
    assert len({here, *different}) == 1 + len(different)
    assert here == digest_content(config, digest_weights(config)), "asked beforehand"


def test_a_digest_of_weights_that_have_changed_since_is_made_anew(tmp_path: Path) -> None:
    checkpoint, other = tiny_llama(tmp_path / "a"), tiny_llama(tmp_path / "b", seed=1)
    weights, elsewhere = checkpoint / "model.safetensors", tmp_path / "model.safetensors"
    config = a_config(checkpoint)
    here, there = digest_content(config), digest_content(a_config(other))
    weights.rename(elsewhere)
    nothing = digest_weights(config)
    elsewhere.rename(weights)
    assert digest_content(config, nothing) == here, "they have come since"
    old = digest_weights(config)
    (other / "model.safetensors").replace(weights)
    assert digest_content(config, old) == there, "they were replaced"


def test_weights_are_digested_in_pieces_of_a_fixed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read at a time: else a fingerprint would change with it."""
    monkeypatch.setattr(fingerprints, "_PIECE_BYTES", 5)
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 2)
    (tmp_path / "model.safetensors").write_bytes(b"0123456789ab")
    assert digest_weights(a_config(tmp_path)).pieces == tuple(
        sha256(piece).digest() for piece in (b"01234", b"56789", b"ab")
    )


@pytest.mark.parametrize(
    ("windows", "num"),
    [((None, None, None), 1), ((24, 24, None, 24), 3), ((None, 24), 2)],
    ids=["one kind", "gemma", "the last is another"],
)
def test_a_rehearsal_has_a_layer_of_each_kind(windows: tuple[int | None, ...], num: int) -> None:
    assert build._num_of_each_kind(windows) == num


def test_a_rehearsal_computes_its_layers_as_the_model_does(tmp_path: Path) -> None:
    checkpoint, backend = tiny_llama(tmp_path), CpuBackend(1)
    loaded = build.load_model(checkpoint, backend, max_model_len=32)
    layout = loaded.config.layout(block_size=16, dtype="float32", max_model_len=32)
    plan = build._rehearsal(a_config(checkpoint, max_model_len=32), [(0, 5)])

    def rows_written(num_layers: int) -> Tensor:
        memory = DeviceMemory(layout, num_blocks=1, max_rows=8, device=build.DEVICE)
        memory.blocks.zero_()
        runner = ModelRunner(
            loaded.decoder(backend, max_rows=8, max_logits=1),
            memory,
            TokenRows(num_rows=2, max_model_len=32, block_size=16, device=build.DEVICE),
            backend,
            build.DEVICE,
            max_logits=1,
            vocab_size=512,
            num_layers=num_layers,
        )
        runner.prepare(plan)()
        return torch.stack([layer.k_PBHD for layer in memory.layers if isinstance(layer, LayerKV)])

    one, both = rows_written(1), rows_written(2)
    assert torch.equal(one[0], both[0]) and one[0].any()
    assert both[1].any() and not one[1].any(), "and computes no others"


def test_a_build_says_what_took_how_long(tmp_path: Path) -> None:
    built = build.build_engine(a_config(tiny_llama(tmp_path)))
    assert [phase for phase, _ in built.took_s] == ["weights", "fingerprint", "rehearsal", "pools"]


def test_an_engine_that_drafts_has_room_for_it_and_takes_up_what_one_that_does_not_has_stored(
    windowed: Path,
) -> None:
    plain = build.build_engine(a_config(windowed, max_num_seqs=4))
    drafting = build.build_engine(a_config(windowed, max_num_seqs=4, speculative="ngram", num_draft_tokens=3))
    row = 2 * 2 * 16 * 4
    assert drafting.memory.state_bytes - plain.memory.state_bytes == 2 * 5 * 2 * 3 * row, "rings are longer"
    assert drafting.memory.segment_bytes == plain.memory.segment_bytes
    assert drafting.fingerprint == plain.fingerprint

    request = EngineRequest(
        request_id=RequestId("r"),
        attempt=1,
        prompt_token_ids=(3, 4, 5) * 6,
        max_tokens=60,
        stop_token_ids=frozenset(),
        sampling=SamplingParams(temperature=0.7, seed=1, logit_bias=((7, 8.0),)),
    )
    answers: list[list[int]] = []
    for built in (plain, drafting):
        built.engine.submit([request], IngressId("i"))
        answers.append([])
        while built.engine.has_work:
            answers[-1] += [token for reply in built.engine.step() for token in reply.chunk.token_ids]
    assert answers[0] == answers[1]
    assert drafting.scheduler.draft_counts().num_accepted > 10, "it often says 7"
    assert plain.scheduler.draft_counts().num_drafts == 0


def test_a_model_that_cannot_take_drafts_back_refuses_them(tmp_path: Path) -> None:
    checkpoint = tiny_library("Lfm2Config", tmp_path)
    with pytest.raises(ValueError, match="speculative: the model's recurrent layers"):
        build.build_engine(a_config(checkpoint, speculative="ngram"))
    with pytest.raises(ValueError, match="speculative: the model's recurrent layers"):
        footprint(load_config(checkpoint), Limits(max_model_len=64, block_size=16, num_draft_tokens=5))
