"""Nested columns and pairs of columns as records: a text in them that is not UTF-8 is a bad record, as any other is."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.mix.columns import LOSS_MASK
from omniload.mix.sources import ParquetSource
from omniload.source.files import local_file
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.parsing.arrow_columns import (
    as_objects,
    records_of,
    with_keys,
)
from omniload.source.parsing.table_records import with_others

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

    config = ParquetSource(
        type="parquet", path="own.parquet", text="said", transforms=[{"type": "chat"}]
    )

    records = ParquetFormat([file], config).read_unit(0)

    assert shown(records) == ([b'["one"]', b"", b'["three"]'], [False, True, False])
    assert "own.parquet: row group 0: row 1: column 'said' is not UTF-8" in records.reason


KEPT_B = np.array([False, True, False, True])


@pytest.mark.parametrize(
    ("column", "holds", "reason"),
    [
        (texts_of(None, b"a", b"b", None), "text", "a file: row 3: is null"),
        (texts_of(NOT_UTF8, b"a", None, NOT_UTF8), "text", "a file: row 3: is not UTF-8"),
        (texts_of(NOT_UTF8, b"a", None, b"b"), "text", ""),
        (pa.array([None, [1], [2], None]), "tokens", "a file: row 3: is null"),
        (pa.array([[None], [1], [2], None]), "tokens", "a file: row 3: is null"),
        (pa.array([None, [1], [2], [3, None]]), "tokens", "a file: row 3: holds a null among"),
        (pa.array([None, ["x"], ["y"], None]), "nested", "a file: row 3: is null"),
    ],
)
def test_a_record_that_a_condition_leaves_out_is_not_the_one_that_is_named(column, holds, reason):
    records = records_of(pa.chunked_array([column]), "a file", holds, KEPT_B)

    assert records.bad_B.tolist() == [False, False, False, bool(reason)]
    assert records.reason.startswith(reason)
    assert bool(records.reason) == bool(reason)
    assert records.usable_B.tolist() == [False, True, False, not reason]


def test_a_key_or_a_further_column_of_one_that_is_left_out_is_not_named_either():
    tokens = pa.chunked_array([pa.array([[1], [1, 2], [1], [1, 2]])])
    keys = pa.chunked_array([pa.array([None, "a", None, None])])
    masks = pa.chunked_array([pa.array([None, [1, 1], [1, 0, 0], [1]])])
    records = records_of(tokens, "a file", "tokens", KEPT_B)

    keyed = with_keys(records, keys, "a file")
    masked = with_others(records, {LOSS_MASK: masks}, "a file")

    assert keyed.reason == "a file: row 3: key is null"
    assert masked.reason == "a file: row 3: loss_mask has 1 values for 2 tokens"
    for found in (keyed, masked):
        assert found.bad_B.tolist() == [False, False, False, True]
