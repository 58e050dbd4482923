"""A folder in which every image can be looked up: its names, its files, and what is counted."""

import base64
import errno
import json
import os
import stat

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE
from fusefs.bridge.api.waiting import run_blocking
from omniload.base.clock import FakeClock
from omniload.base.errors import UnavailableError
from snapshot.engines.podman.images import RoutedTier, ServedImages
from snapshot.engines.podman.layer_store import LayerStore, LayerStoreFileSystem
from snapshot.engines.podman.uses import LayerUses
from snapshot.image.block.loader import BlockLoader
from snapshot.image.tree.merge import OPAQUE_ATTRIBUTE, layer_tree
from snapshot.image.view.view import ImageView
from tests.support.snapshot.engine_builders import BIG, LOWER, NAME, FakeOpener, a_served_image

ENCODED = base64.b64encode(str(NAME).encode())


class Place:
    """A store over one image, and all that was asked of its parts."""

    def __init__(self, folder, *answers, registries=()):
        self.served = a_served_image(folder)
        self.opener = FakeOpener(*(answers or (self.served,)))
        self.uses = LayerUses(folder / "uses", "/mnt")
        self.views = []
        self.tier = RoutedTier()
        self.tier.add(self.served)
        self.loader = BlockLoader({"registry": self.tier})
        images = ServedImages(self.opener, self.uses.image_of, clock=FakeClock())
        self.store = LayerStore(
            images, self.view_of, self.uses, registries=registries, scratch=str(folder)
        )
        self.lower, self.upper = (layer.digest.encode() for layer in self.served.image.layers)

    def view_of(self, served, place):
        self.views.append(place)
        tree = layer_tree([index.entries for index in served.indexes], place)
        return ImageView(tree, [served.indexes[place]], self.loader)

    def number(self, *names):
        inode = ROOT_INODE
        for name in names:
            found = self.store.lookup(inode, name)
            if not found.inode:
                raise FileNotFoundError(name)
            inode = found.inode
        return inode


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.loader.close()


@pytest.fixture
def shown(place):
    shown = LayerStoreFileSystem(place.store, workers=2)
    yield shown
    shown.close()


def test_a_layer_is_found_by_reference_and_digest(place):
    directory = place.number(ENCODED, place.lower)
    diff = place.store.getattr(place.number(ENCODED, place.lower, b"diff"))

    assert stat.S_ISDIR(diff.mode)
    assert [named.name for named in place.store.listing(directory)] == [b"diff", b"info", b"blob"]
    assert [named.name for named in place.store.listing(diff.inode)] == [b"bin", b"gone", b"tmp"]


def test_files_of_a_layer_are_read_with_all_they_are(place):
    store = place.store
    inode = place.number(ENCODED, place.lower, b"diff", b"bin")
    entry = store.getattr(inode)
    handle = store.open(inode, os.O_RDONLY).handle

    assert (entry.inode, entry.mode, entry.size_bytes) == (inode, stat.S_IFREG | 0o4755, len(BIG))
    assert b"".join(bytes(store.read(handle, at, 1 << 20)) for at in (0, 1 << 20, 2 << 20)) == BIG
    assert bytes(store.try_read(handle, 5, 7)) == BIG[5:12]
    assert store.xattrs(inode) == {b"user.x": b"v"}
    store.release(handle)


def test_what_an_upper_layer_deletes_is_a_mark_and_no_layer_sees_another(place):
    mark = place.store.getattr(place.number(ENCODED, place.upper, b"diff", b"gone"))
    link = place.number(ENCODED, place.upper, b"diff", b"link")

    assert (stat.S_IFMT(mark.mode), mark.rdev) == (stat.S_IFCHR, 0)
    assert place.store.readlink(link) == b"bin"
    with pytest.raises(FileNotFoundError):
        place.number(ENCODED, place.upper, b"diff", b"bin")
    tmp = place.store.getattr(place.number(ENCODED, place.upper, b"diff", b"tmp"))
    assert stat.S_IMODE(tmp.mode) == 0o1777
    assert OPAQUE_ATTRIBUTE.encode() not in place.store.xattrs(tmp.inode)


