"""The same documents in shards of every format, for the benchmark of formats."""

import csv
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from benchmarks.loaders.mixed_sources import lengths_of

__all__ = ["END", "TEXT_FORMATS", "TOKEN_FORMATS", "Documents", "StoredFormat", "documents_of"]

END = 0
"""Token that ends every document and occurs nowhere else."""
_ROWS = 512
_WORDS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents of one shard."""

    ids: Sequence[NDArray[np.uint16]]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The way to write a shard, and the mix file's entry for all shards."""

    write: Callable[[Path, Documents], None]
    """Writes a shard; its path has no suffix."""
    source: Mapping[str, Any]


def documents_of(shard: int, count: int) -> Documents:
    """Return log-normal documents with a mean of about 650 tokens; a text has about the same number of letters."""
    rng = np.random.default_rng(shard)
    lengths = np.minimum(lengths_of(rng, count), 16_384).astype(np.int64)
    flat = rng.integers(1, _WORDS, int(lengths.sum())).astype(np.uint16)
    ids = list(np.split(flat, np.cumsum(lengths)[:-1]))
    for each in ids:
        each[-1] = END
    letters = rng.integers(97, 123, len(flat)).astype(np.uint8)
    letters[rng.random(len(flat)) < 0.15] = ord(" ")
    texts = [part.tobytes().decode() for part in np.split(letters, np.cumsum(lengths)[:-1])]
    return Documents(ids=ids, texts=texts)


def _lists(documents: Documents) -> pa.Table:
    offsets = np.cumsum([0, *map(len, documents.ids)]).astype(np.int32)
    flat = pa.array(np.concatenate(documents.ids).astype(np.int32))
    return pa.table({"ids": pa.ListArray.from_arrays(pa.array(offsets), flat)})


def _parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=_ROWS)


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(f"{path}.arrow", "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=_ROWS)


def _texts(documents: Documents) -> pa.Table:
    return pa.table({"text": pa.array(documents.texts, pa.string())})


def _megatron(path: Path, documents: Documents) -> None:
    lengths = np.array([len(ids) for ids in documents.ids], np.int32)
    pointers = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1])) * 2
    path.with_suffix(".bin").write_bytes(np.concatenate(documents.ids).tobytes())
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
        + lengths.tobytes()
        + pointers.astype(np.int64).tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    )


def _numpy(path: Path, documents: Documents) -> None:
    np.save(path.with_suffix(".npy"), np.concatenate(documents.ids))


def _flat(path: Path, documents: Documents) -> None:
    np.concatenate(documents.ids).astype(np.int32).tofile(path.with_suffix(".bin"))


def _mds(
    path: Path, samples: Sequence[bytes], encoding: str, compressor: zstandard.ZstdCompressor | None
) -> None:
    described = json.dumps({"column_names": ["value"]}).encode()
    parts = [struct.pack("<I", len(sample)) + sample for sample in samples]
    first = 4 + 4 * (len(parts) + 1) + len(described)
    offsets = first + np.cumsum([0, *map(len, parts)])
    data = (
        struct.pack("<I", len(parts))
        + offsets.astype("<u4").tobytes()
        + described
        + b"".join(parts)
    )
    name = f"{path.name}.mds"
    zipped = None if compressor is None else {"basename": f"{name}.zstd"}
    (path.parent / (zipped["basename"] if zipped else name)).write_bytes(
        data if compressor is None else compressor.compress(data)
    )
    entry = {
        "format": "mds",
        "version": 2,
        "samples": len(parts),
        "compression": None if zipped is None else "zstd",
        "zip_data": zipped,
        "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
        "column_names": ["value"],
        "column_encodings": [encoding],
        "column_sizes": [None],
    }
    index = path.parent / "index.json"
    shards = json.loads(index.read_text())["shards"] if index.exists() else []
    index.write_text(json.dumps({"version": 2, "shards": [*shards, entry]}))


def _mds_ids(path: Path, documents: Documents) -> None:
    arrays = [
        bytes([1 << 2 | 2]) + struct.pack("<I", len(ids)) + ids.tobytes() for ids in documents.ids
    ]
    _mds(path, arrays, "ndarray:uint16", None)


def _mds_texts(path: Path, documents: Documents) -> None:
    _mds(path, [text.encode() for text in documents.texts], "str", None)


def _mds_zstd(path: Path, documents: Documents) -> None:
    texts = [text.encode() for text in documents.texts]
    _mds(path, texts, "str", zstandard.ZstdCompressor())


def _webdataset(path: Path, documents: Documents) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w", format=tarfile.USTAR_FORMAT) as archive:
        for i, text in enumerate(documents.texts):
            data = text.encode()
            info = tarfile.TarInfo(f"{i:08}.txt")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _csv(path: Path, documents: Documents) -> None:
    with path.with_suffix(".csv").open("w", newline="") as out:
        writer = csv.writer(out, quoting=csv.QUOTE_ALL)
        writer.writerow(["text"])
        writer.writerows([text] for text in documents.texts)


def _jsonl(path: Path, documents: Documents) -> None:
    lines = b"".join(orjson.dumps({"text": text}) + b"\n" for text in documents.texts)
    path.with_suffix(".jsonl").write_bytes(lines)


def _jsonl_ids(path: Path, documents: Documents) -> None:
    lines = b"".join(orjson.dumps({"ids": ids.tolist()}) + b"\n" for ids in documents.ids)
    path.with_suffix(".jsonl").write_bytes(lines)


TOKEN_FORMATS: Mapping[str, StoredFormat] = {
    "parquet": StoredFormat(
        write=lambda path, documents: _parquet(_lists(documents), path),
        source={"type": "parquet", "tokens": "ids"},
    ),
    "arrow": StoredFormat(
        write=lambda path, documents: _arrow(_lists(documents), path),
        source={"type": "arrow", "tokens": "ids"},
    ),
    "megatron, uint16": StoredFormat(write=_megatron, source={"type": "megatron"}),
    "numpy, uint16": StoredFormat(write=_numpy, source={"type": "numpy", "end_of_document": END}),
    "numpy, flat int32": StoredFormat(
        write=_flat, source={"type": "numpy", "dtype": "int32", "end_of_document": END}
    ),
    "mds, uint16": StoredFormat(write=_mds_ids, source={"type": "mds", "tokens": "value"}),
    "jsonl": StoredFormat(write=_jsonl_ids, source={"type": "jsonl", "tokens": "ids"}),
}
"""Formats of token ids; parquet first."""

TEXT_FORMATS: Mapping[str, StoredFormat] = {
    "parquet": StoredFormat(
        write=lambda path, documents: _parquet(_texts(documents), path),
        source={"type": "parquet", "text": "text"},
    ),
    "arrow": StoredFormat(
        write=lambda path, documents: _arrow(_texts(documents), path),
        source={"type": "arrow", "text": "text"},
    ),
    "jsonl": StoredFormat(write=_jsonl, source={"type": "jsonl"}),
    "csv": StoredFormat(write=_csv, source={"type": "csv"}),
    "mds": StoredFormat(write=_mds_texts, source={"type": "mds", "text": "value"}),
    "mds, zstd": StoredFormat(write=_mds_zstd, source={"type": "mds", "text": "value"}),
    "webdataset": StoredFormat(write=_webdataset, source={"type": "webdataset"}),
}
"""Formats of text; parquet first."""
