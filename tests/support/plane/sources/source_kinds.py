"""Every kind of shard of a source: its writer, its entry in a mix file, and its damage.

A kind has the members that ``tests/support/plane/sources/source_contract.py`` describes. A new format adds its kinds
here, and they run through the contract, the store, the damage and the replacement of shards.
"""

import csv
import gzip
import io
import json
import shutil
import struct
import tarfile

import lance
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    LanceSource,
    MdsSource,
    MegatronSource,
    NumpySource,
    ParquetSource,
    ShuffleConfig,
    TextSource,
    WebDatasetSource,
)
from tests.support.plane.sources.source_contract import expected_tokens

SHUFFLE = ShuffleConfig(block_units=3)


def overwrite_middle(path, junk=b"\xff\xfe\x00\xff" * 4):
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + len(junk)] = junk
    path.write_bytes(data)


def cut_end(path, by=5):
    path.write_bytes(path.read_bytes()[:-by])


def tokens_of(texts):
    return [expected_tokens(text) if text else [] for text in texts]


class ParquetTexts:
    number = "id"
    suffix = ".parquet"
    tokenizer = ByteTokenizer(type="bytes")

    def write(self, path, texts):
        table = pa.table({"id": np.arange(len(texts)), "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=16, compression="zstd", write_page_checksum=True)

    def config(self, folder):
        return ParquetSource(type="parquet", path="*.parquet", text="text", shuffle=SHUFFLE)

    def corrupt(self, path):
        self.flip(path, column=1)

    def flip(self, path, column):
        """Flip bits in the middle of a column's dictionary, which its checksum covers."""
        metadata = pq.read_metadata(path).row_group(1).column(column)
        data = bytearray(path.read_bytes())
        data[metadata.dictionary_page_offset + metadata.total_compressed_size // 2] ^= 0xFF
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class ParquetInside(ParquetTexts):
    """Texts and numbers inside a column of objects, as nested JSON becomes a table."""

    number = "doc.more.id"

    def write(self, path, texts):
        objects = [
            {"text": text, "more": {"id": i, "other": [i]}} if text is not None else None
            for i, text in enumerate(texts)
        ]
        more = pa.struct({"id": pa.int64(), "other": pa.list_(pa.int64())})
        held = pa.array(objects, pa.struct({"text": pa.string(), "more": more}))
        pq.write_table(
            pa.table({"doc": held, "text": ["no"] * len(texts)}),
            path,
            row_group_size=16,
            write_page_checksum=True,
        )

    def config(self, folder):
        return ParquetSource(type="parquet", path="*.parquet", text="doc.text", shuffle=SHUFFLE)

    def corrupt(self, path):
        self.flip(path, column=0)


class ParquetTokens(ParquetTexts):
    tokenizer = None

    def write(self, path, texts):
        lists = [expected_tokens(text) if text else [] for text in texts]
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32())), "id": range(len(texts))})
        pq.write_table(
            table, path, row_group_size=16, compression="snappy", write_page_checksum=True
        )

    def config(self, folder):
        return ParquetSource(type="parquet", path="*.parquet", tokens="tokens", shuffle=SHUFFLE)

    def corrupt(self, path):
        self.flip(path, column=0)


class PlainLines:
    number = "id"
    suffix = ".jsonl"
    tokenizer = ByteTokenizer(type="bytes")

    def lines(self, texts):
        return b"".join(orjson.dumps({"id": i, "text": t}) + b"\n" for i, t in enumerate(texts))

    def write(self, path, texts):
        path.write_bytes(self.lines(texts))

    def config(self, folder):
        return JsonlSource(type="jsonl", path=f"*{self.suffix}", unit=600, shuffle=SHUFFLE)

    def corrupt(self, path):
        overwrite_middle(path)

    def truncate(self, path):
        cut_end(path)


class LinesInside(PlainLines):
    """Texts inside an object of each line, and values for conditions inside another."""

    number = "meta.id"

    def lines(self, texts):
        objects = ({"meta": {"id": i}, "doc": {"text": text}} for i, text in enumerate(texts))
        return b"".join(orjson.dumps(line) + b"\n" for line in objects)

    def config(self, folder):
        return JsonlSource(
            type="jsonl", path=f"*{self.suffix}", text="doc.text", unit=900, shuffle=SHUFFLE
        )


class ZstdLines(PlainLines):
    suffix = ".jsonl.zst"

    def write(self, path, texts):
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(self.lines(texts)))


