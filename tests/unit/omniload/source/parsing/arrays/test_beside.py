"""Columns in files next to those of token ids, as numpy writes them."""

import os

import fsspec
import numpy as np
import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import DOCUMENT_STARTS, LOSS_MASK
from omniload.mix.sources import NumpySource
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

IDS = [5, 6, 0, 7, 8, 9, 0, 4, 4, 0, 3]
DOCUMENTS = [[5, 6, 0], [7, 8, 9, 0], [4, 4, 0], [3]]
MASK = [0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1]


def a_source(**changes):
    said = {
        "type": "numpy",
        "path": "*.npy",
        "end_of_document": 0,
        "shuffle": {"method": "none"},
        "columns": {"loss_mask": "*.mask.npy"},
    }
    said |= changes
    return NumpySource.model_validate({k: v for k, v in said.items() if v is not None})


def written(folder, ids=IDS, dtype=np.uint16, **columns):
    np.save(folder / "a.npy", np.array(ids, dtype))
    for name, values in columns.items():
        np.save(folder / f"a.{name}.npy", values)


def opened(folder, config):
    return open_format(SourceSpec("web", config, base_dir=folder))


@pytest.mark.parametrize("stored", [np.bool_, np.uint8, np.int64, ">i2"])
def test_a_mask_is_cut_as_its_documents_are(tmp_path, stored):
    written(tmp_path, mask=np.array(MASK, stored))

    records = opened(tmp_path, a_source()).format.read_unit(0)

    masks = [records.others[LOSS_MASK][i].astype(int).tolist() for i in range(4)]
    assert [records.column[i].tolist() for i in range(4)] == DOCUMENTS
    assert masks == [[0, 1, 1], [1, 1, 0, 1], [1, 1, 0], [1]]
    assert not records.bad_B.any()


def test_every_unit_has_the_values_of_its_own_tokens_and_records(tmp_path):
    written(tmp_path, w=np.arange(len(IDS), dtype=np.float32), year=np.arange(2000, 2004))
    columns = {
        "w": {"column": "*.w.npy"},
        "year": {"column": "*.year.npy", "dtype": "int64", "of": "samples"},
    }

    found = opened(tmp_path, a_source(columns=columns, unit=4)).format

    units = [found.read_unit(u) for u in range(len(found.units()))]
    values, years = (
        [next(c for n, c in unit.others.items() if n.startswith(name)) for unit in units]
        for name in ("w:", "year:")
    )
    assert len(units) == 4
    assert [each.values_V.tolist() for each in values] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10]]
    assert [each.values_V.tolist() for each in years] == [[2000], [2001], [2002], [2003]]


def test_of_rows_that_hold_documents_no_first_token_is_trained_on(tmp_path):
    written(tmp_path, mask=np.ones(len(IDS), np.bool_))

    records = opened(tmp_path, a_source(row_tokens=5)).format.read_unit(0)

    masks = [records.others[LOSS_MASK][i].astype(int).tolist() for i in range(3)]
    assert [records.others[DOCUMENT_STARTS][i].tolist() for i in range(3)] == [[3], [2], []]
    assert masks == [[1, 1, 1, 0, 1], [1, 1, 0, 1, 1], [0]]


def test_of_a_matrix_a_column_is_a_matrix_or_one_run(tmp_path):
    ids = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for mask in (ids % 2, (ids % 2).reshape(-1)):
        written(tmp_path, ids=ids, mask=mask)
        found = opened(tmp_path, a_source(end_of_document=None))
        records = found.format.read_unit(0)
        assert records.others[LOSS_MASK].lengths_N.tolist() == [4, 4, 4]
        assert records.others[LOSS_MASK].values_V.astype(int).tolist() == [0, 1] * 6


@pytest.mark.parametrize("shape", [(4, 3), (12, 1), (1, 12), (3, 2, 2)])
def test_a_matrix_of_another_shape_than_its_tokens_is_refused_with_both(tmp_path, shape):
    written(tmp_path, ids=np.arange(12).reshape(3, 4), mask=np.ones(shape, np.bool_))

    with pytest.raises(IntegrityError) as caught:
        opened(tmp_path, a_source(end_of_document=None))

    assert f"a.mask.npy: has the shape {shape}, and {tmp_path / 'a.npy'} (3, 4)" in str(
        caught.value
    )
    assert "columns.loss_mask" in str(caught.value)


def test_tokens_in_one_run_have_no_rows_that_those_of_a_column_could_differ_from(tmp_path):
    written(tmp_path, mask=np.array(MASK, np.uint8).reshape(11, 1))

    records = opened(tmp_path, a_source()).format.read_unit(0)

    assert records.others[LOSS_MASK].values_V.astype(int).tolist() == MASK


def test_a_byte_that_is_no_truth_is_one_bad_record(tmp_path):
    values = np.array(MASK, np.uint8)
    values[4] = 2
    written(tmp_path, mask=values.view(np.bool_))

    records = opened(tmp_path, a_source()).format.read_unit(0)

    assert records.bad_B.tolist() == [False, True, False, False]
    assert records.reason.endswith("a.npy: record 1: loss_mask holds 2, not 0 or 1")


