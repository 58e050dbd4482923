"""Archives, arrays and indexed data sets from other writers, compared with other readers, in every order."""

import io
import struct
import tarfile
from itertools import groupby, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.sources.every_order import UNITS, emptied, require_records, seldom
from tests.support.plane.sources.packed import PACKED, written
from tests.support.plane.sources.source_contract import expected_tokens

TYPES = ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u4", "<i8", ">i8", ">u8"]
MEGATRON_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


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
def test_samples_of_an_archive_are_those_that_tarfile_reads(tmp_path, data):
    held, expected = emptied(tmp_path), []
    for shard in range(data.draw(st.integers(1, 2))):
        out, suffix = io.BytesIO(), data.draw(st.sampled_from(list(PACKED)))
        kind = data.draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
        with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
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
        found = written(data.draw, held / f"{shard}.tar{suffix}", out.getvalue())
        with tarfile.open(fileobj=io.BytesIO(found)) as archive:
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
def test_documents_and_rows_of_arrays_are_those_that_numpy_cuts(tmp_path, data):
    held, expected = emptied(tmp_path), []
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
def test_documents_of_an_indexed_data_set_are_the_sequences_that_it_says(tmp_path, data):
    held, expected = emptied(tmp_path), []
    code = data.draw(st.sampled_from(list(MEGATRON_CODES)))
    dtype = np.dtype(MEGATRON_CODES[code])
    for shard in range(data.draw(st.integers(1, 2))):
        ids = drawn_ids(data.draw, dtype)
        ids[:1] = np.abs(ids[:1])  # a file that begins with -1 is reported as a stream of Arrow
        bounds = st.lists(st.integers(0, len(ids)), max_size=6)
        firsts = np.array(
            [0, *sorted(data.draw(bounds)), len(ids)]
        )  # bounds of sequences, some empty
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
