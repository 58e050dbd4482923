"""The units of a file made of any pieces, compared with the plain list of its bytes."""

from hypothesis import given
from hypothesis import strategies as st

from fusefs.format.file_segments import FileSegment, FileUnits
from fusefs.format.layout import StripeLayout


@st.composite
def files(draw):
    """Return pieces, and for each byte of the file its piece and its place in that piece's objects."""
    pieces, places = [], []
    for number in range(draw(st.integers(0, 4))):
        size, before = draw(st.integers(0, 20)), draw(st.integers(0, 9))
        piece = FileSegment(
            start=len(places),
            size_bytes=size,
            layout=StripeLayout(draw(st.integers(4, 8)), draw(st.integers(1, 3))),
            key=str(number),
            path_of=str,
            before_bytes=before,
            after_bytes=draw(st.integers(0, 9)),
        )
        pieces.append(piece)
        places += [(piece.key, before + at) for at in range(size)]
    return pieces, places


@given(files(), st.integers(0, 90), st.integers(0, 90))
def test_a_range_is_its_bytes_in_order_each_in_the_unit_where_it_lies(made, offset, size):
    pieces, places = made
    units = FileUnits(pieces)

    found = [
        (piece.key, unit * piece.layout.unit_bytes + byte)
        for piece, unit, start, count in units.of(offset, size)
        for byte in range(start, start + count)
    ]

    assert found == places[offset : offset + size]
    assert units.size_bytes == len(places)


@given(files())
def test_all_units_are_those_of_each_piece_and_none_comes_twice_in_a_row(made):
    pieces, _ = made

    found = [(piece.key, unit) for piece, unit, _, _ in FileUnits(pieces).all()]

    assert found == [
        (piece.key, unit) for piece in pieces if piece.size_bytes for unit in piece.units
    ]