def test_numbers_differ_between_layers_and_stay_the_same(place):
    diffs = [place.number(ENCODED, layer, b"diff") for layer in (place.lower, place.upper)]

    assert len(set(diffs)) == 2
    assert diffs == [place.number(ENCODED, layer, b"diff") for layer in (place.lower, place.upper)]


def test_info_tells_the_engine_digests_and_sizes(place):
    inode = place.number(ENCODED, place.lower, b"info")
    entry, opened = place.store.getattr(inode), place.store.open(inode, os.O_RDONLY)

    data = place.store.read(opened.handle, 0, 4096)

    assert opened.direct_io
    assert entry.size_bytes == len(data)
    told = json.loads(data)
    assert told["compressed-diff-digest"] == place.lower.decode()
    assert told["diff-digest"] == place.served.image.config.rootfs.diff_ids[0]
    assert place.store.read(opened.handle, 3, 5) == data[3:8]
    assert place.store.try_read(opened.handle, 0, 10) is None


def test_a_blob_is_the_whole_layer_and_leaves_nothing_behind(place, tmp_path):
    before = set(tmp_path.iterdir())
    inode = place.number(ENCODED, place.lower, b"blob")
    first, second = (place.store.open(inode, os.O_RDONLY).handle for _ in range(2))

    assert place.store.getattr(inode).size_bytes == len(LOWER)
    assert first != second
    assert place.store.try_read(first, 0, 10) is None
    assert bytes(place.store.read(first, 0, 1 << 30)) == LOWER
    place.store.release(first)
    assert place.store.read(second, 100, 50) == LOWER[100:150]
    place.store.release(second)
    assert set(tmp_path.iterdir()) == before


def test_a_blob_that_the_registry_altered_is_never_shown(place, tmp_path):
    inode = place.number(ENCODED, place.lower, b"blob")
    path = tmp_path / "layout/blobs/sha256" / place.lower.decode().partition(":")[2]
    path.write_bytes(LOWER[:-1] + b"x")

    with pytest.raises(Exception, match="digest"):
        place.store.open(inode, os.O_RDONLY)


@pytest.mark.parametrize(
    "name", [b"x", b"use", base64.b64encode(b"../a:v"), base64.b64encode(b"r.example/a"), b"\xff"]
)
def test_a_name_that_is_no_reference_asks_nobody(place, name):
    with pytest.raises(FileNotFoundError):
        place.store.lookup(ROOT_INODE, name)
    assert place.opener.asked == []


def test_a_registry_that_is_not_allowed_is_not_asked(tmp_path):
    place = Place(tmp_path, registries=["other.example"])

    with pytest.raises(FileNotFoundError):
        place.store.lookup(ROOT_INODE, ENCODED)
    assert place.opener.asked == []
    place.loader.close()


def test_an_image_that_cannot_be_had_is_not_there(tmp_path):
    place = Place(tmp_path, UnavailableError("no"))

    with pytest.raises(FileNotFoundError):
        place.number(ENCODED)
    assert place.store.listing(ROOT_INODE) == []
    place.loader.close()


@pytest.mark.parametrize("name", [b"sha256:ab", b"..", b"diff", b"sha256:" + b"00" * 32])
def test_a_layer_that_the_image_has_not_is_not_there(place, name):
    with pytest.raises(FileNotFoundError):
        place.number(ENCODED, name)


@pytest.mark.parametrize("name", [b"use", b"x", b"Diff"])
def test_nothing_else_is_in_the_directory_of_a_layer(place, name):
    with pytest.raises(FileNotFoundError):
        place.number(ENCODED, place.lower, name)


def test_only_what_was_looked_up_is_listed(place):
    assert place.store.listing(ROOT_INODE) == []
    reference = place.number(ENCODED)
    assert [named.name for named in place.store.listing(ROOT_INODE)] == [ENCODED]
    assert place.store.listing(reference) == []
    place.number(ENCODED, place.upper)
    assert [named.name for named in place.store.listing(reference)] == [place.upper]


