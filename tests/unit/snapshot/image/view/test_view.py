"""The view: what the kernel is told of an image, and every byte of its files."""

import errno
import os
import stat
import tarfile

import pytest

from fusefs.bridge.api.blocking import Threaded
from fusefs.bridge.api.waiting import run_blocking
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_layer
from snapshot.image.trace.store import Recording
from snapshot.image.trace.trace import Touch
from snapshot.image.tree.merge import merge
from snapshot.image.view.view import ImageView
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, zran_friendly

BIG = zran_friendly(3_000_000)
TAR = a_tar(
    a_member("d/", kind=tarfile.DIRTYPE, mode=0o1777),
    a_member("d/big", BIG, mode=0o4755, uid=5, mtime=12, xattrs={"user.x": b"v"}),
    a_member("d/hard", kind=tarfile.LNKTYPE, linkname="d/big"),
    a_member("d/link", kind=tarfile.SYMTYPE, linkname="big"),
    a_member("d/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
    a_member("empty"),
    a_member(b"caf\xe9".decode("utf-8", "surrogateescape"), b"latin"),
)


@pytest.fixture
def made(tmp_path):
    store = OciLayout.create(tmp_path / "layout")
    index = index_layer(store, a_layer(store, TAR, "tar"), IndexCache(tmp_path / "indexes"))
    tree = merge([index.entries])
    loader = BlockLoader({"registry": RegistryTier(store)})
    now = [0.0]
    recording = Recording(tree, "", [], lambda _: None, lambda: now[0], 10.0)
    yield ImageView(tree, [index], loader, recording.note), tree, recording, now
    loader.close()


@pytest.fixture
def view(made):
    return made[0]


def number(view, path):
    inode = 1
    for name in path.split("/"):
        inode = view.lookup(inode, os.fsencode(name)).inode
    return inode


def test_attributes_are_those_of_the_image(view):
    entry = view.getattr(number(view, "d/big"))

    assert entry.mode == stat.S_IFREG | 0o4755
    assert (entry.uid, entry.gid, entry.size_bytes, entry.nlink) == (5, 0, 3_000_000, 2)
    assert entry.mtime_ns == 12 * 10**9
    assert view.getattr(1).mode == stat.S_IFDIR | 0o755
    assert view.getattr(number(view, "d/null")).rdev == os.makedev(1, 3)


def test_hard_links_are_one_inode(view):
    assert number(view, "d/hard") == number(view, "d/big")


def test_what_is_not_there_may_be_believed_so_for_long(view):
    entry = view.lookup(1, b"none")

    assert entry.inode == 0
    assert entry.entry_timeout_s > 3600


def test_a_listing_has_every_name_as_its_bytes(view):
    assert [named.name for named in view.listing(1)] == [b"caf\xe9", b"d", b"empty"]
    assert view.listing(number(view, "d"))[0].entry == view.getattr(number(view, "d/big"))


def test_links_and_attributes_are_read(view):
    assert view.readlink(number(view, "d/link")) == b"big"
    assert view.xattrs(number(view, "d/big")) == {b"user.x": b"v"}
    shown = Threaded(view)
    with pytest.raises(OSError, match="no such attribute") as caught:
        run_blocking(shown.getxattr(number(view, "d/big"), b"user.y"))
    assert caught.value.errno == errno.ENODATA
    shown.close()


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC])
def test_opening_to_write_is_refused(view, flags):
    with pytest.raises(OSError, match="does not change") as caught:
        view.open(number(view, "d/big"), flags)
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 10), (1_048_000, 2_000), (2_999_990, 100), (0, 3_000_000), (3_000_000, 5), (9_999_999, 1)],
)
def test_any_range_reads_as_the_file_has_it(view, offset, size):
    handle = view.open(number(view, "d/big"), os.O_RDONLY).handle

    data = bytes(view.read(handle, offset, size))

    assert data == BIG[offset : offset + size]
    assert bytes(view.try_read(handle, offset, size)) == data


def test_what_is_not_in_memory_is_not_waited_for_when_tried(view):
    handle = view.open(number(view, "d/big"), os.O_RDONLY).handle

    assert view.try_read(handle, 0, 10) is None
    assert view.try_read(view.open(number(view, "empty"), 0).handle, 0, 10) == b""


def test_room_is_what_the_layers_hold(view):
    space = view.statfs()

    assert space.blocks * space.block_bytes >= len(TAR)
    assert space.free_blocks == 0


def test_reads_are_recorded_once_in_order_while_the_window_is_open(made):
    view, _, recording, now = made
    big, other = number(view, "d/big"), number(view, "caf\udce9")
    view.try_read(big, 0, 10)  # gives nothing, so nothing was read
    view.read(big, 100, 50)
    now[0] = 1.5
    view.read(other, 0, 99)
    view.read(big, 100, 50)
    now[0] = 11.0
    view.read(big, 0, 5)

    assert recording.touches() == [
        Touch(0, "d/big", 100, 50),
        Touch(1500, "caf\udce9", 0, 5),
    ]


def test_the_file_system_answers_the_bindings(view):
    shown = Threaded(view)

    entry = run_blocking(shown.lookup(1, b"d"))
    listing = run_blocking(shown.opendir(entry.inode))
    opened = run_blocking(shown.open(number(view, "d/big"), os.O_RDONLY))

    assert [line.name for line in shown.readdir(listing.handle, 2)] == [b"link", b"null"]
    assert opened.keep_cache
    assert bytes(run_blocking(shown.read(opened.handle, 5, 5))) == BIG[5:10]
    assert run_blocking(shown.flush(opened.handle)) is None
    assert run_blocking(shown.fsync(opened.handle)) is None
    shown.advertised(2)
    shown.forget(2, 1)
    assert run_blocking(shown.getattr(2)).inode == 2
    shown.close()
