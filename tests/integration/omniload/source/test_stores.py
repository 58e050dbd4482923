"""Every kind of shard on a real S3 server (moto's, where it is installed): what a folder gives, and what it refuses."""

import socket
import socketserver
import threading
import uuid
from contextlib import contextmanager, suppress

import fsspec
import lance
import numpy as np
import pyarrow as pa
import pytest
from fsspec.core import url_to_fs

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.client import Client
from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.records import ShuffleConfig
from omniload.mix.sources import LanceSource
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.formats.opening import at_versions, shards_of
from omniload.source.parsing.lance_dataset import LanceDataset
from omniload.source.parsing.lance_stores import LIMITS
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.builders import a_mix
from tests.support.plane.sources.source_contract import (
    SHARDS,
    TEXTS_PER_SHARD,
    samples,
    texts_of_shard,
)
from tests.support.plane.sources.source_kinds import KINDS

pytestmark = pytest.mark.slow

SECRET = "a-secret-of-the-store"
N = SHARDS * TEXTS_PER_SHARD
OFTEN = "lance-tokens"
"""The kind that is always run, since its library reads by itself; the others make the same calls as over the store in
memory of their contract."""


@pytest.fixture(scope="module")
def server(s3_of_all):
    s3_of_all.client.create_dir("corpora")
    return s3_of_all


@contextmanager
def clients_of(address):
    """Have whoever opens a URL of S3 come to a server, with a key."""
    given = {"key": "k", "secret": SECRET, "endpoint_url": f"http://{address}"}
    before, fsspec.config.conf["s3"] = fsspec.config.conf.get("s3"), given
    try:
        yield
    finally:
        del fsspec.config.conf["s3"]
        if before is not None:
            fsspec.config.conf["s3"] = before


@pytest.fixture
def s3(server):
    with clients_of(server.address):
        yield server


class Bucket:
    """A folder, and what was put of it under a prefix."""

    def __init__(self, folder):
        self.folder, self.url = folder, f"s3://corpora/{uuid.uuid4().hex}"
        self.store, self.path = url_to_fs(self.url)
        self.put()

    def put(self):
        self.store.put(f"{self.folder}/", f"{self.path}/", recursive=True)
        self.store.invalidate_cache()

    def at(self, file):
        """Return where a file of the folder lies in the store."""
        return f"{self.path}/{file.relative_to(self.folder)}"

    def put_one(self, file):
        self.store.put_file(str(file), self.at(file))

    def opened(self, config, tokenizer, cache_dir=None, **changes):
        path = f"{self.url}/{config.path}" if config.path != "." else self.url
        return open_source(
            SourceSpec(
                "web",
                config.model_copy(update={"path": path, **changes}),
                seed=11,
                tokenizer=tokenizer,
                base_dir=self.folder,
                cache_dir=cache_dir,
            )
        )


@pytest.fixture
def folder(tmp_path, kind):
    for shard in range(SHARDS):
        kind.write(tmp_path / f"part-{shard}{kind.suffix}", texts_of_shard(shard))
    return tmp_path


def config_of(kind, folder):
    """Return the part of a mix file, with units of which a shard has two: every one is asked of the server."""
    config = kind.config(folder)
    return config.model_copy(update={"unit": 4_000}) if hasattr(config, "unit") else config


def shards_in(folder, kind):
    return getattr(kind, "shards", lambda each: sorted(each.glob(f"part-*{kind.suffix}")))(folder)


@pytest.fixture(
    params=[name if name == OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in KINDS]
)
def kind(request):
    return KINDS[request.param]()


def test_a_store_gives_what_a_folder_does_from_every_position_and_keeps_its_index(
    s3, folder, kind, tmp_path_factory
):
    kept = tmp_path_factory.mktemp("index")
    config, tokenizer = config_of(kind, folder), kind.tokenizer
    local = open_source(SourceSpec("web", config, seed=11, tokenizer=tokenizer, base_dir=folder))
    bucket = Bucket(folder)

    source = bucket.opened(config, tokenizer, cache_dir=kept)
    again = bucket.opened(config, tokenizer, cache_dir=kept)

    assert (source.content_digest, source.facts) == (local.content_digest, local.facts)
    whole = samples(local.read(0, N + 9))
    assert samples(source.read(0, N + 9)) == whole
    for position in np.random.default_rng(0).permutation(N)[:4].tolist():
        assert samples(again.read(position, position + 9)) == whole[position : position + 9]
    (index,) = kept.glob("web.*.index.arrow")
    assert SECRET.encode() not in index.read_bytes()


def test_a_shard_that_is_damaged_or_cut_short_in_a_store_is_named(s3, folder, kind):
    config, bucket = config_of(kind, folder), Bucket(folder)
    first, second, _ = shards_in(folder, kind)
    kept = second.read_bytes()
    for damage in (kind.corrupt, kind.truncate):
        second.write_bytes(kept)
        damage(second)
        bucket.put()
        with pytest.raises(IntegrityError, match="part-1"):
            bucket.opened(config, kind.tokenizer).read(0, N)
    assert first.exists()


