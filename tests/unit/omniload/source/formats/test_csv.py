"""Rows of CSV by the columns next to their text: conditions and keys, of fields without types."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
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
    (folder / "a.csv").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    config = CsvSource(type="csv", path="a.csv", **keys)
    return open_format(SourceSpec("web", config, base_dir=folder)).format


def test_a_record_is_called_by_its_number_behind_the_header(tmp_path):
    place = opened(tmp_path).place_of("a.csv", 0, 0, 2)

    assert place == ("a.csv", "record 2, counted from 0 behind the header")


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


OWN = {
    "lang": {"column": "lang", "dtype": "text", "of": "samples"},
    "n": {"column": "n", "dtype": "int64", "of": "samples", "default": -1},
    "ok": {"column": "ok", "dtype": "bool", "of": "samples", "default": False},
}


def test_fields_beside_the_text_are_values_of_the_types_that_columns_have(tmp_path):
    rows = (
        "text,lang,n,ok\n"
        "a,en,7,True\n"
        "b,,,\n"
        "too,few\n"
        "c,de,9007199254740993,0\n"
        "d,de,7.5,1\n"
        "e,de,7,yes\n"
        "f,de, +7 ,TRUE\n"
    )

    records = opened(tmp_path, rows, columns=OWN).read_unit(0)

    good = [0, 1, 3, 6]
    assert np.flatnonzero(~records.bad_B).tolist() == good
    lang, n, ok = records.others.values()
    assert [lang[i].tobytes().decode() for i in good] == ["en", "", "de", "de"]
    assert [n[i].tolist() for i in good] == [[7], [-1], [2**53 + 1], [7]]
    assert [ok[i].tolist() for i in good] == [[True], [False], [False], [True]]
    assert "row 2: has 2 fields, not 4" in records.reason


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("7.5", "row 2: n: 'n' is 7.5, not an integer of 64 bits"),
        ("0x10", "row 2: n: 'n' is '0x10', not an integer of 64 bits"),
        ("1e999", "row 2: n: 'n' is inf, not an integer of 64 bits"),
    ],
)
def test_a_field_of_another_kind_is_told_with_its_row_behind_one_of_another_length(
    tmp_path, field, said
):
    rows = f"text,lang,n,ok\na,en,7,1\nb,de,8,1\nc,de,{field},1\n"
    assert opened(tmp_path, rows, columns=OWN).read_unit(0).reason.endswith(said)
    # A row that Arrow passes over has a number too.
    longer = rows.replace("b,de,8,1\n", f"{'x' * 4097},{'x' * 4097},8,1\n").replace("a,en,7,1", "a")
    records = opened(tmp_path, longer, columns=OWN).read_unit(0)
    assert records.bad_B.tolist() == [True, True, True]


def test_a_text_that_is_too_long_is_told_by_its_number_among_rows_of_another_length(tmp_path):
    rows = f"text,lang,n,ok\na,en,7,1\nb\nc,{'x' * 4097},8,1\n"
    left = {"where": {"text": ["a", "c"]}}

    reasons = [
        opened(tmp_path, text, columns=OWN, **left).read_unit(0).reason
        for text in (rows, rows.replace("b\n", ""))
    ]

    assert reasons[0].endswith("row 1: has 1 fields, not 4")
    assert "row 1: lang has 4,097 bytes of UTF-8, more than 4,096" in reasons[1]


def test_a_field_of_a_row_that_is_left_out_is_all_one(tmp_path):
    rows = "text,lang,n,ok\na,en,many,1\nb,de,8,1\n"

    records = opened(tmp_path, rows, columns=OWN, where={"lang": "de"}).read_unit(0)

    assert (records.usable_B.tolist(), records.reason) == ([False, True], "")


def test_a_column_of_yours_that_the_header_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no column 'lang'; its first row has 'text'"):
        opened(tmp_path, "text\na\n", columns=OWN)