class TokenLines(PlainLines):
    """Token ids next to an attention mask that nothing reads; all ids have the same number of digits."""

    tokenizer = None

    def lines(self, texts):
        lines = []
        for i, ids in enumerate(tokens_of(texts)):
            mask, laid = [1] * len(ids), ",".join(f"{each:3}" for each in ids)
            lines.append(f'{{"id": {i}, "input_ids": [{laid}], "attention_mask": {mask}}}\n')
        return "".join(lines).encode()

    def config(self, folder):
        return JsonlSource(
            type="jsonl", path=f"*{self.suffix}", tokens="input_ids", unit=1_200, shuffle=SHUFFLE
        )


class ZstdTokenLines(TokenLines):
    suffix = ".jsonl.zst"

    def write(self, path, texts):
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(self.lines(texts)))


class GzipLines(PlainLines):
    suffix = ".jsonl.gz"

    def write(self, path, texts):
        path.write_bytes(gzip.compress(self.lines(texts)))


class TextFiles:
    """One file is one record: a shard of the contract becomes a group of files."""

    suffix = ".txt"
    tokenizer = ByteTokenizer(type="bytes")

    def write(self, path, texts):
        for i, text in enumerate(texts):
            path.with_name(f"{path.stem}-{i:03}{self.suffix}").write_text(text)

    def config(self, folder):
        return TextSource(type="text", path="part-*.txt", files_per_unit=16, shuffle=SHUFFLE)

    def corrupt(self, path):
        overwrite_middle(path)

    def truncate(self, path):
        cut_end(path, by=1)

    def shards(self, folder):
        return [folder / f"part-{shard}-000.txt" for shard in range(3)]

    def everything(self, folder):
        return sorted(folder.glob("*.txt"))