def test_a_check_sees_a_mask_that_is_none(tmp_path):
    written(tmp_path, mask=np.full(len(IDS), 7))

    first = opened(tmp_path, a_source()).format.first_records()

    assert "record 0: loss_mask holds 7, not 0 or 1" in first.reason


FAULTS = {
    "another length": (np.ones(10, np.bool_), IntegrityError, "holds 10 values .* 11 tokens"),
    "objects, which are a pickle": (
        np.array([{}] * 11, object),
        ConfigError,
        "is an array of object, and columns.loss_mask is of numbers",
    ),
    "texts": (np.array(["a"] * 11), ConfigError, "is an array of <U1"),
    "reals": (np.ones(11), ConfigError, "holds float64, and columns.loss_mask is of bool"),
    "a matrix of columns": (
        np.asfortranarray(np.ones((1, 11), np.uint8).repeat(2, 0)),
        ConfigError,
        "is an array of uint8 in Fortran order",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_is_no_such_column_is_refused(tmp_path, name):
    values, kind, said = FAULTS[name]
    written(tmp_path)
    np.save(tmp_path / "a.mask.npy", values, allow_pickle=True)

    with pytest.raises(kind, match=rf"a\.mask\.npy: {said}"):
        opened(tmp_path, a_source())


def test_a_number_for_each_record_is_counted_by_records(tmp_path):
    written(tmp_path, year=np.arange(5))
    year = {"column": "*.year.npy", "dtype": "int64", "of": "samples"}

    with pytest.raises(IntegrityError, match=r"holds 5 values of columns\.year, .* 4 records"):
        opened(tmp_path, a_source(columns={"year": year}))


def test_a_flat_file_that_is_cut_short_is_told_as_that(tmp_path):
    written(tmp_path)
    (tmp_path / "a.mask.npy").write_bytes(bytes(MASK))
    assert opened(tmp_path, a_source()).format.read_unit(0).others[LOSS_MASK].lengths_N.sum() == 11
    weight = {"w": {"column": "*.w.bin", "dtype": "float32"}}
    (tmp_path / "a.w.bin").write_bytes(bytes(43))

    with pytest.raises(IntegrityError, match=r"a\.w\.bin: 10 values of float32 .* and it has 43"):
        opened(tmp_path, a_source(path="a.npy", columns=weight))


def test_a_file_that_is_missing_is_told_with_the_one_that_it_belongs_to(tmp_path):
    written(tmp_path)

    with pytest.raises(
        ConfigError,
        match=r"a\.mask\.npy: is not there, and columns\.loss_mask is read from it beside .*a\.npy",
    ):
        opened(tmp_path, a_source())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkdir, "it is a folder, and columns"),
        (os.mkfifo, r"it is a pipe, which .*, and columns"),
    ],
)
def test_what_is_no_file_in_the_place_of_one_is_told_as_what_it_is(tmp_path, make, said):
    written(tmp_path)
    make(tmp_path / "a.mask.npy")

    with pytest.raises(ConfigError, match=rf"a\.mask\.npy: {said}\.loss_mask is read") as caught:
        opened(tmp_path, a_source())

    assert "not there" not in str(caught.value)
    assert "pattern" not in str(caught.value)


def test_where_every_file_is_called_as_a_column_nothing_is_read(tmp_path):
    written(tmp_path)

    with pytest.raises(ConfigError, match=r"holds no token; rename the files of the column"):
        opened(tmp_path, a_source(columns={"loss_mask": "*.npy", "w": {"column": "*.npy"}}))


def test_values_are_guarded_as_their_tokens_are(tmp_path):
    written(tmp_path, mask=np.array(MASK))
    source = open_source(SourceSpec("web", a_source(), base_dir=tmp_path))
    status = (tmp_path / "a.mask.npy").stat()
    os.utime(tmp_path / "a.mask.npy", ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    with pytest.raises(IntegrityError, match=r"a\.mask\.npy: changed since the source was opened"):
        source.read(0, 4)


def test_a_store_has_the_files_beside_too(tmp_path):
    written(tmp_path, mask=np.array(MASK))
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/", "/beside/", recursive=True)
    try:
        here, there = (
            opened(tmp_path, a_source(path=path)).format.read_unit(0)
            for path in ("*.npy", "memory://beside/*.npy")
        )
    finally:
        store.store.clear()
        store.pseudo_dirs[:] = [""]

    assert here.others[LOSS_MASK].values_V.tolist() == there.others[LOSS_MASK].values_V.tolist()
    assert len(there.column) == 4


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"loss_mask": "mask.npy"}, "write \\* once"),
        ({"loss_mask": "../*.npy"}, "write \\* once"),
        ({"loss_mask": "/abs/*.npy"}, "write \\* once"),
        ({"loss_mask": "**/mask.npy"}, "write \\* once"),
        ({"loss_mask": "*"}, "write \\* once"),
        ({"scores": "*.s.npy"}, "there are loss_mask and columns of yours"),
        (
            {"lang": {"column": "*.l.npy", "dtype": "text", "of": "samples"}},
            "a file beside token ids holds numbers",
        ),
    ],
)
def test_a_name_that_is_of_no_file_beside_each_is_refused(columns, said):
    with pytest.raises(ValidationError, match=said):
        a_source(columns=columns)


def test_without_columns_a_source_is_written_as_before():
    assert "columns" not in a_source(columns=None).model_dump(mode="json")
