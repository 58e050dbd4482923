"""What a URL of HDFS without Java may say, and what is asked of the client."""

import errno
import gc
import io
import sys
import types

import pytest

from fusefs.stores.protocol import RESERVED
from fusefs.stores.remote.native_hdfs import IMPATIENCE, native_hdfs_store
from fusefs.stores.url import open_store
from omniload.base.errors import ConfigError, UnavailableError

pytest.importorskip("hdfs_native")

OBJECT = f"{RESERVED}/objects/9f/0.0"


class Reader:
    def __init__(self, data, broken=False):
        self.data, self.broken = data, broken

    def __len__(self):
        return len(self.data)

    def read_range(self, offset, size):
        if self.broken:
            raise OSError("no data node answers")
        assert offset + size <= len(self.data)
        return self.data[offset : offset + size]


class Writer(io.RawIOBase):
    """As the client's: a stream of Python's, which closes those that nobody closed."""

    def __init__(self, closed, path):
        self.all_closed, self.path = closed, path

    def write(self, data):
        return len(data)

    def close(self):
        self.all_closed.append(self.path)


class Client:
    """Remembers what it is asked; answers with what stands in ``files``."""

    made = None

    def __init__(self, url, config):
        self.url, self.config, self.opened, self.renamed = url, config, [], []
        self.files, self.closed, self.refusal = {}, [], None
        Client.made = self

    def read(self, path):
        self.opened.append(path)
        return self.files[path]

    def get_file_info(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        size = len(self.files[path])
        return types.SimpleNamespace(path=path, isdir=False, length=size, modification_time=1234)

    def create(self, path, options):
        if self.refusal is not None:
            raise RuntimeError(f'RPCError("{self.refusal}", "it is so\\n\\tat org.Some.java:1")')
        path.encode()
        return Writer(self.closed, path)

    def delete(self, path, recursive):
        assert not recursive
        return self.files.pop(path, None) is not None

    def rename(self, source, target, overwrite):
        self.renamed.append((source, target, overwrite))


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr("hdfs_native.Client", Client)
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)


def backend(url="hdfs+native://n:9000/jobs"):
    return native_hdfs_store(url)._files.inner


def test_the_client_gets_address_and_settings(client):
    store = open_store("hdfs+native://n:9000/jobs?dfs.client.socket-timeout=5000&replication=2")

    assert Client.made.url == "hdfs://n:9000"
    assert Client.made.config == {"dfs.client.socket-timeout": "5000"} | IMPATIENCE
    assert store._files.inner._options.replication == 2
    assert store.location.endswith("replication=2")


@pytest.mark.parametrize("name", IMPATIENCE)
@pytest.mark.parametrize("variable", ["HADOOP_CONF_DIR", "HADOOP_HOME"])
def test_how_often_the_client_tries_is_the_urls_or_the_sites_where_they_say_it(
    client, monkeypatch, tmp_path, name, variable
):
    backend(f"hdfs+native://n/jobs?{name}=7")
    assert Client.made.config == IMPATIENCE | {name: "7"}

    folder = tmp_path / ("etc/hadoop" if variable == "HADOOP_HOME" else "")
    folder.mkdir(parents=True, exist_ok=True)
    text = (
        f"<configuration><property><name>{name}</name><value>9</value></property></configuration>"
    )
    (folder / "hdfs-site.xml").write_text(text)
    monkeypatch.setenv(variable, str(tmp_path))
    backend()

    assert name not in Client.made.config


@pytest.mark.parametrize("query", ["", "?replication=0", "?dfs.replication=", "?dfs.replication=0"])
def test_the_copies_of_a_block_are_the_sites_unless_the_url_says(client, query):
    assert backend(f"hdfs+native://n/jobs{query}")._options.replication is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hdfs+native://n/jobs?replication=two", "replication=two; a number of copies"),
        ("hdfs+native://n/jobs?dfs.replication=-1", "replication=-1; a number of copies"),
        ("hdfs+native://me@n/jobs", "names the user 'me'; set HADOOP_USER_NAME"),
    ],
)
def test_a_url_that_says_what_cannot_be_is_refused(client, url, message):
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hdfs_native", None)

    with pytest.raises(ConfigError, match=r"pip install 'omniload-data\[hdfs\]'"):
        open_store("hdfs+native://n/jobs")


def test_objects_are_opened_once_and_other_files_each_time(client):
    ours = backend()
    Client.made.files = {f"/jobs/{OBJECT}": Reader(b"0123456789"), "/jobs/plain": Reader(b"ab")}

    assert [bytes(ours.read(OBJECT, at, 2)) for at in (0, 4, 8)] == [b"01", b"45", b"89"]
    assert [bytes(ours.read("plain", 0, 2)) for _ in range(2)] == [b"ab", b"ab"]

    assert Client.made.opened == [f"/jobs/{OBJECT}", "/jobs/plain", "/jobs/plain"]


