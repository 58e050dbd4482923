"""What S3 is asked: how often until the first byte of a file, and that no outage passes for "not there"."""

import base64
import datetime
import http.server
import importlib.util
import random
import socket
import threading
import uuid

import pytest
from pyarrow import fs as pafs

from fusefs.format.attributes import Attributes
from fusefs.stores.remote.arrow import arrow_store, store_on
from fusefs.stores.url import check_root
from fusefs.tree import manifests
from fusefs.tree.file_attributes import set_attributes
from omniload.base.errors import ConfigError, UnavailableError
from tests.support.fusefs.builders import contents, some_files

needs_moto = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None, reason="S3 NOT TESTED: moto is not installed"
)
pytestmark = pytest.mark.slow
DATA = bytes(range(250)) * 400


@pytest.fixture(scope="module")
def server(s3_of_all):
    return s3_of_all


@pytest.fixture
def bucket(server, monkeypatch):
    monkeypatch.setattr(manifests, "SETTLED_NS", -(10**18))
    name = uuid.uuid4().hex
    server.client.create_dir(name)
    return name


@pytest.fixture
def fresh(server, bucket):
    """Returns a store as a process that has just begun has it."""

    def build():
        store = store_on(server.client, bucket, f"s3://{bucket}")
        server.asked()
        return store

    with some_files(build()) as files:
        files.write_file("d/striped", DATA)
        files.write_file("d/plain", b"a few bytes")
    return build


@needs_moto
def test_a_mount_asks_for_its_root_and_for_marked_directories_once(server, fresh):
    store = fresh()
    check_root(store)
    with some_files(store) as files:
        files.stat("")
        files.stat("")

        assert server.asked() == ["HEAD", "LIST .omnifs/directories/"]


