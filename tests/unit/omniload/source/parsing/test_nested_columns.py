"""Names of nested columns and keys: tables and lines interpret them in the same way."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from omniload.base.errors import ConfigError, OmniloadError
from omniload.mix.config import BpeTokenizer, ByteTokenizer, SourceConfig
from omniload.source.parsing.json_lines.lines import MISSING, BadLineError, value_at, value_in
from omniload.source.parsing.nested_columns import column_of, outer_of, types_of
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.chats import CHATML, conversations, write_model

ROWS = [
    {"a": {"b": {"c": 1}, "b.c": 2}, "a.b": {"c": 3}, "a.x": 4},
    {"a": {"b": None, "b.c": 5}, "a.b": None, "a.x": None},
    {"a": None, "a.b": {"c": 6}, "a.x": 7},
]
"""A name may be that of a whole column or a path inside one, and so may a part of it."""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a.x", [4, None, 7]),
        ("a.b.c", [2, 5, None]),
        ("a.b", [{"c": 3}, None, {"c": 6}]),
    ],
)
def test_a_name_that_is_whole_comes_first_and_inside_a_null_all_is_null(name, values):
    table = pa.Table.from_pylist(ROWS)

    assert len(types_of(table.schema, name)) == 1
    assert column_of(table, name).to_pylist() == values
    columns = dict(zip(table.column_names, table.columns, strict=True))
    assert column_of(columns, name).to_pylist() == values
    assert [value_in(row, name) for row in ROWS] == values


@pytest.mark.parametrize("name", ["x", "a.y", "a.b.c.d", "a.x.y", ".a", "a."])
def test_what_is_nowhere_is_found_neither_in_a_table_nor_in_a_line(name):
    assert types_of(pa.Table.from_pylist(ROWS).schema, name) == []
    assert value_at(ROWS[0], name) is MISSING


def test_a_column_that_is_there_twice_is_told_as_both():
    fields = [pa.field("a", pa.int64()), pa.field("a", pa.string())]

    assert types_of(fields, "a") == [pa.int64(), pa.string()]
    assert types_of([pa.field("a", pa.struct([("b", pa.int64())]))] * 2, "a.b") == []


def test_of_a_table_what_a_name_leads_into_is_read():
    assert [outer_of(["a", "b.c"], name) for name in ("a", "a.x", "b.c", "d")] == [
        *("a", "a", "b.c", "d")
    ]


def test_what_a_line_has_inside_is_told():
    with pytest.raises(BadLineError, match="it has doc, meta; inside 'meta' it has lang, set"):
        value_in({"meta": {"set": "c4", "lang": "en"}, "doc": "x"}, "meta.name")
    with pytest.raises(
        BadLineError, match=r"has no key 'doc.name'; it has doc; 'doc' is 'x', not an object$"
    ):
        value_in({"doc": "x"}, "doc.name")


def write(folder, form, rows):
    if form == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"a.{form}", row_group_size=2)


def opened(folder, form, tokenizer=None, **source):
    said = {"type": form, "path": f"a.{form}", "shuffle": {"method": "none"}} | source
    config = TypeAdapter(SourceConfig).validate_python(said)
    tokenizer = tokenizer or ByteTokenizer(type="bytes")
    return open_source(SourceSpec("web", config, tokenizer=tokenizer, base_dir=folder))


def texts_of(source):
    tokens = source.read(0, source.positions_per_epoch).tokens
    return [bytes(tokens[i].tolist()[:-1]).decode() for i in range(len(tokens))]


PILE = [
    {"text": f"text {i}", "meta": None if i == 4 else {"set": ["c4", "arxiv"][i % 2], "id": i}}
    for i in range(8)
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_corpus_is_divided_by_what_its_objects_say(tmp_path, form):
    write(tmp_path, form, PILE)

    c4 = opened(tmp_path, form, text="text", where={"meta.set": "c4"})
    late = opened(tmp_path, form, text="text", where={"meta.id": {"at_least": 5}})

    assert texts_of(c4) == ["text 0", "text 2", "text 6"]
    assert texts_of(late) == ["text 5", "text 6", "text 7"]


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_field_that_is_no_utf_8_makes_bad_the_rows_that_are_read_from_it(tmp_path, form):
    sound, torn = pa.array(["one", "two"]), pa.array([b"one", b"\xff\xfe"])
    # As a writer leaves it that checks nothing: the column of texts contains plain bytes.
    texts = pa.Array.from_buffers(pa.string(), 2, torn.buffers())
    table = pa.table({"meta": pa.StructArray.from_arrays([sound, texts], ["sound", "torn"])})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)

    read = [
        texts_of(opened(tmp_path, form, text=f"meta.{name}", on_error={"policy": "skip"}))
        for name in ("sound", "torn")
    ]

    assert read == [["one", "two"], ["one"]]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_texts_of_a_column_whose_name_leads_inside_another_too_are_those_of_the_column(
    tmp_path, is_indexed
):
    rows = [{"meta": {"text": f"inner {i}"}, "meta.text": f"outer {i}"} for i in range(9)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=is_indexed)

    found = texts_of(opened(tmp_path, "parquet", text="meta.text"))

    assert found == [f"outer {i}" for i in range(9)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_value_inside_an_object_is_read_where_its_column_has_a_default(tmp_path, form):
    write(tmp_path, form, PILE)
    column = {"column": "meta.set", "dtype": "text", "of": "samples", "default": "none"}

    block = opened(tmp_path, form, text="text", columns={"set": column}).read(0, 8)

    (found,) = block.others.values()
    assert [found[i].tobytes().decode() for i in range(8)] == [
        (row["meta"] or {"set": "none"})["set"] for row in PILE
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_split_holds_out_by_a_key_inside_another(tmp_path, form):
    write(tmp_path, form, [row for row in PILE if row["meta"]])
    write_keys = {"text": "text", "key": "meta.id", "splits": {"held": 0.5}}

    trained = texts_of(opened(tmp_path, form, **write_keys))
    held = texts_of(opened(tmp_path, form, split="held", **write_keys))

    assert sorted(trained + held) == [row["text"] for row in PILE if row["meta"]]
    assert trained
    assert held


def test_lines_and_tables_hold_out_alike(tmp_path):
    rows, said = [row for row in PILE if row["meta"]], {"text": "text", "key": "meta.id"}
    write(tmp_path, "jsonl", rows)
    write(tmp_path, "parquet", rows)

    lines, table = (
        texts_of(opened(tmp_path, form, splits={"held": 0.5}, **said))
        for form in ("jsonl", "parquet")
    )

    assert lines == table


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations_may_stand_inside_an_object(tmp_path, form):
    write_model(tmp_path / "model", CHATML)
    chats = conversations(6)
    rows = [{"messages": chat, "deep": {"talk": chat, "tools": None}} for chat in chats]
    write(tmp_path, form, rows)
    tokenizer = BpeTokenizer(type="bpe", path="model")

    found = []
    for text in ("messages", "deep.talk"):
        config = {"text": text, "transforms": [{"type": "chat"}]}
        source = opened(tmp_path, form, tokenizer=tokenizer, **config)
        found.append(source.read(0, 6).tokens.values_V.tolist())

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"text": "meta.body"},
            "has no column 'meta.body'; it has text, meta.*inside 'meta' are set, id",
        ),
        (
            {"text": "text", "where": {"meta.lang": "en"}},
            "for where; it has text, meta; inside 'meta' are",
        ),
        ({"text": "text", "where": {"meta.set": 1}}, "column 'meta.set' is string, not a number"),
        ({"text": "text", "where": {"text.set": 1}}, "'text' is string, and nothing is inside"),
        ({"text": "meta.id"}, "column 'meta.id' is int64, not text"),
    ],
)
def test_a_table_is_refused_with_what_is_inside(tmp_path, source, said):
    write(tmp_path, "parquet", PILE)

    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, "parquet", **source)


def test_a_line_without_what_is_inside_is_one_bad_line(tmp_path):
    write(tmp_path, "jsonl", PILE)

    with pytest.raises(
        OmniloadError, match=r"a.jsonl:1: has no key 'meta.lang'.*inside 'meta' it has id, set"
    ):
        opened(tmp_path, "jsonl", where={"meta.lang": "en"}).read(0, 8)
