"""Local copies of plain files, which lie at a path where another file may lie by now."""

import errno
import os

import pytest

from fusefs.config import DiskCacheConfig, FilesConfig
from fusefs.stores.local.store import LocalStore
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import UnavailableError

OLD, NEW = b"old " * 5000, b"new " * 5000
OLD_NS = 1_700_000_000_123_456_789


def lay(path, data, mtime_ns):
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


@pytest.fixture
def root(tmp_path):
    (tmp_path / "store").mkdir()
    lay(tmp_path / "store/f", OLD, OLD_NS)
    return tmp_path / "store"


@pytest.fixture
def files(tmp_path, root):
    disk = DiskCacheConfig(directory=str(tmp_path / "disk"), capacity=1 << 20)
    # Smaller ones come whole when they are opened.
    made = StripedFiles(LocalStore(root), FilesConfig(disk_cache=disk, plain_limit=4096))
    yield made
    made.close()


def kept(files):
    with files.open("f") as file:
        file.reader.cached.keep(0, file.reader.size_bytes)
        return file.reader.cached.held_bytes()


def test_a_plain_file_with_a_settled_time_stamp_is_kept(files):
    assert kept(files) == (len(OLD), len(OLD))


@pytest.mark.parametrize("new", [NEW, NEW * 2, NEW[:100]])
def test_what_replaced_a_file_while_it_was_open_is_neither_read_nor_kept_as_that_file(
    files, root, new
):
    with files.open("f") as file:
        lay(root / "f", new, OLD_NS + 1_000_000_001)
        for read in (file.reader.read, file.reader.cached.keep):
            with pytest.raises(OSError, match="is gone; open the file again") as caught:
                read(0, len(OLD))
            assert caught.value.errno == errno.ESTALE

    lay(root / "f", OLD, OLD_NS)  # moved back, or restored with its time
    with files.open("f") as file:
        assert file.reader.read(0, len(OLD)) == OLD


def test_a_file_that_is_gone_after_it_was_read_is_not_kept(files, root, monkeypatch):
    with files.open("f") as file:
        read = files.store.read

        def read_and_remove(*arguments):
            data = read(*arguments)
            (root / "f").unlink()
            return data

        monkeypatch.setattr(files.store, "read", read_and_remove)
        with pytest.raises(OSError, match="is gone"):
            file.reader.cached.keep(0, len(OLD))
        assert file.reader.cached.held_bytes()[1] == 0


def test_bytes_of_which_an_outage_hides_whether_they_are_of_this_version_are_not_believed(
    files, monkeypatch
):
    with files.open("f") as file:

        def unavailable(_):
            raise UnavailableError("no store")

        monkeypatch.setattr(files.store, "stat", unavailable)
        with pytest.raises(UnavailableError):
            file.reader.read(0, len(OLD))
        assert file.reader.cached.held_bytes() == (0, 0)


def test_a_file_renamed_here_is_kept_on(files):
    with files.open("f") as file:
        files.names.rename("f", "g")
        file.moved("g")
        file.reader.cached.keep(0, len(OLD))
        assert file.reader.cached.held_bytes() == (len(OLD), len(OLD))