def test_a_range_past_the_end_is_cut_and_never_asked_for(client):
    ours = backend()
    Client.made.files = {f"/jobs/{OBJECT}": Reader(b"0123456789")}

    assert bytes(ours.read(OBJECT, 8, 100)) == b"89"
    assert bytes(ours.read(OBJECT, 10, 1)) == b""
    assert bytes(ours.read(OBJECT, 99, 1)) == b""


def test_an_object_whose_read_failed_is_opened_anew(client):
    ours = backend()
    Client.made.files = {f"/jobs/{OBJECT}": Reader(b"01", broken=True)}
    with pytest.raises(UnavailableError, match="no data node answers"):
        ours.read(OBJECT, 0, 2)
    Client.made.files = {f"/jobs/{OBJECT}": Reader(b"01")}

    assert bytes(ours.read(OBJECT, 0, 2)) == b"01"


def test_a_move_never_replaces_and_a_replacement_does(client):
    ours = backend()

    ours.move("a", "b")
    ours.replace("c", "b")

    assert Client.made.renamed == [("/jobs/a", "/jobs/b", False), ("/jobs/c", "/jobs/b", True)]


def test_removing_what_is_not_there_says_so(client):
    with pytest.raises(FileNotFoundError):
        backend().remove("a")


def test_half_a_file_is_not_made_whole_when_its_writer_is_collected(client):
    ours = backend()
    whole, half = ours.open_new("whole"), ours.open_new("half")
    whole.write(b"1")
    whole.close()
    half.write(b"1")
    half.abort()

    del whole, half
    gc.collect()

    assert Client.made.closed == ["/jobs/whole"]


@pytest.mark.parametrize(
    ("refusal", "number"),
    [
        ("org.apache.hadoop.fs.InvalidPathException", errno.EINVAL),
        ("org.apache.hadoop.security.AccessControlException", errno.EACCES),
        ("org.apache.hadoop.fs.ParentNotDirectoryException", errno.ENOTDIR),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", errno.EDQUOT),
        (
            "org.apache.hadoop.hdfs.protocol.FSLimitException$PathComponentTooLongException",
            errno.ENAMETOOLONG,
        ),
    ],
)
def test_what_hdfs_refuses_is_no_outage(client, refusal, number):
    ours = backend()
    Client.made.refusal = refusal

    with pytest.raises(OSError, match="HDFS refuses: it is so:") as caught:
        ours.open_new("a")

    assert (caught.value.errno, caught.value.filename) == (number, "a")


def test_a_name_that_is_no_utf8_is_refused(client):
    with pytest.raises(OSError, match="UTF-8 alone") as caught:
        backend().open_new("\udcff")

    assert caught.value.errno == errno.EINVAL


def test_an_outage_is_told_in_one_line_whatever_the_path_is_called(client):
    ours, path = backend(), 'RPCError("AccessControlException", "'
    Client.made.refusal = "org.apache.hadoop.hdfs.server.namenode.SafeModeException"

    with pytest.raises(UnavailableError) as caught:
        ours.open_new(path)

    assert str(caught.value) == f"{path!r}: HDFS answers: SafeModeException: it is so"


@pytest.mark.parametrize(
    ("url", "there"),
    [
        ("hdfs+native://n/my%20jobs", "/my jobs/a"),
        ("hdfs+native://n/my jobs/", "/my jobs/a"),
        ("hdfs+native://n/100%25", "/100%/a"),
        ("hdfs+native://n//jobs//now", "/jobs/now/a"),
        ("hdfs+native://n", "/a"),
        ("hdfs+native://n//", "/a"),
    ],
)
def test_a_folder_is_the_one_that_javas_client_means_by_it(client, url, there):
    ours = backend(url)
    Client.made.files = {there: Reader(b"abc")}

    assert ours.read("a", 0, 3) == b"abc"


@pytest.mark.parametrize("url", ["hdfs+native:///jobs", "hdfs+native://host/jobs"])
def test_an_address_that_the_client_cannot_find_says_what_to_give(monkeypatch, url):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)

    with pytest.raises(ConfigError, match="give HOST:PORT, or a name service"):
        native_hdfs_store(url)


def test_a_new_name_that_another_took_meanwhile_is_replaced(client, monkeypatch):
    store = native_hdfs_store("hdfs+native://n/jobs")
    monkeypatch.setattr(store._files, "find", lambda path: None)
    monkeypatch.setattr(store._names, "make_directory", lambda path: None)

    store.publish("a", b"1")

    ((source, target, overwrite),) = Client.made.renamed
    assert (target, overwrite) == ("/jobs/a", True)
    assert source.startswith(f"/jobs/{RESERVED}/")


def test_times_are_the_stores_milliseconds(client):
    ours = backend("hdfs+native://n/")
    Client.made.files = {"/a": Reader(b"abc")}

    found = ours.find("a")

    assert (found.name, found.size_bytes, found.mtime_ns) == ("a", 3, 1_234_000_000)
    assert ours.find("b") is None
