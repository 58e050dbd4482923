"""Every kind of source with columns of a user's own: the library that writes it, and its entry in a mix file.

A kind has::

    write(path, records)   writes one shard, by the library that is usual for it
    config(**columns)      the mix file's entry for all shards of a folder; columns by name, as in ``COLUMNS``
    suffix                 suffix of its shards
    tokenizer              tokenizer of the mix, or None if records are token ids
    names                  the names in ``COLUMNS`` that it supports
    nulls                  whether a record may lack a value
"""

import csv
import gzip
import io
import json
import struct
import tarfile
from types import MappingProxyType
from typing import ClassVar

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.sources.own_columns import OwnColumn
from omniload.mix.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    LanceSource,
    MdsSource,
    NumpySource,
    ParquetSource,
    ShuffleConfig,
    WebDatasetSource,
)
from tests.support.plane.sources.source_contract import expected_tokens
from tests.support.plane.sources.source_kinds import MdsTexts

SHUFFLE = ShuffleConfig(block_units=2)
TAGS = ("lang", "year", "score", "flag")
COLUMNS = {
    "lang": {"dtype": "text", "of": "samples"},
    "year": {"dtype": "int64", "of": "samples"},
    "score": {"dtype": "float32", "of": "samples"},
    "flag": {"dtype": "bool", "of": "samples"},
    "weight": {"dtype": "float32", "of": "labels"},
    "kind": {"dtype": "int8"},
}
"""Columns by name, without the places from which a kind reads them."""
ARROW = {"lang": pa.string(), "year": pa.int64(), "score": pa.float64(), "flag": pa.bool_()}
NOWHERE_ELSE = MappingProxyType({})
"""For kinds that name their columns as in the mix file."""
PER_TOKEN = {"weight": pa.list_(pa.float64()), "kind": pa.list_(pa.int32())}


def own(names, columns, **more):
    """Return columns of a user's own by name, each read from the place in ``names``."""
    return {
        name: OwnColumn(column=names.get(name, name), **COLUMNS[name], **(said or {}), **more)
        for name, said in columns.items()
    }


def tokens_of(records):
    return [list(expected_tokens(record["text"])) for record in records]


class _Texts:
    tokenizer = ByteTokenizer(type="bytes")
    names, nulls = TAGS, True
    read_from = NOWHERE_ELSE


class _Ids:
    tokenizer = None
    names, nulls = (*TAGS, "weight", "kind"), True
    read_from = NOWHERE_ELSE


class _ArrowStream:
    suffix = ".arrow"

    def write(self, path, records):
        table = self.table(records)
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)


class _LanceDataset:
    suffix = ".lance"

    def write(self, path, records):
        mode = "overwrite" if path.exists() else "create"
        lance.write_dataset(self.table(records), path, mode=mode)


class ParquetTexts(_Texts):
    suffix = ".parquet"

    def table(self, records):
        columns = {"text": pa.array([r["text"] for r in records], pa.string())}
        return pa.table(
            columns | {n: pa.array([r[n] for r in records], t) for n, t in ARROW.items()}
        )

    def write(self, path, records):
        pq.write_table(self.table(records), path, row_group_size=8)

    def config(self, **columns):
        return ParquetSource(
            type="parquet", path="*.parquet", text="text", shuffle=SHUFFLE, columns=own({}, columns)
        )


class ParquetIds(_Ids, ParquetTexts):
    tokenizer = None
    names = (*TAGS, "weight", "kind")

    def table(self, records):
        ids = pa.array(tokens_of(records), pa.list_(pa.int32()))
        return pa.table(
            {"ids": ids}
            | {n: pa.array([r[n] for r in records], t) for n, t in (ARROW | PER_TOKEN).items()}
        )

    def config(self, **columns):
        return ParquetSource(
            type="parquet",
            path="*.parquet",
            tokens="ids",
            shuffle=SHUFFLE,
            columns=own({}, columns),
        )


