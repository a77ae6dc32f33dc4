"""A prefix is a hit wherever it was computed: tiny models, every cut. See cuts.py for the others."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.oracle.cuts import RECURRENT, Cuts, Place, Subject, assert_every_cut_is_right


@pytest.fixture(scope="module", params=["mistral-8", "mistral-64", "gemma3", "gpt-oss"])
def subject(request: pytest.FixtureRequest, subject_named: Callable[[str], Subject]) -> Subject:
    return subject_named(request.param)


@pytest.mark.parametrize("num_dropped", [0, 2])
def test_every_cut_has_the_bits_of_a_cold_machine(subject: Subject, num_dropped: int) -> None:
    assert_every_cut_is_right(replace(subject, num_dropped=num_dropped))


@pytest.mark.parametrize("name", RECURRENT)
def test_every_cut_of_a_recurrent_model_has_the_logits_of_a_cold_machine(
    name: str, subject_named: Callable[[str], Subject]
) -> None:
    """Within the tolerance of the library path. What is taken up as state has each of its bits."""
    assert_every_cut_is_right(subject_named(name))


@pytest.mark.parametrize("every", [0, 3])
def test_fewer_snapshots_make_hits_shorter_and_never_wrong(
    every: int, subject_named: Callable[[str], Subject]
) -> None:
    """Each prompt fills no last block, and leaves its end's state behind, one block before the next one's."""
    subject = replace(subject_named("qwen3.5"), snapshot_every=every)
    lengths = [32 * i + 31 for i in range(1, subject.num_blocks + 1)]
    for place in (Place.DEVICE, Place.BESIDE_OTHERS):
        for i, cut in enumerate(Cuts(subject).of(place, lengths), start=1):
            has_snapshot = i == subject.num_blocks or (every and i % every == 0)
            assert cut.num_cached == 32 * (i if has_snapshot else i - 1)
            assert not cut.wrong
