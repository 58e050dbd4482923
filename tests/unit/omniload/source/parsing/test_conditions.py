"""Conditions on columns: lines and tables give the same result as Arrow's own filter."""

import itertools
import json
import math
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.config import checked
from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts, source_parts
from omniload.mix.schema.records import Between
from omniload.mix.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    MdsSource,
    ParquetSource,
    WebDatasetSource,
)
from omniload.source.formats.opening import open_format
from omniload.source.parsing.conditions import (
    keeps,
    kept_columns,
    kept_records,
    require_where,
    value_of_text,
)
from omniload.source.parsing.json_lines.lines import number_in
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.drawn_texts import a_mix_of
from tests.support.plane.sources.drawn_texts import said_behind_d as drawn
from tests.support.plane.sources.written_rows import ROW_KINDS, write_rows

LANGS, SCORES = ["en", "de", "fr", ""], [0.0, 0.25, 0.5, 1.0, -3.5, 1e300]
COUNTS = [0, 1, -1, 2**53, 2**53 + 1, 2**62]
rows = st.lists(
    st.fixed_dictionaries(
        {
            "lang": st.none() | st.sampled_from(LANGS),
            "quality": st.none() | st.sampled_from(SCORES),
            "count": st.none() | st.sampled_from(COUNTS),
            "clean": st.none() | st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


def one_of(values):
    return st.sampled_from(values) | st.lists(st.sampled_from(values), min_size=1).map(tuple)


limits = st.none() | st.sampled_from([-1.0, 0.0, 0.3, 0.5, 2.0])
ranges = (
    st.tuples(limits, limits)
    .filter(lambda pair: pair != (None, None) and (None in pair or pair[0] <= pair[1]))
    .map(lambda pair: Between(at_least=pair[0], at_most=pair[1]))
)
wheres = st.fixed_dictionaries(
    {},
    optional={
        "lang": one_of(LANGS),
        "quality": ranges | one_of(SCORES),
        "count": ranges | one_of([*COUNTS, 0.5, 1e300]),
        "clean": one_of([True, False]),
    },
)
TYPES = {"lang": pa.string(), "quality": pa.float64(), "count": pa.int64(), "clean": pa.bool_()}


def arrows_own(where):
    """Return the filter as Arrow's expressions write it; ``None`` for none."""

    def expression(column, condition):
        field = ds.field(column)
        if isinstance(condition, Between):
            # Arrow compares integers with a limit in float32 if it can, and refuses integers that float32 cannot
            # represent.
            field = field.cast(pa.float64(), safe=False) if column == "count" else field
            least = [] if condition.at_least is None else [field >= condition.at_least]
            most = [] if condition.at_most is None else [field <= condition.at_most]
            return reduce(and_, [*least, *most])
        values = condition if isinstance(condition, tuple) else (condition,)
        if column == "count":
            values = [int(v) for v in values if float(v).is_integer() and abs(v) < 2**63]
        return field.isin(pa.array(values, TYPES[column]))

    each = [expression(column, condition) for column, condition in where.items()]
    return reduce(and_, each) if each else None


@given(rows, wheres)
def test_lines_and_columns_are_kept_as_by_arrows_own_filter(found, where):
    table = pa.Table.from_pylist(found, pa.schema(TYPES)).append_column(
        "number", pa.array(range(len(found)))
    )
    kept = ds.dataset(table).to_table(filter=arrows_own(where))["number"].to_pylist()

    columns = {column: table[column] for column in where}
    by_columns = kept_columns(where, columns, len(found)).nonzero()[0].tolist()
    by_lines = [i for i, row in enumerate(found) if keeps(where, json.loads(json.dumps(row)))]

    assert by_columns == kept
    assert by_lines == kept


@pytest.mark.parametrize("limit", [0.6, 0.7, 0.75])
def test_numbers_of_float32_are_compared_as_by_arrows_own_filter(limit):
    values = [0.6, 0.7, 0.75, 0.9]
    table = pa.table({"quality": pa.array(values, pa.float32()), "number": range(4)})
    field = ds.field("quality")
    for condition, arrows in [
        (Between(at_least=limit), field >= limit),
        (Between(at_most=limit), field <= limit),
        ((limit,), field == limit),
    ]:
        kept = ds.dataset(table).to_table(filter=arrows)["number"].to_pylist()

        found = kept_columns({"quality": condition}, {"quality": table["quality"]}, 4)

        assert found.nonzero()[0].tolist() == kept


@given(rows, wheres)
def test_fields_of_text_are_kept_as_the_values_that_they_write(found, where):
    """A field cannot be null: an empty field is an empty text, and no number or truth value."""

    def cells(i):
        row = {column: "" if value is None else f"{value}" for column, value in found[i].items()}
        return {c: value_of_text(row[c].encode(), c, where[c]) for c in where}

    kept_B, faults = kept_records(where, cells, len(found))

    assert faults == {}
    assert kept_B.tolist() == [keeps(where, row | {"lang": row["lang"] or ""}) for row in found]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("7", 7), ("-07", -7), ("+7", 7), (" 7\t", 7), ("5.", 5.0), (".5", 0.5), ("1E-3", 1e-3)),
        *((str(2**64 - 1), 2**64 - 1), (str(2**64), 2.0**64), ("-Infinity", -math.inf)),
        *(
            (text, None)
            for text in ("", " ", "x", "1_000", "1,5", "0x10", "\u0667", "7 8", "1e", ".", "+")
        ),
    ],
)
def test_a_field_is_a_number_where_a_program_writes_one_so(text, number):
    read = number_in(text)

    assert (read, type(read)) == (number, type(number))