class Wire(socketserver.ThreadingTCPServer):
    """A connection to a server that can be cut."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, address):
        host, port = address.split(":")
        self.target, self.open = (host, int(port)), []
        super().__init__(("127.0.0.1", 0), Relay)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}).start()

    def cut(self):
        self.shutdown()
        self.server_close()
        for end in self.open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Relay(socketserver.BaseRequestHandler):
    def handle(self):
        with socket.create_connection(self.server.target) as far:
            self.server.open += [self.request, far]
            back = threading.Thread(target=pass_on, args=(far, self.request))
            back.start()
            pass_on(self.request, far)
            back.join()


def pass_on(source, target):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def texts(first, count):
    return pa.table({"text": [f"row {i} {'x' * (i % 31)}" for i in range(first, first + count)]})


STEPS = 6


class TestLance:
    """What Lance, which reads by a client of its own, is told of the store that our client has."""

    @pytest.fixture
    def kind(self):
        return KINDS[OFTEN]()

    @pytest.fixture
    def bucket(self, s3, folder):
        return Bucket(folder)

    def test_files_that_change_go_or_are_damaged_are_named(self, bucket, folder, kind):
        def opened(shard):
            config = config_of(kind, folder).model_copy(update={"path": f"part-{shard}.lance"})
            return bucket.opened(config, kind.tokenizer)

        for shard, inside in ((1, "data"), (2, "_deletions")):
            path, *_ = sorted((folder / f"part-{shard}.lance" / inside).glob("*"))
            source, content = opened(shard), path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            bucket.put_one(path)
            with pytest.raises(IntegrityError, match=rf"{inside}/.* changed since the source was"):
                source.read(0, 1)
            bucket.store.rm_file(bucket.at(path))
            with pytest.raises(IntegrityError, match=rf"{inside}/.* gone since the source was"):
                source.read(0, 1)
            with pytest.raises(IntegrityError, match=rf"{inside}/.*, which is not there; copy the"):
                opened(shard)
        (path,) = (folder / "part-0.lance/_deletions").glob("*.arrow")
        path.write_bytes(path.read_bytes()[:-20])
        bucket.put_one(path)
        with pytest.raises(IntegrityError, match=r"s3://.*part-0.*arrow: cannot be decoded"):
            opened(0)

    def test_patterns_name_data_sets_as_those_of_folders_do(self, bucket, folder, kind):
        def found(pattern, **changes):
            changes["path"] = f"{bucket.url}/{pattern}"
            config = kind.config(folder).model_copy(update=changes)
            return [file.path for file in shards_of("web", config, base_dir=folder)]

        every = found("part-*.lance")
        assert len(every) == SHARDS
        assert all(path.startswith(f"{bucket.url}/part-{i}.") for i, path in enumerate(every))
        assert found("part-{2,0}.lance") == [every[2], every[0]]
        assert found("part-1.lance/") == [every[1]]
        for pattern in ("part-9.lance", "part-*.parquet", "part-1.lance/data"):
            with pytest.raises(ConfigError, match=r"'s3://.*matches no file of a Lance data set"):
                found(pattern)
        with pytest.raises(ConfigError, match=r"s3://.*part-0.lance: has no version 9"):
            found("part-0.lance", version=9)


class Versions:
    """A data set that others go on writing to, in the store alone."""

    def __init__(self, address):
        self.url = f"s3://corpora/{uuid.uuid4().hex}/own.lance"
        self.told = {
            "aws_access_key_id": "k",
            "aws_secret_access_key": SECRET,
            "aws_endpoint": f"http://{address}",
            "allow_http": "true",
        }
        lance.write_dataset(
            texts(0, 400), self.url, max_rows_per_file=150, storage_options=self.told
        )

    def commit(self):
        dataset = lance.dataset(self.url, storage_options=self.told)
        dataset.insert(texts(400, 100))
        dataset.delete("text like 'row 1%'")

    @property
    def config(self):
        shuffle = ShuffleConfig(method="none")
        return LanceSource(type="lance", path=self.url, text="text", unit=1_000, shuffle=shuffle)


def steps(url, folder, state=None, stop=STEPS):
    source = {"type": "lance", "path": url, "text": "text", "unit": 1_000}
    mix = a_mix(sources={"web": source}, tokenizer={"type": "bytes"})
    tree = ClientPlaceTree.of()
    spec = PlaneSpec(mix=mix, base_dir=folder, tree=tree, state=state, num_steps=STEPS)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        taken = [client.next_batch() for _ in range(stop - client.next_step)]
        rows = [[each.tokens_RT.tolist() for each in batch.microbatches] for batch in taken]
        return rows, client.state_dict()


def test_a_run_over_a_store_keeps_the_version_that_it_began_with_and_no_secret(s3, tmp_path):
    own = Versions(s3.address)
    whole, _ = steps(own.url, tmp_path)
    first, state = steps(own.url, tmp_path, stop=3)
    own.commit()

    rest, _ = steps(own.url, tmp_path, state)

    assert first + rest == whole
    assert SECRET not in str(state)
    assert at_versions("web", own.config, base_dir=tmp_path).version == (3,)


def test_a_store_that_does_not_answer_is_tried_again_and_nothing_is_damaged(
    server, tmp_path, monkeypatch
):
    wire = Wire(server.address)
    monkeypatch.setitem(LIMITS, "client_max_retries", "0")
    with clients_of(wire.address):
        own = Versions(server.address)
        source = open_source(
            SourceSpec(
                "web", own.config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=tmp_path
            )
        )
        dataset = LanceDataset(own.url, None, url_to_fs(own.url)[0])
        wire.cut()

        with pytest.raises(UnavailableError) as ours:
            source.read(0, 10)
        with pytest.raises(ConnectionError, match="Generic S3 error") as of_lance:
            dataset.take(1, 0, 10, ["text"])

    assert SECRET not in f"{ours.value} {of_lance.value}"
    assert "try again" in str(ours.value)
