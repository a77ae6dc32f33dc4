"""A prefix is a hit wherever it was computed: tiny models, every cut. See cuts.py for the others."""

from dataclasses import replace

import pytest

from tests.oracle.cuts import SUBJECTS, Cuts, Place, Subject


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
