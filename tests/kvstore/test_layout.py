"""Where parts lie in the bytes of a block, a slot and a segment."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.kvstore.layout import Packing, Part, PartDtype

ROWS = Part(name="rows", shape=(2, 3), dtype="float32")
OTHERS = Part(name="others", shape=(5,), dtype="uint8")
DTYPES: dict[PartDtype, int] = {"float32": 4, "bfloat16": 2, "uint8": 1}


def test_parts_of_one_kind_are_neighbours_and_another_kind_is_aligned() -> None:
    packing = Packing.of([(0, ROWS), (2, ROWS), (1, OTHERS), (2, OTHERS)])
    assert [placed.offset for placed in packing.parts] == [0, 24, 64, 69]
    assert packing.num_bytes == 128, "so that the next piece's parts are aligned too"


def test_one_kind_takes_no_byte_more() -> None:
    assert Packing.of([(0, OTHERS), (1, OTHERS)]).num_bytes == 10
    assert Packing.of([]).num_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 40), st.sampled_from(list(DTYPES)))
    )
)
def test_no_two_parts_overlap(chosen: list[tuple[int, str, int, PartDtype]]) -> None:
    parts = [(layer, Part(name=name, shape=(size,), dtype=dtype)) for layer, name, size, dtype in chosen]
    packing = Packing.of(parts)
    assert [(placed.layer, placed.part) for placed in packing.parts] == parts
    end = 0
    for placed in packing.parts:
        assert placed.offset >= end and placed.offset % DTYPES[placed.part.dtype] == 0
        end = placed.end
    assert end <= packing.num_bytes < end + 64
    kinds = {placed.part for placed in packing.parts}
    assert len(kinds) < 2 or packing.num_bytes % 64 == 0
