"""The source contract over every format."""

import gzip

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from omniload.mix.config import (
    ByteTokenizer,
    JsonlSource,
    ParquetSource,
    ShuffleConfig,
    TextSource,
)
from tests.support.source_contract import SourceContract, expected_tokens

SHUFFLE = ShuffleConfig(block_units=3)


def overwrite_middle(path, junk=b"\xff\xfe\x00\xff" * 4):
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + len(junk)] = junk
    path.write_bytes(data)


def cut_end(path, by=5):
    path.write_bytes(path.read_bytes()[:-by])


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


class TestParquetTexts(SourceContract):
    @pytest.fixture
    def kind(self):
        return ParquetTexts()


class TestParquetTokens(SourceContract):
    @pytest.fixture
    def kind(self):
        return ParquetTokens()


class TestPlainLines(SourceContract):
    @pytest.fixture
    def kind(self):
        return PlainLines()


class TestZstdLines(SourceContract):
    @pytest.fixture
    def kind(self):
        return ZstdLines()


class TestGzipLines(SourceContract):
    @pytest.fixture
    def kind(self):
        return GzipLines()


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


class TestTextFiles(SourceContract):
    @pytest.fixture
    def kind(self):
        return TextFiles()

    @pytest.fixture
    def shards(self, folder):
        return [folder / f"part-{shard}-000.txt" for shard in range(3)]

    def test_a_source_without_files_is_refused(self, opened, folder):
        everything = sorted(folder.glob("*.txt"))

        super().test_a_source_without_files_is_refused(opened, everything)
