"""The same rows with columns in each type of source that has columns, and the mix file's entries for them."""

import csv
import io
import json
import struct
import tarfile

import lance
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.plane.sources.source_kinds import MdsTexts

__all__ = ["ROW_KINDS", "write_rows"]


def _jsonl(path, rows):
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=9)


def _arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    for i, name in enumerate(table.column_names):
        if name == "lang":
            table = table.set_column(i, name, table[name].dictionary_encode())
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)


def _lance(path, rows):
    lance.write_dataset(pa.Table.from_pylist(rows), path)


def _csv(path, rows):
    """Write CSV as pandas does: an empty field for a null."""
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)


class _MdsRows(MdsTexts):
    """Columns by the type of their values; a null becomes an empty text."""

    def __init__(self, rows):
        self.rows = rows
        kinds = {str: ("str", None), type(None): ("str", None), int: ("int", 8), bool: ("uint8", 1)}
        kinds[float] = ("float64", 8)
        self.columns = tuple((name, *kinds[type(rows[0][name])]) for name in sorted(rows[0]))

    def sample(self, i, text):
        forms = {"int": "<q", "uint8": "<B", "float64": "<d"}
        cells = [
            (self.rows[i][name] or "").encode()
            if encoding == "str"
            else struct.pack(forms[encoding], self.rows[i][name])
            for name, encoding, _ in self.columns
        ]
        sizes = [
            len(cell)
            for cell, (_, _, size) in zip(cells, self.columns, strict=True)
            if size is None
        ]
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(cells)


def _mds(path, rows):
    path.parent.mkdir(exist_ok=True)
    _MdsRows(rows).write(path, [row["text"] for row in rows])


def _webdataset(path, rows):
    with tarfile.open(path, "w") as archive:
        for i, row in enumerate(rows):
            held = json.dumps(row).encode()
            info = tarfile.TarInfo(f"{path.stem}/{i:05}.json")
            info.size = len(held)
            archive.addfile(info, io.BytesIO(held))


ROW_KINDS = {
    "jsonl": (_jsonl, "{}.jsonl"),
    "parquet": (_parquet, "{}.parquet"),
    "arrow": (_arrow, "{}.arrow"),
    "csv": (_csv, "{}.csv"),
    "lance": (_lance, "{}.lance"),
    "mds": (_mds, "mds/{}.mds"),
    "webdataset": (_webdataset, "{}.tar"),
}
"""The writer of each type of rows, and the file that it writes."""


def write_rows(kind, folder, name, rows):
    """Write a shard of rows; return the mix file's entry for all shards of the type in the folder."""
    write, form = ROW_KINDS[kind]
    write(folder / form.format(name), rows)
    source = {"type": kind, "path": "mds" if kind == "mds" else form.format("*")}
    of_text = {"text": "json", "key": "text"} if kind == "webdataset" else {"text": "text"}
    return source | of_text
