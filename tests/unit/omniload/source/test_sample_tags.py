"""Values of whole records in lines of JSON: many lines at once are read as each is by itself."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.sources import JsonlSource
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.patterns import find_files
from tests.support.examples import few

DTYPES = {"text": "-", "int64": -(2**63), "float32": 0.1, "float64": 1e300, "bool": True}
LACKS = object()
VALUES = st.one_of(
    *(st.just(LACKS), st.none(), st.booleans(), st.text(max_size=5), st.just([1]), st.just({})),
    *(st.integers(-(2**70), 2**70), st.integers(-2, 2), st.floats(), st.just("x" * 4_097)),
)
USUAL = {
    "text": st.text(max_size=5),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32) | st.integers(-9, 9),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
}


@st.composite
def lines(draw):
    """Draw a type, whether there is a default, and lines, of which most or all have a value of the type."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    value = USUAL[dtype] if draw(st.booleans()) else VALUES | USUAL[dtype]
    found = draw(st.lists(st.tuples(st.text(max_size=5), value), min_size=1, max_size=9))
    records = [{"text": t} | ({} if v is LACKS else {"key": v}) for t, v in found]
    return dtype, draw(st.booleans()), [json.dumps(r).encode() for r in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lines")


def read(folder, data, column):
    (folder / "a.jsonl").write_bytes(data)
    files = find_files(["a.jsonl"], folder, source="web")
    config = JsonlSource(type="jsonl", path="a.jsonl", columns={"tag": column})
    return JsonlFormat(files, config).read_unit(0)


@few(150, soak=3000)
@given(lines())
def test_lines_that_are_read_at_once_have_the_values_of_each_by_itself(folder, drawn):
    dtype, has_default, data = drawn
    column = {"column": "key", "dtype": dtype, "of": "samples"}
    column |= {"default": DTYPES[dtype]} if has_default else {}

    many = read(folder, b"\n".join(data), column)
    # A line that begins with white space is parsed by itself, and so are its neighbours.
    each = read(folder, b"\n".join(b" " + line for line in data), column)

    assert np.array_equal(many.bad_B, each.bad_B)
    assert many.reason == each.reason
    assert bool(many.reason) == many.bad_B.any()
    (of_many,), (of_each,) = many.others.values(), each.others.values()
    for i in np.flatnonzero(~many.bad_B).tolist():
        assert of_many[i].tobytes() == of_each[i].tobytes()
        value = json.loads(data[i]).get("key")
        value = DTYPES[dtype] if value is None else value
        wanted = value.encode() if dtype == "text" else np.array([value], dtype).tobytes()
        assert of_many[i].tobytes() == wanted