class ArrowTexts:
    """A stream, as Hugging Face writes it."""

    number = "id"
    suffix = ".arrow"
    tokenizer = ByteTokenizer(type="bytes")

    def table(self, texts):
        return pa.table({"id": np.arange(len(texts)), "text": pa.array(texts, pa.string())})

    def write(self, path, texts):
        table = self.table(texts)
        with pa.OSFile(str(path), "wb") as out, self.writer(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=16)

    def writer(self, out, schema):
        return pa.ipc.new_stream(out, schema)

    def config(self, folder):
        return ArrowSource(type="arrow", path=f"*{self.suffix}", text="text", shuffle=SHUFFLE)

    def corrupt(self, path):
        """Damage the header of the message in the middle."""
        data = bytearray(path.read_bytes())
        at = data.index(b"\xff\xff\xff\xff", len(data) // 2)
        data[at + 4 : at + 8] = struct.pack("<i", len(data))
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class ArrowTokens(ArrowTexts):
    """A file with a footer, compressed."""

    suffix = ".feather"
    tokenizer = None

    def table(self, texts):
        ids = pa.array(tokens_of(texts), pa.large_list(pa.int64()))
        return pa.table({"tokens": ids, "id": np.arange(len(texts))})

    def writer(self, out, schema):
        return pa.ipc.new_file(out, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    def config(self, folder):
        return ArrowSource(type="arrow", path=f"*{self.suffix}", tokens="tokens", shuffle=SHUFFLE)


class DictionaryTexts(ArrowTexts):
    """Texts by number, in a dictionary that grows between batches."""

    number = None

    def write(self, path, texts):
        column = pa.array(texts, pa.string()).dictionary_encode()
        schema = pa.schema({"text": column.type})
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        with (
            pa.OSFile(str(path), "wb") as out,
            pa.ipc.new_stream(out, schema, options=options) as writer,
        ):
            for start in range(0, len(texts), 16):
                words = column.dictionary.slice(0, start + 16)
                part = pa.DictionaryArray.from_arrays(column.indices.slice(start, 16), words)
                writer.write_batch(pa.record_batch([part], schema=schema))


class SavedToDisk(ArrowTexts):
    """A folder with a list of its shards, as ``save_to_disk`` leaves it."""

    without_files = "IntegrityError: .*state.json: names part-0.arrow, which is not there"

    def write(self, path, texts):
        super().write(path, texts)
        names = sorted(each.name for each in path.parent.glob("part-*.arrow"))
        state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
        (path.parent / "state.json").write_text(json.dumps(state))
        (path.parent / "dataset_info.json").write_text("{}")

    def config(self, folder):
        return ArrowSource(type="arrow", path=".", text="text", shuffle=SHUFFLE)


class LanceTexts:
    """A data set for each shard, of one fragment and one file."""

    number = "id"
    suffix = ".lance"
    tokenizer = ByteTokenizer(type="bytes")
    without_files = r"IntegrityError: .*part-0.lance: version 1 names data/.*, which is not there"
    without_store = "is in a store that Lance does not read; it reads folders, s3://"
    takes_damage = False
    utf8_alone = True

    def table(self, texts):
        return pa.table({"id": np.arange(len(texts)), "text": pa.array(texts, pa.string())})

    def write(self, path, texts):
        shutil.rmtree(path, ignore_errors=True)
        lance.write_dataset(self.table(texts), path)

    def config(self, folder):
        return LanceSource(
            type="lance", path="part-*.lance", text="text", unit=1_000, shuffle=SHUFFLE
        )

    def file_of(self, path):
        """Return the file of the column, in a data set or as it is."""
        if path.is_file():
            return path
        (fragment,) = lance.dataset(path).get_fragments()
        return path / "data" / fragment.metadata.files[0].path

    def shards(self, folder):
        return [self.file_of(path) for path in sorted(folder.glob("part-*.lance"))]

    def everything(self, folder):
        return sorted(folder.glob("*.lance/data/*"))

    def corrupt(self, path):
        """Make the place of the table of columns point outside the file."""
        data = bytearray(path.read_bytes())
        struct.pack_into("<q", data, len(data) - 40, 1 << 40)
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class LanceTokens(LanceTexts):
    """Rows with deletions, and a column that was added in a separate file."""

    number = None
    tokenizer = None
    without_files = r"IntegrityError: .*part-0.lance: version 3 names data/.*, which is not there"

    def table(self, texts):
        return pa.table({"tokens": pa.array(tokens_of(texts), pa.list_(pa.int32()))})

    def write(self, path, texts):
        shutil.rmtree(path, ignore_errors=True)
        gone = [f"deleted {i}" for i in range(7)] if texts else []
        mixed = [*gone[:3], *texts[:9], *gone[3:], *texts[9:]]
        dataset = lance.write_dataset(self.table(mixed), path)
        if texts:
            rows = [0, 1, 2, *range(3 + len(texts[:9]), 7 + len(texts[:9]))]
            dataset.add_columns(
                pa.RecordBatch.from_pydict({"gone": [i in rows for i in range(len(mixed))]})
            )
            lance.dataset(path).delete("gone")

    def config(self, folder):
        return LanceSource(
            type="lance", path="part-*.lance", tokens="tokens", unit=1_000, shuffle=SHUFFLE
        )


class Megatron:
    suffix = ".bin"
    tokenizer = None
    dtype, code = np.uint16, 8

    def write(self, path, texts):
        """Write the format that Megatron documents; a document is two sequences if it is long enough."""
        documents = tokens_of(texts)
        cut = [[ids[:9], ids[9:]] if len(ids) > 9 else [ids] for ids in documents]
        lengths = np.array([len(part) for parts in cut for part in parts], np.int32)
        boundaries = np.cumsum([0, *map(len, cut)], dtype=np.int64)
        pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])) * self.dtype().itemsize
        path.write_bytes(np.array([i for ids in documents for i in ids], self.dtype).tobytes())
        path.with_suffix(".idx").write_bytes(
            b"MMIDIDX\0\0"
            + struct.pack("<QBQQ", 1, self.code, len(lengths), len(boundaries))
            + lengths.tobytes()
            + pointers[: len(lengths)].astype(np.int64).tobytes()
            + boundaries.tobytes()
        )

    def config(self, folder):
        return MegatronSource(type="megatron", path="*.bin", unit=600, shuffle=SHUFFLE)

    def corrupt(self, path):
        """Move the start of the second sequence."""
        index = path.with_suffix(".idx")
        data = bytearray(index.read_bytes())
        (sequences,) = struct.unpack_from("<Q", data, 18)
        struct.pack_into("<q", data, 34 + 4 * sequences + 8, -2)
        index.write_bytes(data)

    def truncate(self, path):
        cut_end(path, by=2)


class MegatronInt32(Megatron):
    dtype, code = np.int32, 4

    def truncate(self, path):
        cut_end(path.with_suffix(".idx"))


class NumpyDocuments:
    """One run of ids, in which the token 256 ends each document."""

    suffix = ".npy"
    tokenizer = None
    empty_records = False

    def write(self, path, texts):
        np.save(path, np.array([i for ids in tokens_of(texts) for i in ids], np.uint16))

    def config(self, folder):
        return NumpySource(
            type="numpy", path="*.npy", end_of_document=256, unit=600, shuffle=SHUFFLE
        )

    def corrupt(self, path):
        """Set a shape that is larger than the file."""
        data = path.read_bytes()
        at = data.index(b"'shape': (") + len(b"'shape': (")
        path.write_bytes(data[:at] + b"9" + data[at + 1 :])

    def truncate(self, path):
        cut_end(path, by=2)


