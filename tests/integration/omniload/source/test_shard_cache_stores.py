"""A shard cache with real servers, S3 (moto's, if it is installed) and HDFS: the requests of a second run."""

import json
import uuid
from contextlib import suppress

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fsspec.core import url_to_fs

import omniload
from omniload.base.errors import IntegrityError
from omniload.cli import command
from omniload.mix.runtime import ShardCacheConfig
from omniload.mix.schema.tokenizers import ByteTokenizer
from omniload.mix.sources import JsonlSource, ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import open_shard_cache
from tests.support.hdfs.cluster import why_not
from tests.support.plane.sources.shard_caches import an_hour_later, taken_bytes

pytestmark = pytest.mark.slow

BYTES = ByteTokenizer(type="bytes")
RECORDS = 3000
KINDS = {
    "jsonl": JsonlSource(type="jsonl", path="*.jsonl", unit=100_000),
    "parquet": ParquetSource(type="parquet", path="*.parquet", text="text"),
}


@pytest.fixture(scope="module")
def server(s3_of_all):
    s3_of_all.client.create_dir("corpora")
    return s3_of_all


@pytest.fixture
def s3(server, monkeypatch):
    given = {"key": "k", "secret": "s", "endpoint_url": f"http://{server.address}"}
    monkeypatch.setitem(fsspec.config.conf, "s3", given)
    return server


def texts(mark=""):
    return [f"record {i} {mark} {'x' * (i * 7 % 301)}" for i in range(RECORDS)]


def write(folder, kind, mark=""):
    folder.mkdir(exist_ok=True)
    if kind == "jsonl":
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(mark))
        (folder / "a.jsonl").write_text(lines)
    else:
        table = pa.table({"text": texts(mark)})
        pq.write_table(table, folder / "a.parquet", row_group_size=500)


class Shards:
    """A folder with its copy in a store."""

    def __init__(self, folder, url, kind):
        self.folder, self.url, self.kind = folder, url, kind
        write(folder / "shards", kind)
        self.put()

    def put(self):
        store, path = url_to_fs(self.url)
        with suppress(FileExistsError):
            store.makedirs(path, exist_ok=True)
        for file in (self.folder / "shards").iterdir():
            store.put_file(str(file), f"{path}/{file.name}")
        store.invalidate_cache()

    def source(self, where, cache=None):
        """Open it as another process would, without anything that clients have cached."""
        fsspec.AbstractFileSystem.clear_instance_cache()
        config = KINDS[self.kind]
        return open_source(
            SourceSpec(
                "web",
                config.model_copy(update={"path": f"{where}/{config.path}"}),
                seed=1,
                tokenizer=BYTES,
                base_dir=self.folder,
            ),
            shard_cache=cache,
        )

    def cache(self, limit="64MB"):
        return open_shard_cache(
            ShardCacheConfig(path="near", limit=limit), self.folder, an_hour_later
        )

    def read(self, cache=None, where=None):
        source = self.source(where or self.url, cache)
        tokens = source.read(0, 2 * source.positions_per_epoch).tokens
        return tokens.values_V.tobytes(), tokens.offsets.tobytes(), source.facts.content_digest


