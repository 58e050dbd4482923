"""The store contract over every store that needs no server."""

import uuid

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs as pafs

from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import checked_path
from fusefs.stores.remote.arrow import store_on
from fusefs.stores.remote.fsspec_store import FsspecBackend, fsspec_store
from fusefs.stores.remote.rename_store import RenamingStore
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from omniload.base.errors import ConfigError
from tests.support.fusefs.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path)


class TestLocalStoreWithoutOpenat2(StoreContract):
    """As on a kernel before 5.6, or in a sandbox that forbids the call."""

    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path, walks=True)


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self):
        return RetryingStore(MemoryStore(), waits_s=())


class TestArrowStoreOverALocalDirectory(StoreContract):
    """pyarrow's client under the store for clients that rename, as for HDFS."""

    @pytest.fixture
    def store(self, tmp_path):
        return store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")


class TestFsspecStoreThatPuts(StoreContract):
    @pytest.fixture
    def store(self):
        return fsspec_store(f"memory://{uuid.uuid4().hex}")


class TestFsspecStoreThatRenames(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        # A directory stands in for a server: no URL leads to it through this client.
        client = LocalFileSystem(skip_instance_cache=True)
        return RenamingStore(FsspecBackend(client, str(tmp_path), f"sftp://host{tmp_path}"))


@pytest.mark.parametrize("path", ["a/../b", "a//b", "./a", "a\0b", "n" * 256])
def test_a_path_that_is_not_plain_is_refused(path):
    with pytest.raises(ValueError, match=r"plain path|shorten it"):
        checked_path(path)


@pytest.mark.parametrize("walks", [False, True])
def test_a_path_in_a_local_store_may_be_of_any_length(tmp_path, walks):
    store = LocalStore(tmp_path, walks=walks)
    deep = "/".join(["n" * 250] * 40)

    store.publish(f"{deep}/f", b"inside")
    store.rename(f"{deep}/f", f"{deep}/g")

    assert len(f"{deep}/g") > 2 * 4096
    assert store.read(f"{deep}/g", 0, 6) == b"inside"
    assert store.stat(f"{deep}/g").name == "g"
    assert [entry.name for entry in store.listing(deep)] == ["g"]
    store.remove(f"{deep}/g")
    assert store.listing(deep) == []


@pytest.mark.parametrize("url", ["nosuchscheme://host/x", "/no/such/folder"])
def test_a_url_that_opens_nothing_is_a_configuration_error_with_the_url(url):
    with pytest.raises(ConfigError, match=url.partition(":")[0]):
        open_store(url)


def test_a_path_opens_as_a_local_directory(tmp_path):
    assert open_store(str(tmp_path)).location == open_store(f"file://{tmp_path}").location
