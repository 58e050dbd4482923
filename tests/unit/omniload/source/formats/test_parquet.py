"""Parquet shards."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.sources import ParquetSource
from omniload.source.columns import lying
from omniload.source.formats import parquet
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.index import IndexCache
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.patterns import find_files


@pytest.fixture
def shard(tmp_path):
    def write(column, name="tokens", group_rows=2, shard="a", **options):
        path = tmp_path / f"{shard}.parquet"
        pq.write_table(
            pa.table({"id": np.arange(len(column)), name: column}),
            path,
            row_group_size=group_rows,
            **options,
        )
        return path

    return write


@pytest.fixture
def opened(tmp_path):
    def open_format(column="tokens", holds_text=False, cache=None, **keys):
        files = find_files(["*.parquet"], tmp_path, source="web")
        keys |= {"text" if holds_text else "tokens": column}
        return ParquetFormat(files, ParquetSource(type="parquet", path="*.parquet", **keys), cache)

    return open_format


def sequences(records):
    return [records.column[i].tolist() for i in range(len(records.column))]


def texts(records):
    return [records.column[i].tobytes().decode() for i in range(len(records.column))]


LISTS = [[1, 2], [], [2**31 - 1], [4, 5, 6], [7]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.list_(pa.uint32()),
        pa.large_list(pa.int32()),
        pa.large_list(pa.uint64()),
        pa.list_(pa.field("item", pa.int32(), nullable=False)),
    ],
    ids=str,
)
def test_lists_of_any_integers_are_token_ids(shard, opened, kind):
    shard(pa.array(LISTS, kind))
    reader = opened()

    read = [reader.read_unit(unit) for unit in range(3)]

    assert [s for records in read for s in sequences(records)] == LISTS
    assert {records.column.values_V.dtype for records in read} == {np.dtype(np.int32)}


def test_fixed_size_lists_are_token_ids(shard, opened):
    shard(pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)), group_rows=3)

    records = opened().read_unit(0)

    assert sequences(records) == [[1, 2], [], [3, 4]]
    assert records.bad_B.tolist() == [False, True, False]


def test_units_are_row_groups(shard, opened):
    shard(pa.array(LISTS), shard="a")
    shard(pa.array(LISTS[:1]), shard="b")

    units = opened().units()

    assert units.rows_U.tolist() == [2, 2, 1, 1]
    assert units.shards_U.tolist() == [0, 0, 0, 1]
    assert units.starts_U.tolist() == [0, 1, 2, 0]


def test_a_shard_without_rows_has_no_records(shard, opened):
    shard(pa.array([], pa.list_(pa.int32())))

    assert opened().units().rows_U.sum() == 0


def test_int32_ids_are_not_copied(shard, opened, monkeypatch):
    shard(pa.array(LISTS, pa.list_(pa.int32())), group_rows=5)

    values = opened().read_unit(0).column.values_V

    assert not values.flags.owndata
    assert not values.flags.writeable


def test_null_lists_are_bad_records_that_keep_their_row(shard, opened):
    path = shard(pa.array([[1], None, [2], None], pa.list_(pa.int32())), group_rows=4)

    records = opened().read_unit(0)

    assert records.bad_B.tolist() == [False, True, False, True]
    assert records.reason == f"{path}: row group 0: row 1: column 'tokens' is null"
    assert sequences(records) == [[1], [], [2], []]


@pytest.mark.parametrize(
    ("bad", "kind"), [(-5, pa.int32()), (2**31, pa.int64()), (2**40, pa.uint64())]
)
def test_ids_that_are_no_token_ids_are_named_with_their_row_group(shard, opened, bad, kind):
    path = shard(pa.array([[1], [2], [3, bad], [4]], pa.list_(kind)))

    records = opened().read_unit(1)

    assert records.bad_B.tolist() == [True, False]
    assert records.column.values_V.min() >= 0
    assert records.column[1].tolist() == [4]
    said = f"column 'tokens' holds token id {bad}; a token id is from 0 to 2147483647"
    assert records.reason == f"{path}: row group 1: row 0: {said}"


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())], ids=str)
def test_a_list_that_holds_a_null_is_a_bad_record_as_a_null_list_is(shard, opened, kind):
    path = shard(pa.array([[1], [], [2, None], None, [None], [3, 4]], kind), group_rows=6)

    records = opened().read_unit(0)

    said = "column 'tokens' holds a null among its token ids; write integers"
    assert records.reason == f"{path}: row group 0: row 2: {said}"
    assert records.bad_B.tolist() == [False, False, True, True, True, False]
    found = sequences(records)
    assert [found[row] for row in (0, 1, 5)] == [[1], [], [3, 4]]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_strings_of_any_kind_are_text(shard, opened, kind):
    shard(pa.array(["é", "", "abc"], pa.string()).cast(kind), "text")
    reader = opened("text", holds_text=True)

    assert texts(reader.read_unit(0)) == ["é", ""]
    assert texts(reader.read_unit(1)) == ["abc"]


def test_null_texts_are_bad_records(shard, opened):
    path = shard(pa.array(["a", None, "c"]), "text", group_rows=3)

    records = opened("text", holds_text=True).read_unit(0)

    assert records.bad_B.tolist() == [False, True, False]
    assert records.reason == f"{path}: row group 0: row 1: column 'text' is null"
    assert texts(records) == ["a", "", "c"]


def test_text_that_is_not_utf_8_is_a_bad_record(shard, opened):
    raw = pa.array([b"a", b"\xff\xfe", None, b"d"], pa.binary())
    path = shard(raw.view(pa.string()), "text", group_rows=4)

    records = opened("text", holds_text=True).read_unit(0)

    assert records.bad_B.tolist() == [False, True, True, False]
    assert records.reason.startswith(f"{path}: row group 0: row 1: column 'text' is not UTF-8")
    assert texts(records) == ["a", "", "", "d"]


def test_a_missing_column_is_named_with_those_there(shard, opened):
    path = shard(pa.array(LISTS))

    with pytest.raises(ConfigError, match=f"{path}: has no column 'txet'; it has id, tokens"):
        opened("txet", holds_text=True)


@pytest.mark.parametrize(
    ("column", "holds_text", "reason"),
    [
        ("id", True, "is int64, not text"),
        ("tokens", True, "is list<.*>, not text .* use the key tokens"),
        ("id", False, "is int64, not token ids"),
    ],
)
def test_a_column_of_another_type_is_refused(shard, opened, column, holds_text, reason):
    shard(pa.array(LISTS))

    with pytest.raises(ConfigError, match=reason):
        opened(column, holds_text)


def test_floats_are_no_token_ids(shard, opened):
    shard(pa.array([[1.0]]))

    with pytest.raises(ConfigError, match="not token ids"):
        opened()


def test_an_empty_file_is_no_parquet(tmp_path, opened):
    (tmp_path / "a.parquet").write_bytes(b"")

    with pytest.raises(IntegrityError, match=r"a\.parquet: footer: cannot be decoded"):
        opened()


def test_footers_are_read_once_for_all_openings(shard, opened, tmp_path, monkeypatch):
    shard(pa.array(LISTS))
    cache = IndexCache(folder=tmp_path / "cache", source="web")
    first = opened(cache=cache).units()
    monkeypatch.setattr(ParquetFormat, "_index", lambda self, file: pytest.fail("read again"))

    second = opened(cache=cache).units()

    assert second.rows_U.tolist() == first.rows_U.tolist()


def test_a_large_row_group_may_come_in_several_chunks(opened, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"tokens": pa.chunked_array([[[1], [2]], [[3]]])})
    pq.write_table(table, path)

    assert sequences(opened().read_unit(0)) == [[1], [2], [3]]


IMAGES = [[b"a" * 300, b"b" * 100], [], [b"c" * 300], None, [b"c" * 300]]


def images_of(records):
    return [records.others[ENCODED][i].tobytes() for i in range(len(records.column))]


@pytest.fixture
def with_images(tmp_path, opened):
    def open_images(cells, **options):
        column = pa.array(cells, pa.list_(pa.binary()))
        table = pa.table({"text": ["x"] * len(cells), "images": column})
        pq.write_table(table, tmp_path / "a.parquet", **options)
        transforms = [{"type": "images", "patch": 2, "placeholder": 0}]
        return opened("text", holds_text=True, images="images", transforms=transforms)

    return open_images


@pytest.mark.parametrize("rows", [5, 50])
def test_images_of_a_row_group_are_read_whole_however_many_at_a_time(with_images, rows):
    cells = [IMAGES[i % 5] for i in range(rows)]

    records = with_images(cells, row_group_size=rows).read_unit(0)

    assert images_of(records) == [b"".join(cell or []) for cell in cells]


def test_images_that_are_too_much_for_memory_are_refused_by_the_footer(with_images, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_UNIT_BYTES", 600)
    plain = {"use_dictionary": False, "write_statistics": False}

    with pytest.raises(
        ConfigError, match=r"row group 0 holds .* of images or more.* at most 600 B"
    ):
        with_images(IMAGES, row_group_size=5, **plain)
    assert with_images(IMAGES, row_group_size=1, **plain).units().rows_U.sum() == 5


def test_an_image_that_a_dictionary_holds_for_many_rows_is_counted_as_often(
    with_images, monkeypatch
):
    monkeypatch.setattr(parquet, "MAX_UNIT_BYTES", 20_000)
    reader = with_images([[b"c" * 1000]] * 1000, row_group_size=1000)
    small = (reader.units().rows_U.sum(), reader.units().rows_U.max())
    held_before = pa.total_allocated_bytes()

    with pytest.raises(ConfigError, match=r"row group 0 holds .* write it with fewer rows"):
        reader.read_unit(0)

    assert small == (1000, 1000)
    assert pa.total_allocated_bytes() - held_before < 500_000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(max_size=30) | st.none(), min_size=1, max_size=40),
    st.integers(1, 15),
    st.sampled_from([1, 40, 1 << 20]),
    st.booleans(),
    st.sampled_from(["none", "zstd"]),
    st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]),
)
def test_texts_are_those_that_pyarrow_reads_however_many_are_decoded_at_once(
    shard, opened, column, group_rows, at_once, dictionary, codec, kind
):
    path = shard(
        pa.array(column, kind),
        "text",
        group_rows,
        use_dictionary=dictionary,
        compression=codec,
        data_page_size=16,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parquet, "_TEXT_AT_ONCE", at_once)
        patched.setattr(parquet, "_PAGE_ROWS", 1)
        reader = opened("text", holds_text=True)
        read = [reader.read_unit(unit) for unit in range(len(reader.units()))]

    stored = pq.read_table(path)["text"].to_pylist()
    assert [t for records in read for t in texts(records)] == [t or "" for t in stored]
    assert np.concatenate([r.bad_B for r in read]).tolist() == [t is None for t in stored]


def test_a_dictionary_says_less_than_its_texts_take(shard, opened):
    shard(["a long text" * 20_000] * 9, "text", group_rows=9, use_dictionary=True)

    assert texts(opened("text", holds_text=True).read_unit(0)) == ["a long text" * 20_000] * 9


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_a_text_that_is_not_utf8_is_found_wherever_it_is_decoded(
    shard, opened, monkeypatch, at_once
):
    monkeypatch.setattr(parquet, "_TEXT_AT_ONCE", at_once)
    monkeypatch.setattr(parquet, "_PAGE_ROWS", 1)
    raw = pa.array([b"one", b"two", None, b"a\xff", b"five"], pa.binary())
    shard(raw.view(pa.string()), "text", group_rows=5)

    records = opened("text", holds_text=True).read_unit(0)

    assert records.bad_B.tolist() == [False, False, True, True, False]
    assert "row 2: column 'text' is null" in records.reason
    assert texts(records.first(2)) == ["one", "two"]


@pytest.mark.parametrize(("letters", "rows"), [(300, [4, 4, 2]), (6_000, [1] * 10)])
def test_whole_pages_are_decoded_at_once_unless_they_are_large(
    shard, opened, monkeypatch, letters, rows
):
    sizes = {"_TEXT_AT_ONCE": 1_000, "_MOST_AT_ONCE": 16_000, "_PAGE_ROWS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(parquet, name, size)
    decoded = []
    monkeypatch.setattr(
        parquet, "lying", lambda texts, wide: decoded.append(len(texts)) or lying(texts, wide)
    )
    shard(["a" * letters] * 10, "text", group_rows=10, use_dictionary=False)

    assert texts(opened("text", holds_text=True).read_unit(0)) == ["a" * letters] * 10
    assert decoded == rows


SHARED = ["é" * 10_000, None, "", "b"]


def test_rows_that_share_texts_are_copied_out_of_their_dictionary_which_is_looked_at_once(
    shard, opened, monkeypatch
):
    looked = []
    monkeypatch.setattr(
        parquet, "is_utf8", lambda values_V, _: looked.append(len(values_V)) or True
    )
    path = shard(SHARED * 30, "text", group_rows=60)
    reader = opened("text", holds_text=True)
    before = pa.total_allocated_bytes()

    read = [reader.read_unit(unit) for unit in range(2)]

    assert [texts(records) for records in read] == [[text or "" for text in SHARED] * 15] * 2
    assert [np.flatnonzero(r.bad_B).tolist() for r in read] == [list(range(1, 60, 4))] * 2
    assert read[1].reason == f"{path}: row group 1: row 1: column 'text' is null"
    assert looked == [20_001] * 2
    assert pa.total_allocated_bytes() - before < 1.1 * 2 * 15 * 20_001


def test_rows_with_texts_of_their_own_are_read_without_their_dictionary_from_the_second_on(
    shard, opened, monkeypatch
):
    shard([f"text {i}" for i in range(6)], "text", group_rows=3)
    reader = opened("text", holds_text=True)
    assert texts(reader.read_unit(0)) == ["text 0", "text 1", "text 2"]

    monkeypatch.setattr(parquet, "Pieces", lambda columns: pytest.fail("by numbers"))

    assert texts(reader.read_unit(1)) == ["text 3", "text 4", "text 5"]


def test_a_number_that_its_dictionary_does_not_have_is_a_damaged_row_group(shard, opened):
    column = ["a" * 50, "b" * 50, "c" * 50] * 8
    path = shard(column, "text", group_rows=24, compression="none", write_statistics=False)
    # Numbers of two bits each, 0 1 2 0 and so on: the first four become 3.
    numbers, written = b"\x24\x49\x92\x24\x49\x92", path.read_bytes()
    assert written.count(numbers) == 1
    path.write_bytes(written.replace(numbers, b"\xff" + numbers[1:]))

    with pytest.raises(IntegrityError, match=r"row group 0: cannot be decoded"):
        opened("text", holds_text=True).read_unit(0)


def test_a_column_that_its_row_group_has_under_another_name_is_read_by_its_place(shard, opened):
    path = shard(SHARED, "text", group_rows=4)
    written = path.read_bytes()
    # The name occurs in the schema and in the row group; a letter is wrong only in the second.
    at = written.rindex(b"text", 0, written.index(b"ARROW:schema"))
    assert written.count(b"text", 0, at) == 1
    path.write_bytes(written[:at] + b"texu" + written[at + 4 :])

    records = opened("text", holds_text=True).read_unit(0)

    assert texts(records) == [text or "" for text in SHARED]


def test_a_row_group_without_rows_gives_none(shard, opened):
    shard(pa.array([], pa.string()), "text")
    reader = opened("text", holds_text=True)

    assert [texts(reader.read_unit(unit)) for unit in range(len(reader.units()))] == [[]]


def test_what_stands_beside_texts_keeps_to_their_rows(shard, opened, monkeypatch):
    monkeypatch.setattr(parquet, "_TEXT_AT_ONCE", 1)
    monkeypatch.setattr(parquet, "_PAGE_ROWS", 1)
    shard(["one", "two", "three"], "text", group_rows=3, use_dictionary=False)

    # The text itself among them: it is then read as a condition too.
    conditions = {"id": (1, 2), "text": ("one", "two")}
    records = opened("text", holds_text=True, where=conditions).read_unit(0)

    assert texts(records) == ["one", "two", "three"]
    assert records.kept_B.tolist() == [False, True, False]


def test_texts_of_a_row_group_that_no_row_of_is_asked_for_are_not_decoded(
    shard, opened, monkeypatch
):
    monkeypatch.setattr(parquet, "_LEAST_LOOKED", 0)
    path = shard(["one", "two", "three"], "text", group_rows=2, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data = bytearray(path.read_bytes())
    # A read of the texts would find the damage.
    data[chunk.data_page_offset + chunk.total_compressed_size // 4] ^= 0xFF
    path.write_bytes(data)
    reader = opened("text", holds_text=True, where={"id": 2})

    none, one = reader.read_unit(0), reader.read_unit(1)

    assert texts(none) == ["", ""]
    assert none.kept_B.tolist() == [False, False]
    assert not none.bad_B.any()
    assert texts(one) == ["three"]


def test_rows_that_nobody_asks_for_have_all_columns(tmp_path, monkeypatch):
    rows = {
        "meta": [{"lang": "de", "text": "ein"}, {"lang": None, "text": "zwei"}],
        "ids": pa.array([[1, 2], [3]], pa.list_(pa.uint16())),
        "mask": [[1, 0], [1]],
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "number": [1, 2],
        "images": pa.array([[b"ab"], [b"c", b"d"]], pa.list_(pa.binary())),
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    files = find_files(["*.parquet"], tmp_path, source="web")
    tags = {"tag": {"column": "name", "dtype": "text", "of": "samples"}}
    images = [{"type": "images", "patch": 2, "placeholder": 0}]
    kinds = [
        {"text": "meta.text", "images": "images", "transforms": images, "columns": tags},
        {"tokens": "ids", "key": "number", "columns": {"loss_mask": "mask", **tags}},
    ]
    for kind in kinds:
        config = ParquetSource(type="parquet", path="*.parquet", where={"meta.lang": "en"}, **kind)
        decoded = ParquetFormat(files, config).read_unit(0)
        monkeypatch.setattr(parquet, "_LEAST_LOOKED", 0)
        looked = ParquetFormat(files, config).read_unit(0)
        monkeypatch.undo()

        assert not looked.usable_B.any()
        assert not decoded.usable_B.any()
        assert looked.others.keys() == decoded.others.keys()
        for name, column in looked.others.items():
            assert len(column) == 2
            assert column.values_V.dtype == decoded.others[name].values_V.dtype
        assert looked.column.values_V.dtype == decoded.column.values_V.dtype
        assert (looked.keys_B is None) == (decoded.keys_B is None)
