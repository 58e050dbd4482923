"""Images of cells: what Arrow shows as values of Python, without what stands beside the bytes."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.formats.format import Records
from omniload.source.parsing.image_cells import ENCODED, ENCODED_SIZES, with_images

IMAGES = st.none() | st.sampled_from([b"", b"one", b"two and more"])
OBJECTS = st.none() | st.fixed_dictionaries({"bytes": IMAGES, "path": st.none() | st.just("a")})
OBJECT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def images_in(column):
    """Return the images of each row, by the two columns that a block keeps."""
    records = with_images(Records.of_texts([""] * len(column)), column)
    data, sizes = records.others[ENCODED], records.others[ENCODED_SIZES]
    found = []
    for row in range(len(column)):
        ends = np.cumsum(sizes[row]).tolist()
        bounds = zip([0, *ends], ends, strict=False)
        found.append([data[row].tobytes()[start:stop] for start, stop in bounds])
    return found


def plainly(cell):
    cells = cell if isinstance(cell, list) else [cell]
    images = [each["bytes"] if isinstance(each, dict) else each for each in cells]
    return [image for image in images if image]


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (pa.binary(), IMAGES),
        (OBJECT, OBJECTS),
        (pa.list_(pa.large_binary()), st.none() | st.lists(IMAGES, max_size=3)),
        (pa.list_(OBJECT), st.none() | st.lists(OBJECTS, max_size=3)),
        (pa.list_(OBJECT, 2), st.none() | st.lists(OBJECTS, min_size=2, max_size=2)),
    ],
)
@given(data=st.data())
def test_images_are_what_a_cell_holds_wherever_an_array_was_cut(kind, cells, data):
    rows = data.draw(st.lists(cells, max_size=8))
    cut = data.draw(st.integers(0, len(rows)))
    whole = pa.array(rows, kind)

    column = pa.chunked_array([whole.slice(0, cut), whole.slice(cut)])

    assert images_in(column) == [plainly(cell) for cell in rows]


def test_a_path_that_is_not_utf_8_takes_no_image_away():
    paths = pa.array([b"\xe9.png", b"b.png"]).view(pa.string())
    objects = pa.StructArray.from_arrays([pa.array([b"one", b"two"]), paths], ["bytes", "path"])
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), objects)

    assert images_in(pa.chunked_array([objects])) == [[b"one"], [b"two"]]
    assert images_in(pa.chunked_array([lists])) == [[b"one", b"two"]]
