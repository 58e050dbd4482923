"""Images of cells: the Python values of Arrow, without the fields next to the bytes."""

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
    return images_of(with_images(Records.of_texts([""] * len(column)), column, "a.parquet"))


def images_of(records):
    data, sizes = records.others[ENCODED], records.others[ENCODED_SIZES]
    found = []
    for row in range(len(data)):
        ends = np.cumsum(sizes[row]).tolist()
        bounds = zip([0, *ends], ends, strict=False)
        found.append([data[row].tobytes()[start:stop] for start, stop in bounds])
    return found


def plainly(cell):
    cells = cell if isinstance(cell, list) else [cell]
    images = [each["bytes"] if isinstance(each, dict) else each for each in cells]
    return [image for image in images if image]


def has_a_path_alone(cell):
    cells = cell if isinstance(cell, list) else [cell]
    objects = [each for each in cells if isinstance(each, dict)]
    return any(each["path"] and not each["bytes"] for each in objects)


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

    records = with_images(Records.of_texts([""] * len(rows)), column, "a.parquet")
    assert images_of(records) == [plainly(cell) for cell in rows]
    assert records.bad_B.tolist() == [has_a_path_alone(cell) for cell in rows]


def test_a_path_without_bytes_is_told_with_its_row_and_not_of_a_record_that_is_left_out():
    cells = pa.array([{"bytes": b"one", "path": None}, {"bytes": None, "path": "b.png"}], OBJECT)
    column = pa.chunked_array([cells])

    told = with_images(Records.of_texts(["a", "b"]), column, "a.parquet: row group 0")
    left_out = with_images(Records.of_texts(["a", None], "row 1: is null"), column, "a.parquet")

    assert told.bad_B.tolist() == [False, True]
    assert told.reason.startswith("a.parquet: row group 0: row 1: an image has a path and no bytes")
    assert left_out.reason == "row 1: is null"


def test_a_path_that_is_not_utf_8_takes_no_image_away():
    paths = pa.array([b"\xe9.png", b"b.png"]).view(pa.string())
    objects = pa.StructArray.from_arrays([pa.array([b"one", b"two"]), paths], ["bytes", "path"])
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), objects)

    assert images_in(pa.chunked_array([objects])) == [[b"one"], [b"two"]]
    assert images_in(pa.chunked_array([lists])) == [[b"one", b"two"]]


@pytest.mark.parametrize("kind", [pa.binary(), OBJECT])
def test_the_images_of_a_row_group_are_not_copied(kind):
    image = b"one" if kind == pa.binary() else {"bytes": b"one", "path": None}
    cells = pa.array([[image] * 99, [], [image]], pa.list_(kind))
    held = cells.values if kind == pa.binary() else cells.values.field("bytes")

    records = with_images(Records.of_texts([""] * 3), pa.chunked_array([cells]), "a.parquet")

    lies = np.frombuffer(held.buffers()[2], np.uint8)
    assert np.shares_memory(records.others[ENCODED].values_V, lies)
