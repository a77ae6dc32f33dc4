"""Where a prefix can be taken up: worked examples, then the rule's own words against its one pass."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kvstore.boundary import BoundaryRule, Resume


def test_blocks_alone_are_enough_without_sliding_layers() -> None:
    assert BoundaryRule().furthest(5, lambda i: False) == Resume(boundary=5, start=5)
    assert BoundaryRule().furthest(0, lambda i: False) == Resume()


def test_a_boundary_needs_the_segments_before_it() -> None:
    rule = BoundaryRule(num_segments=2)
    assert rule.furthest(5, {1, 2, 4}.__contains__) == Resume(boundary=3, start=3)
    assert rule.furthest(5, {0}.__contains__) == Resume(boundary=1, start=1), "fewer are there"
    assert rule.furthest(5, {1, 3}.__contains__) == Resume()


def test_layers_that_are_not_stored_are_recomputed_from_the_state_before() -> None:
    rule = BoundaryRule(num_segments=1, num_recomputed=2)
    assert rule.furthest(6, {1, 2}.__contains__) == Resume(boundary=5, start=3)
    assert rule.furthest(2, {0, 1}.__contains__) == Resume(), "from the start all is computed anyway"


def test_what_state_is_made_of_may_be_computed_again_from_before_the_start() -> None:
    rule = BoundaryRule(num_segments=1, num_rewound=4)
    assert rule.furthest(2, {1}.__contains__) == Resume(boundary=2, start=2)
    assert rule.first_token(Resume(boundary=2, start=2), 16) == 28
    assert rule.first_token(Resume(), 16) == 0, "there is nothing before"
    assert rule.recomputed_tokens(16) == 4
    assert BoundaryRule(num_segments=1, num_recomputed=2, num_rewound=4).recomputed_tokens(16) == 36


@settings(deadline=None)
@given(st.integers(0, 8), st.integers(0, 4), st.integers(0, 4), st.sets(st.integers(0, 7)))
def test_no_boundary_beyond_has_all_that_it_needs(
    num_blocks: int, num_segments: int, num_recomputed: int, segments: set[int]
) -> None:
    rule = BoundaryRule(num_segments=num_segments, num_recomputed=num_recomputed)
    found = rule.furthest(num_blocks, segments.__contains__)
    usable = [
        start
        for start in range(1, num_blocks - num_recomputed + 1)
        if segments.issuperset(rule.segments_at(start))
    ]
    start = max(usable, default=0)
    assert found == Resume(boundary=start + num_recomputed if start else 0, start=start)
