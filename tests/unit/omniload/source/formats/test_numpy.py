"""Token ids in files of numpy's."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.sources import NumpySource
from omniload.source.formats import numpy as numpy_format
from omniload.source.formats.numpy import NumpyFormat
from omniload.source.patterns import find_files


def test_first_records_are_those_of_the_first_shard_that_holds_any(tmp_path):
    for name, ids in (("a", []), ("b", [5, 6, 0, 7, 0])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
    files = find_files(["*.npy"], tmp_path, source="web")
    config = NumpySource(type="numpy", path="*.npy", end_of_document=0)

    first = NumpyFormat(files, config).first_records()

    assert [first.column[i].tolist() for i in range(len(first.column))] == [[5, 6, 0], [7, 0]]
    assert len(NumpyFormat(files[:1], config).first_records().column) == 0


@pytest.mark.parametrize("kind", ["uint16", "int16"])
def test_an_end_of_documents_that_no_id_of_the_file_can_be_is_refused(tmp_path, kind):
    np.save(tmp_path / "a.npy", np.array([5, 6, 0], kind))
    files = find_files(["*.npy"], tmp_path, source="web")
    largest = int(np.iinfo(kind).max)

    assert NumpyFormat(
        files, NumpySource(type="numpy", path="*.npy", end_of_document=largest)
    ).units().rows_U.tolist() == [1]
    with pytest.raises(ConfigError, match=rf"ids of {kind}, up to {largest}.* {largest + 1}"):
        NumpyFormat(files, NumpySource(type="numpy", path="*.npy", end_of_document=largest + 1))


IDS = [*range(1, 90), 0] * 3
WIDTHS = {
    "narrower than they are": (
        "int32",
        "uint16",
        "every second one .* read as uint16: say dtype: uint32",
    ),
    "of 64 bits": ("int64", "uint32", "every second one .* read as uint32: say dtype: int64"),
    "of 16 bits as bytes": (
        "uint16",
        "uint8",
        "every second one .* read as uint8: say dtype: uint16",
    ),
    "wider than they are": (
        "uint16",
        "int32",
        "go up to 5,767,255, .* read as int32: say dtype: uint16",
    ),
    "as they are": ("uint16", "uint16", ""),
    "of 64 bits, documents of a token": ("int64", "int64", ""),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_ids_that_look_as_if_they_had_another_width_are_doubted(tmp_path, monkeypatch, name):
    monkeypatch.setattr(numpy_format, "_LARGEST_VOCABULARY", 1 << 22)
    written, read, said = WIDTHS[name]
    ids = np.repeat(IDS, 2) * ([1, 0] * len(IDS)) if "of a token" in name else IDS
    np.array(ids, written).tofile(tmp_path / "a.bin")
    config = NumpySource(type="numpy", path="a.bin", dtype=read, end_of_document=0)

    doubt = NumpyFormat(find_files(["a.bin"], tmp_path, source="web"), config).doubt()

    assert re.search(said, doubt) if said else doubt == ""


def test_shards_in_which_no_document_ends_are_doubted(tmp_path):
    for name, ids in (("a", [*IDS]), ("b", [*IDS]), ("c", [5, 6, 200])):
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
    files = find_files(["*.npy"], tmp_path, source="web")

    def doubt(end, files=files):
        config = NumpySource(type="numpy", path="*.npy", end_of_document=end)
        return NumpyFormat(files, config).doubt()

    assert (
        "a.npy: end_of_document 200 does not occur among its 270 ids, so they are one document, and 2"
        in doubt(200)
    )
    assert "name the token that ends documents there" in doubt(200, files[:1])
    # One document that ends, and rows, which need no end.
    assert doubt(200, files[2:]) == doubt(0, files[:2]) == ""


def test_ids_that_no_width_of_theirs_explains_say_that_dtype_may_be_wrong(tmp_path):
    np.full(8, 1 << 15, np.uint16).tofile(tmp_path / "a.bin")
    config = NumpySource(type="numpy", path="a.bin", dtype="uint32", end_of_document=0)

    records = NumpyFormat(find_files(["a.bin"], tmp_path, source="web"), config).read_unit(0)

    assert records.bad_B.all()
    assert f"a.bin: record 0: holds token id {0x80008000}; a token id is" in records.reason
    assert records.reason.endswith("(or correct dtype and header)")


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "<u4", ">u8", "<i2", "i1"])
def test_a_document_with_what_is_no_token_id_is_one_bad_record(tmp_path, dtype):
    kind = np.dtype(dtype)
    odd = -3 if kind.kind == "i" else 1 << 31
    ids = np.array([5, 0, 6, odd, 0, 7, 0, 8, 0, odd, 0, 9, 0], kind)
    np.save(tmp_path / "a.npy", ids)
    config = NumpySource(type="numpy", path="a.npy", end_of_document=0, unit=4 * kind.itemsize)
    opened = NumpyFormat(find_files(["a.npy"], tmp_path, source="web"), config)

    units = [opened.read_unit(unit) for unit in range(len(opened.units()))]

    assert len(units) > 1
    assert [bad for unit in units for bad in unit.bad_B] == [False, True, False, False, True, False]
    # By its number in the file, wherever its unit begins.
    said = [
        f"a.npy: record {i}: holds token id {odd};" in unit.reason
        for i, unit in zip((1, 4), (unit for unit in units if unit.reason), strict=True)
    ]
    assert said == [True, True]
    sound = [u.column[i].tolist() for u in units for i in np.flatnonzero(~u.bad_B)]
    assert sound == [[5, 0], [7, 0], [8, 0], [9, 0]]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_that_numpy_writes_is_read(tmp_path, version):
    with (tmp_path / "a.npy").open("wb") as out:
        np.lib.format.write_array(out, np.array([5, 6, 0, 7, 0], np.uint16), version=version)
    files = find_files(["a.npy"], tmp_path, source="web")
    config = NumpySource(type="numpy", path="a.npy", end_of_document=0)

    records = NumpyFormat(files, config).read_unit(0)

    assert [records.column[i].tolist() for i in range(2)] == [[5, 6, 0], [7, 0]]


def test_another_version_and_an_array_with_named_fields_are_told_as_what_they_are(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    later = bytearray((tmp_path / "a.npy").read_bytes())
    later[6] = 4
    (tmp_path / "a.npy").write_bytes(later)
    with (tmp_path / "b.npy").open("wb") as out:
        np.lib.format.write_array(out, np.zeros(4, [("Länge ✓", "u2")]), version=(3, 0))
    config = NumpySource(type="numpy", path="*.npy", end_of_document=0)

    def opened(name):
        return NumpyFormat(find_files([name], tmp_path, source="web"), config)

    with pytest.raises(
        IntegrityError, match=r"a\.npy: is of version 4\.0 of \.npy, and .* numpy\.save"
    ):
        opened("a.npy")
    with pytest.raises(ConfigError, match=r"b\.npy: is an array of .* token ids are integers"):
        opened("b.npy")


CHUNK = np.array([2, 16, 24, 28, 5, 6, 7], np.uint32)  # as litdata writes two documents


@pytest.mark.parametrize("name", ["chunk-0-0.bin", "chunk-3-17.bin"])
@pytest.mark.parametrize("row_tokens", [None, 4])
def test_a_chunk_of_litdata_is_refused_by_name_and_the_page_that_it_names_is_there(
    tmp_path, name, row_tokens
):
    CHUNK.tofile(tmp_path / name)
    (tmp_path / "index.json").write_text('{"chunks": [{"chunk_size": 2}], "config": {}}')
    files = find_files(["*.bin"], tmp_path, source="web")
    config = NumpySource(
        type="numpy", path="*.bin", dtype="uint16", end_of_document=0, row_tokens=row_tokens
    )

    with pytest.raises(ConfigError, match=rf"{name}: is a chunk of litdata.* write") as caught:
        NumpyFormat(files, config)
    (page,) = re.findall(r"docs/\S+\.md", str(caught.value))
    assert (Path(__file__).parents[5] / page).is_file()


@pytest.mark.parametrize(
    "index", [None, "", "[]", '{"shards": [], "version": 2}'], ids=["none", "empty", "list", "MDS"]
)
def test_a_flat_file_called_as_a_chunk_is_read_where_no_index_of_litdata_lies_beside_it(
    tmp_path, index
):
    np.array([5, 6, 0], np.uint16).tofile(tmp_path / "chunk-0-0.bin")
    if index is not None:
        (tmp_path / "index.json").write_text(index)
    files = find_files(["*.bin"], tmp_path, source="web")
    config = NumpySource(type="numpy", path="*.bin", dtype="uint16", end_of_document=0)

    assert NumpyFormat(files, config).units().rows_U.tolist() == [1]


def test_an_index_takes_no_memory_by_its_documents(tmp_path):
    documents = 8_000_000
    np.save(tmp_path / "a.npy", np.tile(np.array([5, 7], "<u2"), documents))
    config = NumpySource(type="numpy", path="*.npy", end_of_document=7)
    files = find_files(["*.npy"], tmp_path, source="web")

    tracemalloc.start()
    units = NumpyFormat(files, config).units()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert units.rows_U.sum() == documents
    assert peak < 12 * documents  # bytes; where each ends would be 24