def of_shards(asked):
    return [
        line for line in asked if line.startswith("GET") and line.endswith(("jsonl", "parquet"))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_asks_s3_for_no_byte_of_a_shard_and_gets_the_same_samples(s3, tmp_path, kind):
    shards = Shards(tmp_path, f"s3://corpora/{uuid.uuid4().hex}", kind)
    expected = shards.read(where="shards")
    s3.asked()
    assert shards.read(first := shards.cache()) == expected
    assert of_shards(s3.asked())
    (size,) = (file.stat().st_size for file in (tmp_path / "shards").iterdir())
    assert first.traffic.store_bytes == size, (
        "each byte once, though the index and the order come back"
    )

    assert shards.read(second := shards.cache()) == expected

    assert not of_shards(s3.asked())
    assert second.traffic.store_bytes == 0
    assert second.traffic.disk_bytes >= size


def test_a_shard_that_was_replaced_on_s3_is_read_anew(s3, tmp_path):
    shards = Shards(tmp_path, f"s3://corpora/{uuid.uuid4().hex}", "jsonl")
    before = shards.read(shards.cache())
    write(tmp_path / "shards", "jsonl", mark="y")
    shards.put()

    after = shards.read(shards.cache())

    assert after == shards.read(where="shards") != before


def test_a_shard_that_is_replaced_on_s3_under_a_run_stops_it(s3, tmp_path):
    shards = Shards(tmp_path, f"s3://corpora/{uuid.uuid4().hex}", "jsonl")
    shard = tmp_path / "shards" / "a.jsonl"
    shard.write_bytes(shard.read_bytes() * 6)
    shards.put()
    source = shards.source(shards.url, shards.cache("1MiB"))
    source.read(0, 100)
    assert 0 < taken_bytes(tmp_path / "near") <= 1 << 20 < shard.stat().st_size
    shard.write_bytes(shard.read_bytes().replace(b"x", b"y"))
    # By another client, because the client of the run caches its listing.
    writer, path = url_to_fs(shards.url, skip_instance_cache=True)
    writer.put_file(str(shard), f"{path}/a.jsonl")

    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        source.read(0, 2 * source.positions_per_epoch)


def test_a_cap_below_the_shards_changes_no_sample_and_holds(s3, tmp_path):
    shards = Shards(tmp_path, f"s3://corpora/{uuid.uuid4().hex}", "jsonl")
    (tmp_path / "shards" / "b.jsonl").write_bytes(3 * (tmp_path / "shards/a.jsonl").read_bytes())
    shards.put()

    for _ in range(2):
        assert shards.read(shards.cache("1MiB")) == shards.read(where="shards")
        assert 0 < taken_bytes(tmp_path / "near") <= 1 << 20


def test_a_run_has_the_same_samples_and_digest_and_check_says_what_is_kept(s3, tmp_path):
    shards = Shards(tmp_path, f"s3://corpora/{uuid.uuid4().hex}", "jsonl")
    mix = f"""
version: 1
seed: 1
tokenizer: {{type: bytes}}
sources: {{web: {{type: jsonl, path: "{shards.url}/*.jsonl", unit: 100KiB}}}}
mix: {{stages: [{{from_step: 0, weights: {{web: 1}}}}]}}
pack: {{length: 512}}
batch: {{tokens: 4096, micro_tokens: 4096}}
"""
    plain, cached = tmp_path / "plain.yaml", tmp_path / "cached.yaml"
    plain.write_text(mix)
    cached.write_text(mix + "loader: {shard_cache: {path: near, limit: 64MB}}\n")

    def steps(file):
        fsspec.AbstractFileSystem.clear_instance_cache()
        with omniload.open(file, steps=20, arrays="numpy") as loader:
            rows = [r.tokens.tobytes() for batch in loader for r in batch.microbatches]
            return rows, loader.state_dict()

    def said(file):
        done = CliRunner().invoke(command, ["check", str(file), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)["shard_cache"]

    assert said(plain) is None
    empty = said(cached)
    assert (empty["shards"], empty["kept"], empty["held"], empty["never"]) == (1, 0, 0, {})
    assert not (tmp_path / "near").exists()
    rows, state = steps(plain)
    assert steps(cached) == (rows, state)
    s3.asked()
    assert steps(cached) == (rows, state)
    assert not of_shards(s3.asked())

    full = said(cached)
    assert full["kept"] == full["shards"] == 1
    assert 0 < full["kept_bytes"] <= full["size_bytes"]
    assert full["held"] <= full["limit"] == 64_000_000
    s3.asked()
    for verb in (["stats", "--all", "--measure", "0"], ["plan", "--steps", "10"]):
        done = CliRunner().invoke(command, [verb[0], str(cached), *verb[1:]])
        assert done.exit_code == 0, done.output
    assert not of_shards(s3.asked()), "they read through the cache as well"
    line = CliRunner().invoke(command, ["check", str(cached)]).output
    assert "shard cache: " in line
    (tmp_path / "near" / "omniload-shard-cache.json").unlink()
    (tmp_path / "near" / "mine.txt").write_text("x")
    done = CliRunner().invoke(command, ["check", str(cached), "--json"])
    (warning,) = json.loads(done.output)["warnings"]
    assert "loader.shard_cache" in warning
    assert "holds something else ('account')" in warning


@pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}")
def test_a_shard_on_hdfs_that_is_replaced_by_one_of_its_size_is_refused_and_then_read_anew(
    hdfs, tmp_path
):
    shards = Shards(tmp_path, f"{hdfs.url}/{uuid.uuid4().hex}", "jsonl")
    before = shards.read(shards.cache())
    reading = shards.source(shards.url, shards.cache())
    (file,) = (tmp_path / "shards").iterdir()
    file.write_text(file.read_text().replace("record", "RECORD"))
    shards.put()

    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        reading.read(0, 10)

    assert shards.read(shards.cache()) == shards.read(where="shards") != before


@pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}")
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_reads_no_byte_of_a_shard_from_hdfs(hdfs, tmp_path, kind, monkeypatch):
    shards = Shards(tmp_path, f"{hdfs.url}/{uuid.uuid4().hex}", kind)
    expected = shards.read(where="shards")
    first = shards.cache()
    assert shards.read(first) == expected
    (size,) = (file.stat().st_size for file in (tmp_path / "shards").iterdir())
    assert first.traffic.store_bytes == size

    def refused(*_args, **_kwargs):
        raise AssertionError("HDFS is asked for bytes")

    store = type(url_to_fs(shards.url)[0])
    for call in ("open", "_open", "cat_file", "cat_ranges"):
        monkeypatch.setattr(store, call, refused)
    assert shards.read(shards.cache()) == expected
