"""Rows of CSV by what stands beside their text: conditions and keys, of fields that have no types."""

import pytest

from omniload.mix.schema.splits import key_of
from omniload.mix.sources import CsvSource
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec

ROWS = b"""id,quality,text
a,0.9,first
b,,no number
c,high,not a number
d,0.1,low
e,0.7,one,too many
\xff,0.8,any bytes are a key
,0.6,without a key
,0.2,low and without
f,0.5,\xff
g,0.2,\xff
"""
SPLIT = {"splits": {"eval": 0.5}}


def opened(folder, rows=ROWS, **keys):
    (folder / "a.csv").write_bytes(rows)
    config = CsvSource(type="csv", path="a.csv", **keys)
    return open_format(SourceSpec("web", config, base_dir=folder)).format


def test_each_row_is_kept_left_out_or_bad_by_itself_wherever_units_are_cut(tmp_path):
    where = {"quality": {"at_least": 0.5}}

    for unit in (1, 40, 4 << 20):
        format_ = opened(tmp_path, where=where, key="id", unit=unit, **SPLIT)
        units = [format_.read_unit(i) for i in range(len(format_.units()))]
        kept = [bool(kept) for each in units for kept in each.kept_B]
        bad = [bool(bad) for each in units for bad in each.bad_B]
        keys = [int(key) for each in units for key in each.keys_B]
        texts = [each.column[i].tobytes() for each in units for i in range(len(each.column))]

        assert kept == [True, False, True, False, True, True, True, False, True, False]
        assert bad == [False, False, True, False, True, False, True, False, True, False]
        assert keys[0] == key_of(b"a")
        assert keys[5] == key_of(b"\xff")
        assert (texts[0], texts[5]) == (b"first", b"any bytes are a key")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (3, "row 2: 'quality' is 'high', not a number, as where.quality asks for"),
        (5, "row 4: has 4 fields, not 3"),
        (7, "row 6: 'id' is empty, and a key is a text or an integer"),
        (9, "row 8: column 'text' is not UTF-8: "),
    ],
)
def test_the_first_bad_row_is_told_by_its_number_behind_the_header(tmp_path, before, said):
    header, *rows = ROWS.splitlines(keepends=True)
    fine = b"z,0.2,low\n"
    file = b"".join((header, *([fine] * (before - 1)), *rows[before - 1 :]))

    format_ = opened(tmp_path, file, where={"quality": {"at_least": 0.5}}, key="id", **SPLIT)

    assert format_.read_unit(0).reason.startswith(f"{tmp_path}/a.csv: {said}")


def test_a_column_of_a_condition_that_is_no_text_is_a_bad_row_and_truths_are_read(tmp_path):
    rows = b"text,clean,lang\na,True,en\nb,false,en\nc,1,en\nd,,en\ne,TRUE,\xff\nf,true,\n"

    records = opened(tmp_path, rows, where={"clean": True, "lang": ["en", ""]}).read_unit(0)

    assert records.usable_B.tolist() == [True, False, False, False, False, True]
    assert records.bad_B.tolist() == [False, False, True, False, True, False]
    assert "row 2: 'clean' is '1', not a truth, as where.clean asks for" in records.reason
