"""Archives, arrays and indexed data sets that others write, against what others read , in every order."""

import io
import struct
import tarfile
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_contract import expected_tokens

SOURCE = TypeAdapter(SourceConfig)
METHODS = ("none", "shards", "block", "units", "full")
UNITS = st.sampled_from([1, 40, 3_000, 1 << 20])
TYPES = ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u4", "<i8", ">i8", ">u8"]
MEGATRON_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
seldom = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture
def folder(tmp_path):
    def emptied():
        for path in tmp_path.iterdir():
            path.unlink()
        return tmp_path

    return emptied


def records_of(source, start, stop):
    """Return the records of positions; ``None`` is a bad one, and an empty one gives no sample."""
    block = source.read(start, stop)
    found = dict.fromkeys(range(start, stop), ())
    found |= dict.fromkeys(block.table.bad_N.tolist())
    for i, position in enumerate(block.table.positions_N.tolist()):
        found[position] = tuple(block.tokens[i].tolist())
    return found, sorted(block.table.places)


def require_records(folder, expected, draw, **config):
    """Hold a source against its records in the order of the files, ``None`` being a bad one."""
    skip = {"policy": "skip", "limit": "100%"}
    count, told = len(expected), None
    for method in METHODS:
        keys = {"shuffle": {"method": method}, "on_error": skip, "path": "*", **config}
        spec = SourceSpec(
            "web",
            SOURCE.validate_python(keys),
            seed=3,
            tokenizer=ByteTokenizer(type="bytes"),
            base_dir=folder,
        )
        source = open_source(spec)
        assert source.positions_per_epoch == count
        found, places = records_of(source, 0, count)
        if method == "none":
            assert list(found.values()) == expected
            told = places
        assert sorted(found.values(), key=str) == sorted(expected, key=str)
        assert places == told
        assert len(places) == expected.count(None)
        start = draw(st.integers(0, 2 * count - 1))
        stop = draw(st.integers(start + 1, 2 * count))
        whole, _ = records_of(source, 0, 2 * count)
        resumed, _ = records_of(open_source(spec), start, stop)
        assert resumed == {at: whole[at] for at in range(start, stop)}


def ids_of(array):
    values = [int(value) for value in array]
    return tuple(values) if all(0 <= value < 1 << 31 for value in values) else None


def drawn_ids(draw, dtype, most=40):
    largest = [1 << 31] if dtype.itemsize == 8 or dtype.str in {"<u4", ">u4"} else []
    below = [-1] if dtype.kind == "i" else []
    ids = st.sampled_from([0, 1, 7, 7, 99, *largest, *below])
    return np.array(draw(st.lists(ids, max_size=most)), dtype)


NAMES = st.sampled_from(["a", "b", "./c", "d.ir/e", "é/" + "p" * 90 + "/f", "g" * 120])
HELD = st.sampled_from([b"", b"one", "é\n".encode() * 300, b"x" * 512, b"\0", b"\xff"])


@given(data=st.data())
@seldom
def test_samples_of_an_archive_are_those_that_tarfile_reads(folder, data):
    held, expected = folder(), []
    for shard in range(data.draw(st.integers(1, 2))):
        path = held / f"{shard}.tar"
        kind = data.draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
        with tarfile.open(path, "w", format=kind) as archive:
            for number in range(data.draw(st.integers(0, 6))):
                stem = f"{data.draw(NAMES)}{number}"
                for extension in data.draw(st.permutations(["txt", "seg.json", "CLS"]))[:2]:
                    content = data.draw(HELD)
                    info = tarfile.TarInfo(f"{stem}.{extension}")
                    info.size = len(content)
                    if kind == tarfile.PAX_FORMAT:
                        info.pax_headers = data.draw(
                            st.sampled_from([{}, {"comment": "é=\n" * 99}])
                        )
                    archive.addfile(info, io.BytesIO(content))
        with tarfile.open(path) as archive:
            members = [
                (
                    each.name.rpartition("/")[2].partition("."),
                    each.name,
                    archive.extractfile(each).read(),
                )
                for each in archive
            ]
        for _, sample in groupby(members, lambda each: (each[1].rpartition("/")[0], each[0][0])):
            texts = [content for (_, _, extension), _, content in sample if extension == "txt"]
            expected.append(text_of(texts))
    if expected:
        require_records(held, expected, data.draw, type="webdataset", unit=data.draw(UNITS))


def text_of(texts):
    try:
        return expected_tokens(texts[0].decode()) if texts[0] else ()
    except (IndexError, UnicodeDecodeError):
        return None


@given(data=st.data())
@seldom
def test_documents_and_rows_of_arrays_are_those_that_numpy_cuts(folder, data):
    held, expected = folder(), []
    dtype, row = np.dtype(data.draw(st.sampled_from(TYPES))), data.draw(st.integers(1, 9))
    is_cut_in_rows = data.draw(st.booleans())
    for shard in range(data.draw(st.integers(1, 3))):
        ids = drawn_ids(data.draw, dtype)
        np.save(held / f"{shard}.npy", ids)
        ends = np.arange(row, len(ids), row) if is_cut_in_rows else np.flatnonzero(ids == 7) + 1
        expected += [ids_of(part) for part in np.split(ids, ends) if len(part)]
    cut = {"row_tokens": row} if is_cut_in_rows else {"end_of_document": 7}
    if expected:
        require_records(held, expected, data.draw, type="numpy", unit=data.draw(UNITS), **cut)


@given(data=st.data())
@seldom
def test_documents_of_an_indexed_data_set_are_the_sequences_that_it_says(folder, data):
    held, expected = folder(), []
    code = data.draw(st.sampled_from(list(MEGATRON_CODES)))
    dtype = np.dtype(MEGATRON_CODES[code])
    for shard in range(data.draw(st.integers(1, 2))):
        ids = drawn_ids(data.draw, dtype)
        bounds = st.lists(st.integers(0, len(ids)), max_size=6)
        firsts = np.array([0, *sorted(data.draw(bounds)), len(ids)])  # of sequences, some empty
        count = len(firsts) - 1
        inner = st.lists(st.integers(0, count), max_size=5)
        documents = [0, *sorted(data.draw(inner)), count]
        (held / f"{shard}.bin").write_bytes(ids.tobytes())
        (held / f"{shard}.idx").write_bytes(
            b"MMIDIDX\0\0"
            + struct.pack("<QBQQ", 1, code, count, len(documents))
            + np.diff(firsts).astype("<i4").tobytes()
            + (firsts[:-1] * dtype.itemsize).astype("<i8").tobytes()
            + np.array(documents, "<i8").tobytes()
        )
        expected += [ids_of(ids[firsts[i] : firsts[j]]) for i, j in pairwise(documents)]
    unit = data.draw(UNITS)
    require_records(held, expected, data.draw, type="megatron", unit=unit, path="*.bin")
