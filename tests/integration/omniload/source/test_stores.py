"""Lance, which reads with its own client, against a real S3 server (moto's, if it is installed)."""

import socket
import socketserver
import threading
import uuid
from contextlib import suppress

import lance
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
from omniload.source.stores import listings
from tests.support.plane.builders import a_mix
from tests.support.plane.sources.in_stores import StoredShards, clients_told, config_in_units
from tests.support.plane.sources.source_contract import SHARDS, texts_of_shard
from tests.support.plane.sources.source_kinds import LanceTokens

pytestmark = pytest.mark.slow

SECRET = "a-secret-of-the-store"


@pytest.fixture(scope="module")
def server(s3_of_all):
    s3_of_all.client.create_dir("corpora")
    return s3_of_all


def clients_of(address):
    """Direct every client of S3 URLs to a server, with a key."""
    return clients_told("s3", key="k", secret=SECRET, endpoint_url=f"http://{address}")


@pytest.fixture
def s3(server):
    with clients_of(server.address):
        yield server


@pytest.fixture
def folder(tmp_path, kind):
    for shard in range(SHARDS):
        kind.write(tmp_path / f"part-{shard}{kind.suffix}", texts_of_shard(shard))
    return tmp_path


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
    """The settings of our client of a store, passed on to Lance, which reads with its own client."""

    @pytest.fixture
    def kind(self):
        return LanceTokens()

    @pytest.fixture
    def bucket(self, s3, folder):
        return StoredShards(folder, "s3://corpora")

    def test_files_that_change_go_or_are_damaged_are_named(self, bucket, folder, kind, monkeypatch):
        monkeypatch.setattr(listings, "LISTED_S", 0.0)  # as if that time had passed

        def opened(shard):
            config = config_in_units(kind, folder).model_copy(
                update={"path": f"part-{shard}.lance"}
            )
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
    """A data set in the store that others keep writing."""

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