@needs_moto
def test_a_prefix_begins_with_its_first_mount_in_a_bucket_that_is_there_alone(
    server, bucket, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    where = f"?scheme=http&endpoint_override={server.address}&region=us-east-1"

    with pytest.raises(ConfigError, match="there is no bucket 'nowhere'"):
        check_root(arrow_store(f"s3://nowhere/new{where}"), begin=True)
    with pytest.raises(ConfigError, match="holds nothing yet"):
        check_root(arrow_store(f"s3://{bucket}/new/prefix{where}"))
    store = arrow_store(f"s3://{bucket}/new/prefix{where}")
    check_root(store, begin=True)
    check_root(store)

    with some_files(store) as files:
        assert files.listing("") == []
        files.write_file("f", DATA)
        assert contents(files, "f") == DATA


@needs_moto
def test_from_lookup_to_the_first_byte_the_manifest_is_read_once(server, fresh):
    with some_files(fresh()) as files:
        assert files.stat("d/striped").size_bytes == len(DATA)
        looked_up = server.asked()
        file = files.open("d/striped")
        opened = server.asked()
        first = file.reader.read(0, 1)
        began = server.asked()
        file.close()
        files.open("d/striped").close()
        files.manifest("d/striped")
        again = [asked for asked in server.asked() if not asked.endswith(" object")]

    assert looked_up == ["HEAD d/striped", "HEAD d/striped", "GET d/striped"]
    assert opened == ["HEAD d/striped"]
    assert bytes(first) == DATA[:1]
    assert {"HEAD object", "GET object"} == set(began)
    assert again == ["HEAD d/striped"] * 2


@needs_moto
def test_what_was_listed_is_found_and_made_ready_by_one_request(server, fresh):
    with some_files(fresh()) as files:
        assert [info.name for info in files.listing("d")] == ["plain", "striped"]
        listed = server.asked()
        assert contents(files, "d/plain") == b"a few bytes"
        read = server.asked()
        files.stat("d/plain")
        assert contents(files, "d/plain") == b"a few bytes"
        again = server.asked()

    assert listed == ["LIST d/", "HEAD d/striped", "GET d/striped"]
    # In the end whether it still is what was opened: a read tells of no version.
    assert read == ["HEAD d/plain", "GET d/plain", "HEAD d/plain"]
    assert again == ["HEAD d/plain", "HEAD d/plain"], "its bytes are at hand"


@needs_moto
def test_both_ways_to_find_a_file_say_the_same(server, fresh):
    store = fresh()
    asked_for = store.stat("d/plain")
    opened = store.stat("d/plain")
    (listed,) = [entry for entry in store.listing("d") if entry.name == "plain"]

    assert asked_for == opened == listed
    assert asked_for.size_bytes == 11
    assert asked_for.mtime_ns % 10**9 == 0


@needs_moto
def test_what_was_found_by_opening_is_the_version_of_then(server, fresh):
    reader, writer = fresh(), fresh()
    assert {entry.name for entry in reader.listing("d")} == {"plain", "striped"}
    assert reader.stat("d/plain").size_bytes == 11

    writer.publish("d/plain", b"some bytes more")
    assert reader.stat("d/plain").size_bytes == 15
    assert reader.read("d/plain", 0, 15) == b"some bytes more"
    writer.remove("d/plain")
    with pytest.raises(FileNotFoundError):
        reader.stat("d/plain")
    writer.publish("d/striped/below", b"1")
    writer.remove("d/striped")
    assert reader.stat("d/striped").is_directory


@needs_moto
def test_an_empty_file_is_found_though_opening_could_not_tell_it_from_a_directory(server, fresh):
    store = fresh()
    store.publish("d/empty", b"")
    store.listing("d")

    assert not store.stat("d/empty").is_directory
    assert store.stat("d/empty").size_bytes == 0


@needs_moto
def test_what_is_not_there_costs_one_answer_and_a_look_at_the_parent(server, fresh):
    store = fresh()
    with pytest.raises(FileNotFoundError):
        store.stat("none")
    at_the_top = server.asked()
    with pytest.raises(FileNotFoundError):
        store.stat("d/none")
    below = server.asked()
    with pytest.raises(NotADirectoryError):
        store.stat("d/plain/none")
    with pytest.raises(FileNotFoundError):
        store.listing(".omnifs/none")

    assert at_the_top == ["HEAD none", "LIST none/"]
    assert below == ["HEAD d/none", "LIST d/none/", "HEAD d"]
    assert server.asked()[-1] == "LIST .omnifs/none/"


@needs_moto
def test_a_listing_that_holds_something_is_one_request(server, fresh):
    with some_files(fresh()) as files:
        for number in range(10):
            files.write_file(f"ten/{number}", b"1")
    store = fresh()

    assert len(store.listing("ten")) == 10
    assert server.asked() == ["LIST ten/"]
    with pytest.raises(FileNotFoundError):
        store.listing("none")
    with pytest.raises(NotADirectoryError):
        store.listing("d/plain")


@needs_moto
def test_a_small_file_is_put_by_one_request_and_a_long_one_in_parts_elsewhere_first(
    server, bucket, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    where = f"endpoint_override={server.address}&scheme=http&region=us-east-1"
    store = arrow_store(f"s3://{bucket}?{where}")
    server.asked()

    store.publish("f", b"a few bytes")
    assert server.asked() == ["HEAD f", "LIST f/", "PUT f"]
    data = random.Random(1).randbytes(11 << 20)
    store.publish("f", data)
    asked = server.asked()

    assert [request for request in asked if request.endswith(" f")] == ["HEAD f", "PUT f"]
    assert sum(request.startswith("POST .omnifs/new/") for request in asked) == 2  # begun, ended
    assert store.read("f", 0, len(data)) == data
    assert store.listing(".omnifs/new") == []


@needs_moto
def test_a_marked_directory_shows_its_attributes_on_s3_too(fresh):
    with some_files(fresh()) as files:
        set_attributes(files, "d", Attributes(mode=0o710))
    with some_files(fresh()) as later:
        assert later.stat("d").mode == 0o710


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers by one status per kind of request, without a body."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.server.asked.append((self.command, name == "f"))
        self.send_response(self.server.statuses[self.command])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def answering():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def a_client(kind, port, **options):
    if kind == "s3":
        return pafs.S3FileSystem(
            **options,
            access_key="k",
            secret_key="s",
            endpoint_override=f"http://127.0.0.1:{port}",
            region="us-east-1",
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1),
        )
    if kind == "gcs":
        return pafs.GcsFileSystem(
            anonymous=True,
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            retry_time_limit=datetime.timedelta(milliseconds=1),
        )
    return pafs.AzureFileSystem(
        "account",
        account_key=base64.b64encode(b"key").decode(),
        blob_storage_authority=f"127.0.0.1:{port}",
        dfs_storage_authority=f"127.0.0.1:{port}",
        blob_storage_scheme="http",
        dfs_storage_scheme="http",
    )


@pytest.mark.parametrize(
    ("kind", "head", "get"),
    [
        ("s3", 500, 500),
        ("s3", 403, 403),
        ("s3", 404, 503),
        ("s3", 404, 403),
        ("gcs", 500, 500),
        ("gcs", 403, 403),
        ("abfs", 403, 403),  # its client waits for many seconds after a 500
        ("abfs", 404, 403),
    ],
)
def test_an_answer_that_is_a_failure_is_never_taken_for_not_there(answering, kind, head, get):
    answering.statuses = {"HEAD": head, "GET": get}
    store = store_on(a_client(kind, answering.server_port), "bucket", f"{kind}://bucket")

    for call in (lambda: store.stat("f"), lambda: store.listing("d"), lambda: store.create("f")):
        with pytest.raises((UnavailableError, PermissionError)):
            call()


@pytest.mark.parametrize("size_bytes", [3, 25 << 20])
@pytest.mark.parametrize("puts_at_once", [False, True])
def test_a_put_that_fails_removes_nothing(answering, puts_at_once, size_bytes):
    answering.statuses = {"HEAD": 200, "GET": 200, "PUT": 403, "POST": 403, "DELETE": 204}
    client = a_client("s3", answering.server_port, allow_delayed_open=puts_at_once)
    store = store_on(client, "bucket", "s3://bucket")

    with pytest.raises((UnavailableError, PermissionError)):
        store.publish("f", bytes(size_bytes))

    is_put = puts_at_once and size_bytes == 3
    changed = [command for command, at_path in answering.asked if at_path and command != "HEAD"]
    assert set(changed) == ({"PUT"} if is_put else {"POST"} if size_bytes == 3 else set())
    assert {"PUT", "POST"} & {command for command, _ in answering.asked}


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_server_that_is_not_there_is_an_outage(kind):
    with socket.socket() as probe:
        # Never listens: nobody else gets the port, and nothing answers.
        probe.bind(("127.0.0.1", 0))
        store = store_on(a_client(kind, probe.getsockname()[1]), "bucket", f"{kind}://bucket")

        with pytest.raises(UnavailableError):
            store.stat("f")


def test_what_a_server_says_is_not_there_is_believed_at_once(answering):
    answering.statuses = {"HEAD": 404, "GET": 404}
    store = store_on(a_client("gcs", answering.server_port), "bucket", "gs://bucket")

    with pytest.raises(FileNotFoundError):
        store.stat("f")