class ArrowIds(_ArrowStream, ParquetIds):
    def config(self, **columns):
        return ArrowSource(
            type="arrow", path="*.arrow", tokens="ids", shuffle=SHUFFLE, columns=own({}, columns)
        )


class LanceIds(_LanceDataset, ParquetIds):
    def config(self, **columns):
        return LanceSource(
            type="lance",
            path="part-*.lance",
            tokens="ids",
            unit=1_000,
            shuffle=SHUFFLE,
            columns=own({}, columns),
        )


INSIDE = MappingProxyType(
    {"lang": "meta.lang", "year": "meta.year", "score": "meta.more.score", "flag": "meta.more.flag"}
)
"""Places of columns that lie inside other columns."""


def inside(record):
    """Return a record whose values are inside objects; an object is null if all its values are."""
    more = {name: record[name] for name in ("score", "flag")}
    filled = any(value is not None for value in more.values())
    return {"lang": record["lang"], "year": record["year"], "more": more if filled else None}


class ParquetInside(ParquetTexts):
    read_from = INSIDE

    def table(self, records):
        more = pa.struct({name: ARROW[name] for name in ("score", "flag")})
        meta = pa.struct({"lang": ARROW["lang"], "year": ARROW["year"], "more": more})
        return pa.table(
            {
                "text": pa.array([r["text"] for r in records], pa.string()),
                "meta": pa.array(map(inside, records), meta),
            }
        )

    def config(self, **columns):
        named = own(INSIDE, columns)
        return ParquetSource(
            type="parquet", path="*.parquet", text="text", shuffle=SHUFFLE, columns=named
        )


class ArrowInside(_ArrowStream, ParquetInside):
    def config(self, **columns):
        named = own(INSIDE, columns)
        return ArrowSource(
            type="arrow", path="*.arrow", text="text", shuffle=SHUFFLE, columns=named
        )


class LanceInside(_LanceDataset, ParquetInside):
    def config(self, **columns):
        named = own(INSIDE, columns)
        return LanceSource(
            type="lance", path="part-*.lance", text="text", shuffle=SHUFFLE, columns=named
        )


class Lines(_Texts):
    suffix = ".jsonl"

    def lines(self, records):
        read = ("text", *TAGS)
        lines = ({n: r[n] for n in read if r[n] is not None} for r in records)
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def write(self, path, records):
        path.write_bytes(self.lines(records))

    def config(self, **columns):
        return JsonlSource(
            type="jsonl",
            path=f"*{self.suffix}",
            unit=400,
            shuffle=SHUFFLE,
            columns=own({}, columns),
        )


class LinesInside(Lines):
    read_from = INSIDE

    def lines(self, records):
        lines = []
        for record in records:
            meta = inside(record)
            meta["more"] = {k: v for k, v in (meta["more"] or {}).items() if v is not None} or None
            line = {
                "text": record["text"],
                "meta": {k: v for k, v in meta.items() if v is not None},
            }
            lines.append(json.dumps(line) + "\n")
        return "".join(lines).encode()

    def config(self, **columns):
        return JsonlSource(
            type="jsonl", path="*.jsonl", unit=600, shuffle=SHUFFLE, columns=own(INSIDE, columns)
        )


class ZstdLines(Lines):
    suffix = ".jsonl.zst"

    def write(self, path, records):
        path.write_bytes(zstandard.compress(self.lines(records)))