class FlatDocuments(NumpyDocuments):
    """Documents in nanoGPT's format, after a header."""

    suffix = ".bin"

    def write(self, path, texts):
        ids = [i for ids in tokens_of(texts) for i in ids]
        path.write_bytes(b"header.." + np.array(ids, np.int32).tobytes())

    def config(self, folder):
        return NumpySource(
            type="numpy",
            path="*.bin",
            dtype="int32",
            header=8,
            end_of_document=256,
            unit=1_200,
            shuffle=SHUFFLE,
        )

    def corrupt(self, path):
        """Insert an invalid id."""
        data = bytearray(path.read_bytes())
        struct.pack_into("<i", data, 8 + 4 * 50, -7)
        path.write_bytes(data)


class CsvRows:
    """Every field quoted, newlines inside, and a column before and after."""

    number = "id"
    suffix = ".csv"
    tokenizer = ByteTokenizer(type="bytes")

    def rows(self, texts):
        out = io.StringIO(newline="")
        writer = csv.writer(out, quoting=csv.QUOTE_ALL)
        writer.writerow(["id", "text", "note"])
        writer.writerows([i, text, 'a "quote"\nand a line'] for i, text in enumerate(texts))
        return out.getvalue().encode()

    def write(self, path, texts):
        path.write_bytes(self.rows(texts))

    def config(self, folder):
        return CsvSource(type="csv", path=f"*{self.suffix}", unit=900, shuffle=SHUFFLE)

    def corrupt(self, path):
        """Put a quote into the middle of a field."""
        data = bytearray(path.read_bytes())
        data[data.index(b"record 20") + 2] = ord('"')
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class TabbedRows(CsvRows):
    """Plain fields between tabs, compressed."""

    suffix = ".tsv.gz"

    def write(self, path, texts):
        lines = "".join(f"{text}\t{i}\r\n" for i, text in enumerate(texts))
        path.write_bytes(gzip.compress(f"words\tid\r\n{lines}".encode()))

    def config(self, folder):
        return CsvSource(
            type="csv",
            path="*.tsv.gz",
            text="words",
            shuffle=SHUFFLE,
            delimiter="\t",
            quoted=False,
        )

    def corrupt(self, path):
        overwrite_middle(path)


class MdsTexts:
    """The layout that Mosaic documents: columns in the order of their names, with an index file."""

    number = "id"
    suffix = ".mds"
    tokenizer = ByteTokenizer(type="bytes")
    columns = (("id", "int", 8), ("text", "str", None), ("z", "bytes", None))
    without_files = r"IntegrityError: .*index.json: names part-0.mds, which is not there"

    def sample(self, i, text):
        columns = struct.pack("<q", i), text.encode(), b"z" * (i % 5)
        return struct.pack("<2I", *map(len, columns[1:])) + b"".join(columns)

    def shard(self, samples):
        described = json.dumps({"column_names": [name for name, _, _ in self.columns]}).encode()
        first = 4 + 4 * (len(samples) + 1) + len(described)
        offsets = first + np.cumsum([0, *map(len, samples)])
        head = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes()
        return head + described + b"".join(samples)

    def write(self, path, texts):
        data = self.shard([self.sample(i, text) for i, text in enumerate(texts)])
        entry = {
            "format": "mds",
            "version": 2,
            "samples": len(texts),
            "hashes": [],
            "raw_data": {"basename": path.name, "bytes": len(data), "hashes": {}},
            "column_names": [name for name, _, _ in self.columns],
            "column_encodings": [encoding for _, encoding, _ in self.columns],
            "column_sizes": [size for _, _, size in self.columns],
            **self.stored(path, data),
        }
        index = path.parent / "index.json"
        listed = json.loads(index.read_text())["shards"] if index.exists() else []
        others = [each for each in listed if each["raw_data"]["basename"] != path.name]
        shards = sorted([*others, entry], key=lambda each: each["raw_data"]["basename"])
        index.write_text(json.dumps({"version": 2, "shards": shards}))

    def stored(self, path, data):
        path.write_bytes(data)
        return {"compression": None, "zip_data": None}

    def config(self, folder):
        return MdsSource(type="mds", path=".", text="text", unit=600, shuffle=SHUFFLE)

    def corrupt(self, path):
        """Make the offset of a sample point outside the shard."""
        data = bytearray(path.read_bytes())
        struct.pack_into("<I", data, 4 * 8, 2**32 - 5)
        path.write_bytes(data)

    def truncate(self, path):
        cut_end(path)