def a_mix(kind, where, **source):
    held = {"type": kind, "path": f"web.{kind}", "text": "text"} if isinstance(kind, str) else kind
    return a_mix_of(**held | {"where": where} | source)


ROWS = [
    {
        "text": f"d{i}",
        "lang": ["en", "de", None][i % 3],
        "quality": i / 100,
        "count": 2**53 + i,
        "clean": i % 2 == 0,
    }
    for i in range(100)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("jsonl", "parquet", "arrow"):
        write_rows(kind, tmp_path, "web", ROWS)
    return tmp_path


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_records_are_drawn_for_which_all_conditions_hold(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    where = {
        "lang": ["en", "fr"],
        "quality": {"at_least": 0.2, "at_most": 0.8},
        "count": [2**53 + i for i in range(31, 100)],
        "clean": 1 if kind == "mds" else True,  # MDS has no truth values
    }

    found = drawn(a_mix(write_rows(kind, tmp_path, "web", ROWS), where))

    assert found == sorted(map(str, range(36, 81, 6)))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"lang": []}, "where.lang"),
        ({"lang": ["en", 3]}, "of several kinds; give texts, numbers or truths alone"),
        (
            {"quality": {"at_least": 2, "at_most": 1}},
            "at_least is 2, more than at_most 1; no value lies between",
        ),
        ({"quality": {}}, "neither at_least nor at_most is given"),
        ({"quality": {"min": 1}}, "no such key"),
    ],
)
def test_conditions_that_cannot_be_meant_are_refused(where, said):
    with pytest.raises(ConfigError, match=said):
        checked(a_mix("jsonl", where), MixConfig, name="mix")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"where": {"lang": "en"}}, "where reads columns, and the source is of type {0}; use {1}$"),
        (
            {"dedupe": "key"},
            "dedupe is key, but the source names no key under key; use {1}, or say",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["text", "megatron", "numpy"])
def test_a_source_without_columns_is_told_which_types_have_some(kind, asked, said):
    types = "jsonl, csv, parquet, arrow, lance, mds or webdataset"
    with pytest.raises(ConfigError, match=said.format(kind, types)):
        checked(
            a_mix({"type": kind, "path": "a"}, **({"where": {}} | asked)), MixConfig, name="mix"
        )


@pytest.mark.parametrize(
    ("kind", "where", "said"),
    [
        (
            "parquet",
            {"land": "en"},
            "has no single column 'land' for where; it has text, lang, quality, count, clean",
        ),
        (
            "arrow",
            {"quality": "high"},
            "column 'quality' is double, not a text, as where.quality asks for",
        ),
        ("jsonl", {"land": "en"}, "has no key 'land'; it has clean, count, lang, quality, text"),
        (
            "csv",
            {"land": "en"},
            "has no column 'land'; its first row has 'text', 'lang', 'quality'",
        ),
        ("lance", {"land": "en"}, "has no single column 'land' for where; it has text, lang"),
        ("mds", {"land": "en"}, "has no column 'land' for where; it has clean, count, lang"),
        (
            "webdataset",
            {"land": "en"},
            "web.tar: sample 'web/0.*' at byte .*: has no key 'land'; it has clean",
        ),
        ("csv", {"lang": 1}, "row [0-9]+: 'lang' is 'en', not a number, as where.lang asks for"),
        ("csv", {"quality": True}, "row [0-9]+: 'quality' is '0.[0-9]+', not a truth, as where.q"),
        ("mds", {"lang": 1}, "column 'lang' is str, not a number, as where.lang asks for"),
        ("mds", {"clean": True}, "column 'clean' is uint8, not a truth, as where.clean asks for"),
        ("webdataset", {"quality": "a"}, "at byte .*: 'quality' is 0.*, not a text, as where.qual"),
        *(
            (
                kind,
                {"lang.code": "en"},
                "; a name does not reach inside 'lang': write what is there",
            )
            for kind in ("csv", "mds")
        ),
        *(
            (kind, {"lang.code": "en"}, "; 'lang' is .*string.*, and nothing is inside")
            for kind in ("parquet", "arrow", "lance")
        ),
        *(
            (kind, {"lang.code": "en"}, "has no key 'lang.code'; it has clean, count, lang")
            for kind in ("jsonl", "webdataset")
        ),
        (
            "jsonl",
            {"lang": {"at_least": 1}},
            "'lang' is 'en', not a number, as where.lang asks for",
        ),
    ],
)
def test_conditions_that_the_data_does_not_fit_are_told(tmp_path, monkeypatch, kind, where, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, IntegrityError), match=said):
        drawn(a_mix(write_rows(kind, tmp_path, "web", ROWS), where))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("asked", ["high", True])