def test_what_the_store_adds_is_for_root_alone_and_has_no_attributes(place):
    for names in ((), (ENCODED,), (ENCODED, place.lower), (ENCODED, place.lower, b"info")):
        inode = place.number(*names)
        entry = place.store.getattr(inode)
        assert stat.S_IMODE(entry.mode) in {0o500, 0o400}
        assert (entry.uid, entry.gid) == (0, 0)
        assert place.store.xattrs(inode) == {}


def test_nothing_can_be_written(place, shown):
    inode = place.number(ENCODED, place.lower, b"diff", b"bin")
    directory = place.number(ENCODED, place.lower)

    for call in (
        lambda: place.store.open(inode, os.O_RDWR),
        lambda: place.store.open(inode, os.O_RDONLY | os.O_TRUNC),
        lambda: run_blocking(shown.mkdir(directory, b"x", 0o755)),
        lambda: run_blocking(shown.unlink(directory, b"info")),
        lambda: run_blocking(shown.create(directory, b"x", 0o644, os.O_WRONLY)),
        lambda: run_blocking(shown.create(ROOT_INODE, b"use", 0o644, os.O_WRONLY)),
        lambda: run_blocking(shown.create(inode, b"use", 0o644, os.O_WRONLY)),
        lambda: run_blocking(shown.rmdir(ROOT_INODE, ENCODED)),
        lambda: run_blocking(shown.rmdir(directory, b"diff")),
    ):
        with pytest.raises(OSError, match=r".") as error:
            call()
        assert error.value.errno == errno.EROFS


@pytest.mark.parametrize("names", [(), (ENCODED,)])
def test_a_directory_of_the_store_is_not_opened_as_a_file(place, names):
    with pytest.raises(IsADirectoryError):
        place.store.open(place.number(*names), os.O_RDONLY)


def test_a_use_is_counted_and_answered_as_if_nothing_were_there(place, shown):
    directory = place.number(ENCODED, place.lower)
    lower = place.lower.decode()

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            run_blocking(shown.create(directory, b"use", 0o644, os.O_RDWR))
    assert place.uses.image_of(NAME, lower) == place.served.image.digest

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            run_blocking(shown.rmdir(place.number(ENCODED), place.lower))
    assert place.uses.image_of(NAME, lower) is None


def test_a_layer_that_nobody_uses_gives_its_tree_back_and_gets_it_again(place, shown):
    directory = place.number(ENCODED, place.lower)
    inode = place.number(ENCODED, place.lower, b"diff", b"bin")
    before = place.store.getattr(inode)
    with pytest.raises(FileNotFoundError):
        run_blocking(shown.create(directory, b"use", 0o644, os.O_RDWR))
    assert place.store.is_cached(inode)

    with pytest.raises(FileNotFoundError):
        run_blocking(shown.rmdir(place.number(ENCODED), place.lower))

    assert not place.store.is_cached(inode)
    assert place.store.try_read(inode, 0, 1) is None
    assert run_blocking(shown.getattr(inode)) == before
    assert place.views == [0, 0]


def test_a_layer_in_use_is_shown_after_a_new_start_though_the_tag_is_gone(place, tmp_path):
    place.uses.add(NAME, place.lower.decode(), place.served.image.digest)
    later = Place.__new__(Place)
    later.__dict__.update(place.__dict__)
    later.opener = FakeOpener(place.served)
    images = ServedImages(later.opener, place.uses.image_of, clock=FakeClock())
    later.store = LayerStore(images, later.view_of, place.uses)

    assert later.number(ENCODED, place.lower, b"diff", b"bin")
    assert later.opener.asked == [(str(NAME), place.served.image.digest)]


def test_only_what_may_ask_a_registry_goes_to_a_thread(place, shown):
    inode = place.number(ENCODED, place.lower, b"diff", b"bin")
    diff = place.number(ENCODED, place.lower, b"diff")

    for handling in (shown.getattr(inode), shown.lookup(diff, b"bin"), shown.open(inode, 0)):
        with pytest.raises(StopIteration):  # at once: it waited for nothing
            handling.send(None)
    assert run_blocking(shown.lookup(ROOT_INODE, ENCODED)).inode == place.number(ENCODED)
    assert bytes(run_blocking(shown.read(inode, 0, 3))) == BIG[:3]
    assert run_blocking(shown.statfs()).inodes == 1