class MdsTokens(MdsTexts):
    """Arrays that contain their own shape, in shards compressed with zstd."""

    number = None
    suffix = ".mds"
    tokenizer = None
    columns = (("tokens", "ndarray:uint16", None),)
    without_files = r"IntegrityError: .*index.json: names part-0.mds, which is not there"

    def sample(self, i, text):
        (ids,) = tokens_of([text])
        array = bytes([1 << 2 | 1]) + struct.pack("<H", len(ids)) + np.array(ids, "<u2").tobytes()
        return struct.pack("<I", len(array)) + array

    def stored(self, path, data):
        path.with_suffix(".mds.zstd").write_bytes(
            zstandard.ZstdCompressor(write_checksum=True).compress(data)
        )
        zipped = {"basename": f"{path.name}.zstd", "bytes": 0, "hashes": {}}
        return {"compression": "zstd:3", "zip_data": zipped}

    def shards(self, folder):
        return sorted(folder.glob("part-*.zstd"))

    def config(self, folder):
        return MdsSource(type="mds", path="index.json", tokens="tokens", shuffle=SHUFFLE)

    def corrupt(self, path):
        overwrite_middle(path)


class WebDatasetTexts:
    """Samples of two members, written by Python's library."""

    suffix = ".tar"
    tokenizer = ByteTokenizer(type="bytes")
    mode, form = "w", tarfile.USTAR_FORMAT

    def members(self, i, text):
        return {"cls": b"7", "txt": text.encode()}

    def write(self, path, texts):
        with tarfile.open(path, self.mode, format=self.form) as archive:
            for i, text in enumerate(texts):
                for extension, data in self.members(i, text).items():
                    info = tarfile.TarInfo(f"{path.stem}/{self.name(i)}.{extension}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))

    def name(self, i):
        return f"{i:05}"

    def config(self, folder):
        return WebDatasetSource(type="webdataset", path="*.tar", unit=8_000, shuffle=SHUFFLE)

    def corrupt(self, path):
        """Alter a name, which its checksum reveals."""
        data = bytearray(path.read_bytes())
        data[data.index(b"00020.cls")] ^= 1
        path.write_bytes(data)

    def truncate(self, path):
        path.write_bytes(path.read_bytes().rstrip(b"\0")[:-1])


class WebDatasetJson(WebDatasetTexts):
    """Objects in members with long names, compressed."""

    number = "n"
    suffix = ".tar.gz"
    mode, form = "w:gz", tarfile.PAX_FORMAT

    def members(self, i, text):
        return {"JSON": orjson.dumps({"body": text, "n": i})}

    def name(self, i):
        return f"{'long' * 40}é{i:05}"

    def config(self, folder):
        return WebDatasetSource(
            type="webdataset",
            path="*.tar.gz",
            text="json",
            key="body",
            shuffle=SHUFFLE,
        )

    def corrupt(self, path):
        overwrite_middle(path)

    def truncate(self, path):
        cut_end(path)


class WebDatasetGnu(WebDatasetTexts):
    """Long names as GNU writes them."""

    form = tarfile.GNU_FORMAT

    def name(self, i):
        return f"{'long' * 40}é{i:05}"


KINDS = {
    "parquet": ParquetTexts,
    "parquet-tokens": ParquetTokens,
    "parquet-inside": ParquetInside,
    "jsonl": PlainLines,
    "jsonl-inside": LinesInside,
    "jsonl-zst": ZstdLines,
    "jsonl-gz": GzipLines,
    "jsonl-tokens": TokenLines,
    "jsonl-tokens-zst": ZstdTokenLines,
    "text": TextFiles,
    "arrow": ArrowTexts,
    "arrow-tokens": ArrowTokens,
    "arrow-dictionary": DictionaryTexts,
    "arrow-saved": SavedToDisk,
    "lance": LanceTexts,
    "lance-tokens": LanceTokens,
    "megatron": Megatron,
    "megatron-int32": MegatronInt32,
    "numpy": NumpyDocuments,
    "numpy-flat": FlatDocuments,
    "csv": CsvRows,
    "csv-tabs": TabbedRows,
    "mds": MdsTexts,
    "mds-tokens": MdsTokens,
    "webdataset": WebDatasetTexts,
    "webdataset-gnu": WebDatasetGnu,
    "webdataset-json": WebDatasetJson,
}