def test_a_kept_index_hides_no_condition_of_another_kind(folder, kind, asked):
    asks = {"parquet": ParquetSource, "arrow": ArrowSource}[kind]
    before, after = (
        SourceSpec(
            "web",
            asks(type=kind, path=f"web.{kind}", text="text", where={"quality": condition}),
            base_dir=folder,
            cache_dir=folder / "cache",
        )
        for condition in ({"at_least": 0.5}, asked)
    )
    open_format(before)

    with pytest.raises(ConfigError, match="column 'quality' is double, not a"):
        open_format(after)


def test_conditions_that_leave_out_everything_are_told(folder):
    with pytest.raises(ConfigError, match="none of its 100 records gives a sample"):
        drawn(a_mix("jsonl", {"lang": "xx"}))


def test_what_is_left_out_may_be_broken(folder):
    lines = [{"text": 3, "lang": "xx"}, {"text": "d1", "lang": "en"}]
    (folder / "web.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert drawn(a_mix("jsonl", {"lang": "en"})) == ["1"]


def test_conditions_are_part_of_what_a_run_is_and_none_change_nothing():
    facts = SourceFacts(positions_per_epoch=1, order_digest="", shards_digest="", content_digest="")

    def parts(**words):
        return source_parts("web", JsonlSource(type="jsonl", path="a", **words), facts)[
            "sources.web"
        ]

    assert parts(where={}) == parts() == "716304349403"
    later = [
        (CsvSource(type="csv", path="a"), "06603da5e6d6"),
        (MdsSource(type="mds", path="a", text="t"), "596c3caa5de0"),
        (WebDatasetSource(type="webdataset", path="a"), "050befe22e81"),
    ]
    for source, digest in later:
        assert source_parts("web", source, facts)["sources.web"] == digest
    assert (
        len({parts(), parts(where={"a": 1}), parts(where={"a": [1]}), parts(where={"a": "1"})}) == 4
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("condition", ["en", 1, True, {"at_least": 0}])
def test_of_a_shard_whose_column_is_null_in_every_row_nothing_is_drawn(folder, kind, condition):
    value = 0 if isinstance(condition, dict) else condition
    some = [{"text": f"d{i}", "lang": value} for i in range(3)]
    write_rows(kind, folder, "web", some)
    write_rows(kind, folder, "null", [{"text": f"d{i}", "lang": None} for i in range(3, 9)])

    found = drawn(a_mix(kind, {"lang": condition}, path=[f"web.{kind}", f"null.{kind}"]))

    assert found == ["0", "1", "2"]


def test_texts_of_every_type_of_arrow_are_looked_up():
    texts = pa.array(["en", None, "de"])
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary("int8", "utf8")):
        require_where(pa.schema({"h": kind}), {"h": "en"}, "a.arrow")
        column = pa.chunked_array([texts.cast(kind)])
        assert kept_columns({"h": "en"}, {"h": column}, 3).tolist() == [True, False, False]


def test_numbers_of_half_precision_are_looked_up_and_compared():
    column = pa.chunked_array([pa.array(np.array([1.0, 0.5, 0.1], np.float16))])

    for condition, kept in (
        (0.5, [1]),
        ((1, 0.5), [0, 1]),
        (0.1, []),
        (Between(at_least=0.3), [0, 1]),
    ):
        assert np.flatnonzero(kept_columns({"h": condition}, {"h": column}, 3)).tolist() == kept


LARGE = [*COUNTS, 2**53 + 2, 2**53 + 3, 2**62 + 1, 2**63 - 1, -(2**63), -(2**53) - 1]
LIMITS = [
    None,
    0.5,
    -0.5,
    2.0**53,
    2.0**53 + 2,
    -(2.0**53),
    2.0**62,
    2.0**63,
    -(2.0**63),
    1e300,
    -1e300,
]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.int8(), pa.float32(), pa.float64()])
def test_a_range_holds_for_a_column_where_it_does_for_lines_however_large_numbers_are(kind):
    least, most = {pa.int8(): (-128, 127), pa.uint64(): (0, 2**64 - 1)}.get(
        kind, (-(2**63), 2**63 - 1)
    )
    values = [None, *(value for value in (*LARGE, 2**64 - 1) if least <= value <= most)]
    column = pa.array(values, pa.int64() if kind != pa.uint64() else kind).cast(kind, safe=False)

    for at_least, at_most in itertools.product(LIMITS, LIMITS):
        if (at_least, at_most) == (None, None) or (
            None not in (at_least, at_most) and at_least > at_most
        ):
            continue
        where = {"n": Between(at_least=at_least, at_most=at_most)}
        by_columns = kept_columns(where, {"n": pa.chunked_array([column])}, len(values))
        assert by_columns.tolist() == [keeps(where, {"n": each}) for each in column.to_pylist()]