class TokenLines(_Ids):
    """Token ids as Python's own JSON writer writes them."""

    suffix = ".jsonl"

    def write(self, path, records):
        lines = (
            {"ids": ids} | {n: r[n] for n in self.names if r[n] is not None}
            for ids, r in zip(tokens_of(records), records, strict=True)
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def config(self, **columns):
        return JsonlSource(
            type="jsonl",
            path="*.jsonl",
            tokens="ids",
            unit=1_500,
            shuffle=SHUFFLE,
            columns=own({}, columns),
        )


class CsvRows(_Texts):
    """Rows as Python's own CSV writer writes them; values other than texts are written as Python shows them."""

    suffix = ".csv"
    delimiter = ","

    def rows(self, records):
        out = io.StringIO(newline="")
        writer = csv.writer(out, delimiter=self.delimiter)
        writer.writerow(["note", "text", "language", "year", "score", "flag"])
        for r in records:
            writer.writerow(['a "quote",\nand a line', r["text"], *(r[name] for name in TAGS)])
        return out.getvalue().encode()

    def write(self, path, records):
        path.write_bytes(self.rows(records))

    def config(self, **columns):
        return CsvSource(
            type="csv",
            path=f"*{self.suffix}",
            unit=500,
            delimiter=self.delimiter,
            shuffle=SHUFFLE,
            columns=own({"lang": "language"}, columns),
        )


class TabbedRows(CsvRows):
    suffix, delimiter = ".tsv.gz", "\t"

    def write(self, path, records):
        path.write_bytes(gzip.compress(self.rows(records)))


class ArchivedObjects(_Texts):
    """Samples of WebDataset whose values are under keys of an object."""

    suffix = ".tar"
    mode = "w"
    read_from = NOWHERE_ELSE

    def members(self, record):
        held = {n: record[n] for n in TAGS if record[n] is not None}
        # A sample may also lack the object.
        return {"txt": record["text"].encode()} | (
            {"json": json.dumps(held).encode()} if held else {}
        )

    def write(self, path, records):
        with tarfile.open(path, self.mode) as archive:
            for i, record in enumerate(records):
                for extension, held in self.members(record).items():
                    info = tarfile.TarInfo(f"{path.name.partition('.')[0]}/{i:05}.{extension}")
                    info.size = len(held)
                    archive.addfile(info, io.BytesIO(held))

    def config(self, **columns):
        return WebDatasetSource(
            type="webdataset",
            path=f"*{self.suffix}",
            unit=10_000,
            shuffle=SHUFFLE,
            columns=own(self.read_from, columns),
        )


class ArchivedInside(ArchivedObjects):
    """Samples of WebDataset whose values are inside an object of their object."""

    read_from = INSIDE

    def members(self, record):
        return {
            "txt": record["text"].encode(),
            "json": json.dumps({"meta": inside(record)}).encode(),
        }


class ArchivedMembers(ArchivedObjects):
    """Samples of WebDataset whose values are separate members, with numbers as numpy saves them; compressed."""

    suffix, mode = ".tar.gz", "w:gz"
    read_from: ClassVar = {
        "lang": ".lang",
        "year": ".cls",
        "score": ".score.npy",
        "flag": ".flag.npy",
    }

    def members(self, record):
        found = {"txt": record["text"].encode()}
        if record["lang"] is not None:
            found["lang"] = record["lang"].encode()
        if record["year"] is not None:
            found["cls"] = f"{record['year']}\n".encode()
        for name in ("score", "flag"):
            if record[name] is not None:
                out = io.BytesIO()
                np.save(out, np.array(record[name]), allow_pickle=True)
                found[f"{name}.npy"] = out.getvalue()
        return found


class MdsIds(MdsTexts):
    """The layout that Mosaic documents. It has no type for truth values, so they are integers."""

    tokenizer = None
    names, nulls = (*TAGS, "weight", "kind"), False
    read_from = NOWHERE_ELSE
    columns = (
        *(("flag", "uint8", 1), ("ids", "ndarray:uint16", None), ("kind", "ndarray:int32", None)),
        *(("lang", "str", None), ("score", "float64", 8), ("weight", "ndarray:float32", None)),
        ("year", "int64", 8),
    )
    fixed: ClassVar = {"flag": "<B", "score": "<d", "year": "<q"}

    def sample(self, _, record):
        cells = {
            "flag": record["flag"],
            "ids": self.array(tokens_of([record])[0], "<u2"),
            "kind": self.array(record["kind"], "<i4"),
            "lang": record["lang"],
            "score": record["score"],
            "weight": self.array(record["weight"], "<f4"),
            "year": record["year"],
        }
        found = []
        for name, _, size in self.columns:
            cell = cells[name]
            if size:
                found.append(struct.pack(self.fixed[name], cell))
            else:
                found.append(cell.encode() if isinstance(cell, str) else cell)
        lengths = [
            len(cell) for cell, (_, _, size) in zip(found, self.columns, strict=True) if not size
        ]
        return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(found)

    def array(self, values, dtype):
        """Encode one dimension, its length in two bytes, as ``ndarray`` without a shape does."""
        return (
            bytes([1 << 2 | 1]) + struct.pack("<H", len(values)) + np.array(values, dtype).tobytes()
        )

    def config(self, **columns):
        return MdsSource(
            type="mds", path=".", tokens="ids", unit=600, shuffle=SHUFFLE, columns=own({}, columns)
        )


class NumpyFiles(_Ids):
    """Files of ``numpy.save``, with columns in further files that the pattern of the source also matches."""

    suffix = ".npy"
    names, nulls = ("year", "score", "flag", "weight", "kind"), False
    read_from: ClassVar = {
        **{name: f"*.{name}.npy" for name in ("year", "score", "flag", "kind")},
        "weight": "weights/*.npy",
    }
    types: ClassVar = {
        "year": np.int32,
        "score": np.float64,
        "flag": np.bool_,
        "weight": np.float16,
        "kind": np.int16,
    }

    def write(self, path, records):
        self.save(path, np.array([i for ids in tokens_of(records) for i in ids], np.uint16))
        for name in self.names:
            values = [record[name] for record in records]
            values = [v for each in values for v in each] if name in PER_TOKEN else values
            to = path.parent / self.read_from[name].replace("*", path.stem)
            to.parent.mkdir(exist_ok=True)
            self.save(to, np.array(values, self.types[name]))

    def save(self, path, values):
        np.save(path, values)

    def config(self, **columns):
        return NumpySource(
            type="numpy",
            # Without this pattern, a file of an unnamed column would be read as one of tokens.
            path="." if set(columns) == {*self.names} else "part-?.npy",
            end_of_document=256,
            unit=500,
            shuffle=SHUFFLE,
            columns=own(self.read_from, columns),
        )


class FlatFiles(NumpyFiles):
    """Files without a header; each column has its own type."""

    suffix = ".bin"
    read_from: ClassVar = {
        name: f"*.{name}.bin" for name in ("year", "score", "flag", "weight", "kind")
    }
    types: ClassVar = {
        "year": np.int64,
        "score": np.float32,
        "flag": np.bool_,
        "weight": np.float32,
        "kind": np.int8,
    }

    def save(self, path, values):
        values.tofile(path)

    def config(self, **columns):
        return NumpySource(
            type="numpy",
            path="part-*.bin" if set(columns) == {*self.names} else "part-?.bin",
            dtype="uint16",
            end_of_document=256,
            unit=500,
            shuffle=SHUFFLE,
            columns=own(self.read_from, columns),
        )


COLUMN_KINDS = {
    "parquet": ParquetTexts,
    "parquet-ids": ParquetIds,
    "arrow-ids": ArrowIds,
    "lance-ids": LanceIds,
    "parquet-inside": ParquetInside,
    "arrow-inside": ArrowInside,
    "lance-inside": LanceInside,
    "jsonl": Lines,
    "jsonl-zst": ZstdLines,
    "jsonl-inside": LinesInside,
    "jsonl-ids": TokenLines,
    "csv": CsvRows,
    "csv-tabs": TabbedRows,
    "webdataset-objects": ArchivedObjects,
    "webdataset-inside": ArchivedInside,
    "webdataset-members": ArchivedMembers,
    "mds-ids": MdsIds,
    "numpy": NumpyFiles,
    "numpy-flat": FlatFiles,
}
