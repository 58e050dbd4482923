"""What an open tells the kernel to keep, and who reads a version from its local copy."""

import errno
import os

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import run_blocking
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.session import STATS_INODE
from fusefs.vfs.store_filesystem import StoreFileSystem
from omniload.base.errors import StateError
from tests.support.fusefs.bridge.mount import DATA


def test_the_page_cache_is_kept_over_opens_of_the_same_version(mount):
    inode = mount.lookup()

    first = mount.open(inode)
    assert not first.keep_cache
    assert mount.open(inode).keep_cache
    mount.release(first)
    assert mount.open(inode).keep_cache


def test_the_page_cache_is_dropped_for_a_version_written_elsewhere(mount):
    inode = mount.lookup()
    mount.release(mount.open(inode))

    mount.files.write_file("f", DATA[::-1])

    again = mount.open(inode)
    assert not again.keep_cache
    assert mount.read(again) == DATA[::-1]


def test_the_page_cache_is_dropped_after_a_write_through_it_whatever_became_of_it(mount):
    inode = mount.lookup()
    mount.release(mount.open(inode))
    writer = mount.open(inode, os.O_RDWR)
    run_blocking(mount.shown.write(writer.handle, 5, b"xx"))

    assert not mount.open(inode).keep_cache


def test_a_file_opened_to_write_promises_nothing(mount):
    inode = mount.lookup()
    mount.release(mount.open(inode))

    assert not mount.open(inode, os.O_RDWR).keep_cache


def test_only_the_first_read_only_open_brings_a_local_copy(mount, local):
    inode = mount.lookup()

    assert mount.open(inode).local_fd is not None
    second = mount.open(inode)
    assert second.local_fd is None


def test_an_open_to_write_brings_none(mount, local):
    assert mount.open(mount.lookup(), os.O_RDWR).local_fd is None


def test_a_writer_gets_a_new_inode_while_the_kernel_reads_the_old_one_by_itself(mount, local):
    old = mount.lookup()
    reader = mount.open(old)

    with pytest.raises(OSError, match="another inode") as caught:
        mount.open(old, os.O_RDWR)
    assert caught.value.errno == errno.ESTALE

    new = mount.lookup()
    assert new != old
    writer = mount.open(new, os.O_RDWR | os.O_TRUNC)
    run_blocking(mount.shown.write(writer.handle, 0, b"new"))
    run_blocking(mount.shown.flush(writer.handle))
    assert mount.files.stat("f").size_bytes == 3
    assert run_blocking(mount.shown.getattr(old)).size_bytes == len(DATA)
    mount.release(reader)


def test_a_newer_version_is_opened_as_a_new_inode(mount, local):
    old = mount.lookup()
    mount.open(old)
    mount.files.write_file("f", b"newer")

    with pytest.raises(OSError, match="another inode"):
        mount.open(old)

    assert mount.lookup() != old


def test_a_size_set_by_path_goes_to_a_new_inode_too(mount, local):
    old = mount.lookup()
    mount.open(old)

    with pytest.raises(OSError, match="another inode"):
        run_blocking(mount.shown.setattr(old, Change(size_bytes=3), None))

    run_blocking(mount.shown.setattr(mount.lookup(), Change(size_bytes=3), None))
    assert mount.files.stat("f").size_bytes == 3


def test_a_file_without_a_name_is_read_on_but_not_written(mount, local):
    old = mount.lookup()
    mount.open(old)
    run_blocking(mount.shown.unlink(ROOT_INODE, b"f"))

    assert mount.open(old).local_fd is None
    with pytest.raises(OSError, match="unlinked") as caught:
        mount.open(old, os.O_RDWR)
    assert caught.value.errno == errno.ETXTBSY


def test_what_is_open_goes_to_another_process_as_json_values(mount):
    inode = mount.lookup()
    reader = mount.open(inode)
    writer = mount.open(mount.lookup(), os.O_RDWR)
    run_blocking(mount.shown.write(writer.handle, 0, b"XX"))
    listing = run_blocking(mount.shown.opendir(ROOT_INODE))

    state = run_blocking(mount.shown.handed_over())
    other = StoreFileSystem(mount.files, SpoolPlace())
    run_blocking(other.taken_over(state))

    assert bytes(run_blocking(other.read(reader.handle, 0, 5))) == b"XX" + DATA[2:5]
    run_blocking(other.write(writer.handle, 2, b"YY"))
    run_blocking(other.flush(writer.handle))
    assert [line.name for line in other.readdir(listing.handle, 0)] == [b"f"]
    assert run_blocking(other.lookup(ROOT_INODE, b"f")).inode == inode
    new = run_blocking(other.open(inode, os.O_RDONLY)).handle
    assert new not in {reader.handle, writer.handle, listing.handle}
    other.close()


def test_a_name_of_any_bytes_goes_along(mount):
    mount.files.write_file(os.fsdecode(b"odd\xff"), b"1")
    inode = mount.lookup(b"odd\xff")

    state = run_blocking(mount.shown.handed_over())
    other = StoreFileSystem(mount.files, SpoolPlace())
    run_blocking(other.taken_over(state))

    assert run_blocking(other.getattr(inode)).size_bytes == 1
    other.close()


def test_a_version_that_is_gone_from_its_path_is_not_handed_over(mount):
    mount.open(mount.lookup())
    mount.files.write_file("f", b"newer")

    with pytest.raises(StateError, match="'f' is open and was replaced"):
        run_blocking(mount.shown.handed_over())


def test_a_state_of_another_version_is_refused(mount):
    with pytest.raises(StateError, match="version 7"):
        run_blocking(mount.shown.taken_over({"version": 7}))


def test_a_mount_of_another_store_is_not_taken_over(mount):
    state = run_blocking(mount.shown.handed_over())

    with pytest.raises(StateError, match=r"shows 'elsewhere', not .* give the same store"):
        run_blocking(mount.shown.taken_over({**state, "store": "elsewhere"}))


def test_a_file_that_is_gone_when_it_is_opened_again_ends_the_take_over(mount):
    mount.open(mount.lookup())
    state = run_blocking(mount.shown.handed_over())
    mount.files.names.remove("f")
    other = StoreFileSystem(mount.files, SpoolPlace())

    with pytest.raises(StateError, match="'f' is open and cannot be opened again"):
        run_blocking(other.taken_over(state))


def test_what_a_mount_tells_about_itself_has_no_attributes_and_does_not_change(mount):
    folder = run_blocking(mount.shown.lookup(ROOT_INODE, b".omnifs")).inode
    file = run_blocking(mount.shown.lookup(folder, b"stats.json")).inode

    for inode in (folder, file):
        assert list(run_blocking(mount.shown.listxattr(inode))) == []
        for name in (b"security.selinux", b"user.any"):
            with pytest.raises(OSError, match=r".") as caught:
                run_blocking(mount.shown.getxattr(inode, name))
            assert caught.value.errno == errno.ENODATA
        for change in (
            mount.shown.setattr(inode, Change(mode=0o600), None),
            mount.shown.setxattr(inode, b"user.any", b"1"),
            mount.shown.removexattr(inode, b"user.any"),
        ):
            with pytest.raises(PermissionError, match="do not change"):
                run_blocking(change)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_TRUNC])
def test_statistics_cannot_be_opened_for_writing(mount, flags):
    with pytest.raises(PermissionError) as caught:
        mount.open(STATS_INODE, flags)

    assert caught.value.errno == errno.EPERM
    assert mount.read(mount.open(STATS_INODE)).startswith(b"{")
