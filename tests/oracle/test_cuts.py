"""A prefix is a hit wherever it was computed: tiny models, every cut. See cuts.py for the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.cuts import RECURRENT, SUBJECTS, Cuts, Place, Subject


@pytest.fixture(scope="module", params=["mistral-8", "mistral-64", "gemma3", "gpt-oss"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return SUBJECTS[request.param](tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("num_dropped", [0, 2])
def test_every_cut_has_the_bits_of_a_cold_machine(subject: Subject, num_dropped: int) -> None:
    cuts = Cuts(replace(subject, num_dropped=num_dropped))
    for place in Place:
        done = list(cuts.of(place))
        assert len(done) == subject.num_blocks
        assert [cut for cut in done if not cut.right] == [], place


@pytest.mark.parametrize("name", RECURRENT)
def test_every_cut_of_a_recurrent_model_has_the_logits_of_a_cold_machine(name: str, tmp_path: Path) -> None:
    """Within the tolerance of the library path. What is taken up as state has each of its bits."""
    subject = SUBJECTS[name](tmp_path)
    cuts = Cuts(subject)
    for place in Place:
        done = list(cuts.of(place))
        assert len(done) == subject.num_blocks
        assert [cut for cut in done if not cut.right] == [], place


@pytest.mark.parametrize("every", [0, 3])
def test_fewer_snapshots_make_hits_shorter_and_never_wrong(every: int, tmp_path: Path) -> None:
    """Each prompt fills no last block, and leaves its end's state behind, one block before the next one's."""
    subject = replace(SUBJECTS["qwen3.5"](tmp_path), snapshot_every=every)
    lengths = [32 * i + 31 for i in range(1, subject.num_blocks + 1)]
    for place in (Place.DEVICE, Place.BESIDE_OTHERS):
        for i, cut in enumerate(Cuts(subject).of(place, lengths), start=1):
            has_snapshot = i == subject.num_blocks or (every and i % every == 0)
            assert cut.num_cached == 32 * (i if has_snapshot else i - 1)
            assert not cut.wrong
