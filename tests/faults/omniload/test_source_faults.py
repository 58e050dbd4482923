"""Stores that fail or change while a source is read."""

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from omniload.base.errors import IntegrityError, UnavailableError
from omniload.mix.config import ByteTokenizer, JsonlSource, ParquetSource, TextSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

BYTES = ByteTokenizer(type="bytes")


class FailingStore(MemoryFileSystem):
    """Opens files only until its script says otherwise, and keeps what it said of them where ``listed`` has it."""

    protocol = "failing"
    store = {}  # noqa: RUF012 -- fsspec keeps it on the class
    faults = []  # noqa: RUF012
    listed = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("failing:/"))

    def open(self, path, mode="rb", **options):
        if mode == "rb" and self.faults:
            raise self.faults.pop(0)
        return super().open(path, mode, **options)

    def info(self, path, **options):
        return self.listed.get(path) or super().info(path, **options)

    def invalidate_cache(self, path=None):
        self.listed.clear()


@pytest.fixture
def store(tmp_path):
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    store = fsspec.filesystem("failing", skip_instance_cache=True)
    lines = b"".join(orjson.dumps({"text": f"record {i}"}) + b"\n" for i in range(100))
    store.pipe({"/d/a.jsonl": lines, "/d/a.txt": b"text"})
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({"tokens": [[i, i + 1] for i in range(100)]}), local, row_group_size=10)
    store.pipe("/d/a.parquet", local.read_bytes())
    yield store
    FailingStore.store.clear()
    FailingStore.faults.clear()
    FailingStore.listed.clear()


KINDS = {
    "jsonl": JsonlSource(type="jsonl", path="failing://d/*.jsonl", unit=500),
    "parquet": ParquetSource(type="parquet", path="failing://d/a.parquet", tokens="tokens"),
    "text": TextSource(type="text", path="failing://d/*.txt"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def opened(request, store, tmp_path):
    return lambda: open_source(
        SourceSpec("web", request.param, seed=1, tokenizer=BYTES, base_dir=tmp_path)
    )


def test_a_source_reads_through_a_store(opened):
    source = opened()

    assert len(source.read(0, source.positions_per_epoch).tokens) == source.positions_per_epoch


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("slow"),
        ConnectionResetError(104, "reset"),
        # Without a number, as s3fs raises them.
        PermissionError("The provided token has expired."),
        FileNotFoundError("The specified key does not exist."),
    ],
)
def test_an_outage_while_reading_may_be_tried_again_and_changes_nothing(opened, error):
    source = opened()
    n = source.positions_per_epoch
    expected = opened().read(0, n).tokens.values_V.tolist()
    FailingStore.faults.append(error)

    with pytest.raises(UnavailableError, match="try again"):
        source.read(0, n)

    assert FailingStore.faults == []
    assert source.read(0, n).tokens.values_V.tolist() == expected


def test_an_outage_in_the_middle_of_a_range_is_no_short_answer(store, tmp_path):
    source = open_source(
        SourceSpec("web", KINDS["jsonl"], seed=1, tokenizer=BYTES, base_dir=tmp_path)
    )
    expected = source.read(0, 100).tokens.values_V.tolist()
    source.release()
    source.read(0, 1)
    FailingStore.faults.append(TimeoutError("slow"))

    with pytest.raises(UnavailableError):
        source.read(0, 100)

    assert source.read(0, 100).tokens.values_V.tolist() == expected


def test_a_shard_rewritten_in_the_store_is_noticed(store, opened):
    source = opened()
    for path in store.find("/d"):
        store.pipe(path, store.cat(path) + b" ")

    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        source.read(0, source.positions_per_epoch)


def test_a_shard_removed_from_the_store_is_noticed(store, opened):
    source = opened()
    store.rm("/d", recursive=True)

    with pytest.raises(IntegrityError, match="gone since the source was opened"):
        source.read(0, source.positions_per_epoch)


def test_a_shard_removed_from_the_store_is_noticed_though_a_listing_that_is_kept_has_it(
    store, opened
):
    source = opened()
    FailingStore.listed |= {path: store.info(path) for path in store.find("/d")}
    for path in store.find("/d"):
        store.rm(path)
        FailingStore.faults.append(FileNotFoundError("The specified key does not exist."))

    with pytest.raises(IntegrityError, match="gone since the source was opened; put it back"):
        source.read(0, 1)


def test_a_local_shard_cut_short_after_opening_does_not_kill_the_process(tmp_path):
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"tokens": [[1] * 100] * 1000}), path, row_group_size=10)
    config = ParquetSource(type="parquet", path="b.parquet", tokens="tokens")
    source = open_source(SourceSpec("web", config, seed=1, tokenizer=None, base_dir=tmp_path))
    source.read(0, 1)
    with path.open("r+b") as opened:
        opened.truncate(100)

    with pytest.raises(IntegrityError, match=r"b\.parquet: changed"):
        source.read(0, 1000)
