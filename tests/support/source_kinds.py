"""Every kind of shard that a source may have: what writes it, what declares it, how it is damaged.

A kind holds what ``tests/support/source_contract.py`` says. A new format adds its kinds here, and
they run through the contract, the store, the damage and the replacement of shards.
"""

import gzip
import json
import struct

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import (
    ArrowSource,
    JsonlSource,
    MegatronSource,
    NumpySource,
    ParquetSource,
    ShuffleConfig,
    TextSource,
)
from tests.support.source_contract import expected_tokens

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


class ZstdLines(PlainLines):
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
    """A stream, as Hugging Face writes."""

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
        """Break the head of the message in the middle."""
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
        return ArrowSource(type="arrow", path="", text="text", shuffle=SHUFFLE)


class Megatron:
    suffix = ".bin"
    tokenizer = None
    dtype, code = np.uint16, 8

    def write(self, path, texts):
        """Write what Megatron documents; a document is two sequences where it has room for them."""
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
    """One run of ids, documents ended by the token 256."""

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
        """State a shape that the file has no room for."""
        data = path.read_bytes()
        at = data.index(b"'shape': (") + len(b"'shape': (")
        path.write_bytes(data[:at] + b"9" + data[at + 1 :])

    def truncate(self, path):
        cut_end(path, by=2)


class FlatDocuments(NumpyDocuments):
    """As nanoGPT has them, behind a header."""

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
        """Put an id in that is none."""
        data = bytearray(path.read_bytes())
        struct.pack_into("<i", data, 8 + 4 * 50, -7)
        path.write_bytes(data)


KINDS = {
    "parquet": ParquetTexts,
    "parquet-tokens": ParquetTokens,
    "jsonl": PlainLines,
    "jsonl-zst": ZstdLines,
    "jsonl-gz": GzipLines,
    "text": TextFiles,
    "arrow": ArrowTexts,
    "arrow-tokens": ArrowTokens,
    "arrow-dictionary": DictionaryTexts,
    "arrow-saved": SavedToDisk,
    "megatron": Megatron,
    "megatron-int32": MegatronInt32,
    "numpy": NumpyDocuments,
    "numpy-flat": FlatDocuments,
}
