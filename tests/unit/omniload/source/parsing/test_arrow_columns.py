"""Nested columns and pairs of columns as records: a text in them that is not UTF-8 is a bad record, as any other is."""

import pyarrow as pa
import pyarrow.parquet as pq

from omniload.source.files import local_file
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.parsing.arrow_columns import as_objects, records_of

NOT_UTF8 = b"caf\xe9"


def texts_of(*values):
    return pa.array(values, pa.binary()).view(pa.string())


def shown(records):
    return [bytes(records.column[i]) for i in range(len(records.column))], records.bad_B.tolist()


def test_nested_values_are_written_as_json_and_one_that_is_not_utf_8_is_bad():
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, None, 2, 3], pa.int32()), texts_of(b"one", NOT_UTF8, "é".encode())
    )

    records = records_of(pa.chunked_array([lists.slice(0, 2), lists.slice(2)]), "a file", "nested")

    texts = [b'["one"]', b"", b"[]", b"", '["é"]'.encode()]
    assert shown(records) == (texts, [False, True, False, True, False])
    assert records.reason.startswith("a file: row 1: is not UTF-8")


def test_a_pair_with_a_text_that_is_not_utf_8_is_bad_and_the_others_are_objects():
    chosen, rejected = texts_of(b"a", b"b", NOT_UTF8, None), texts_of(b"c", NOT_UTF8, b"d", b"e")

    pairs = as_objects({"x": pa.chunked_array([chosen]), "y": pa.chunked_array([rejected])})
    records = records_of(pairs, "a file", "text")

    texts = [b'{"x":"a","y":"c"}', b"", b"", b'{"x":null,"y":"e"}']
    assert shown(records) == (texts, [False, True, True, False])
    assert records.reason.startswith("a file: row 1: is not UTF-8")


def test_a_row_group_with_such_a_text_is_read_and_the_record_named(tmp_path):
    said = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), texts_of(b"one", NOT_UTF8, b"three")
    )
    pq.write_table(pa.table({"said": said}), tmp_path / "own.parquet")
    file = local_file(str(tmp_path / "own.parquet"))

    records = ParquetFormat([file], column="said", holds="nested").read_unit(0)

    assert shown(records) == ([b'["one"]', b"", b'["three"]'], [False, True, False])
    assert "own.parquet: row group 0: row 1: is not UTF-8" in records.reason
