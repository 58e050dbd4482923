"""The folder of blobs and metadata: what is kept under which name, and what is not believed."""

import os
import stat
from pathlib import Path

import pytest

from omniload.base.errors import StateError
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_cache import BlobCache
from snapshot.image.erofs_writer import plan_metadata
from snapshot.image.tree import merge
from tests.support.erofs_builders import (
    a_directory,
    a_file,
    a_stream,
    an_index,
    content_of,
    filled,
)
from tests.support.erofs_reader import ErofsReader

STREAM = a_stream(20_000)
FILES = (a_file("a", 9000, at=512), a_file("b", 10, at=10_240))


@pytest.fixture
def index():
    return an_index(FILES, STREAM)


@pytest.fixture
def layout():
    return blob_layout(FILES)


@pytest.fixture
def cache(tmp_path):
    return BlobCache(tmp_path)


def whole(cache, index, layout):
    filling = cache.begin(index, layout)
    os.pwrite(filling.descriptor, filled(layout, STREAM), 0)
    kept = cache.keep(filling)
    os.close(filling.descriptor)
    return kept


def test_the_folder_is_its_owners_only(cache, tmp_path):
    assert stat.S_IMODE((tmp_path / "erofs/v2").stat().st_mode) == 0o700


def test_a_new_blob_is_all_hole_of_the_right_size(cache, index, layout):
    filling = cache.begin(index, layout)

    found = os.fstat(filling.descriptor)
    assert (found.st_size, found.st_blocks) == (layout.size_bytes, 0)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert cache.complete(index, layout) is None
    filling.close()


def test_a_blob_that_is_let_go_is_gone(cache, index, layout):
    filling = cache.begin(index, layout)

    filling.close()

    assert not filling.path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(filling.descriptor)


def test_two_mounts_never_share_a_blob_that_is_not_whole(cache, index, layout):
    one, other = cache.begin(index, layout), cache.begin(index, layout)

    assert one.path != other.path
    one.close()
    other.close()


def test_a_whole_blob_is_found_by_its_layer(cache, index, layout, tmp_path):
    kept = whole(cache, index, layout)

    assert cache.complete(index, layout) == kept
    assert kept.read_bytes() == filled(layout, STREAM)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o400
    assert BlobCache(tmp_path).complete(index, layout) == kept


def test_a_blob_kept_twice_stays_whole_for_who_has_it_open(cache, index, layout):
    first = whole(cache, index, layout)
    with first.open("rb") as file:
        whole(cache, index, layout)

        assert file.read() == filled(layout, STREAM)
    assert cache.complete(index, layout) == first


@pytest.mark.parametrize("size", [0, 4096, 20_480])
def test_a_blob_of_another_size_is_not_believed(cache, index, layout, size):
    kept = whole(cache, index, layout)
    kept.chmod(0o600)
    os.truncate(kept, size)

    assert cache.complete(index, layout) is None


def test_it_is_told_cheaply_whether_all_layers_may_be_here(cache, index, layout, tmp_path):
    empty = an_index([a_directory("d")], a_stream(100, seed=9))

    assert not BlobCache.may_have(tmp_path, [index])
    assert BlobCache.may_have(tmp_path, [empty])
    whole(cache, index, layout)
    assert BlobCache.may_have(tmp_path, [index, empty])


def test_asking_what_may_be_here_makes_no_folder(index, tmp_path):
    assert not BlobCache.may_have(tmp_path / "none", [index])
    assert not (tmp_path / "none").exists()


def test_metadata_is_written_once_for_an_image(cache, index, layout):
    plan = plan_metadata(merge([FILES]), [layout])

    path = cache.metadata(plan, [index])
    before = path.stat()
    again = cache.metadata(plan, [index])

    assert again == path
    assert again.stat().st_ino == before.st_ino
    reader = ErofsReader(path.read_bytes(), [filled(layout, STREAM)])
    found = {name: inode for name, _, inode in reader.tree()}
    assert reader.data(found[b"a"]) == STREAM[512:9512]


def test_images_of_other_layers_have_other_metadata(cache, index, layout):
    plan = plan_metadata(merge([FILES]), [layout])
    other = an_index(FILES, a_stream(20_000, seed=7))

    one, two = cache.metadata(plan, [index]), cache.metadata(plan, [other])

    assert one != two
    assert ErofsReader(one.read_bytes()).uuid != ErofsReader(two.read_bytes()).uuid


def test_an_image_is_whole_when_its_metadata_and_every_blob_are_here(cache, index, layout):
    empty = an_index([a_directory("d")], a_stream(100, seed=9))
    layouts = [blob_layout(one.entries) for one in (index, empty)]
    plan = plan_metadata(merge([FILES, empty.entries]), layouts)
    assert cache.whole([index, empty]) is None
    metadata = cache.metadata(plan, [index, empty])
    assert cache.whole([index, empty]) is None

    blob = whole(cache, index, layout)

    assert cache.whole([index, empty]) == (metadata, [blob])
    assert cache.whole([empty, index]) is None


def test_an_image_whose_blob_has_another_size_is_not_whole(cache, index, layout):
    cache.metadata(plan_metadata(merge([FILES]), [layout]), [index])
    blob = whole(cache, index, layout)
    blob.chmod(0o600)
    os.truncate(blob, 4096)

    assert cache.whole([index]) is None


@pytest.mark.parametrize("damage", [b"", b"nothing", bytes(2000)])
def test_metadata_that_is_none_is_removed_and_written_anew(cache, index, layout, damage):
    plan = plan_metadata(merge([FILES]), [layout])
    path = cache.metadata(plan, [index])
    right = path.read_bytes()
    whole(cache, index, layout)
    path.write_bytes(damage)

    assert cache.whole([index]) is None
    assert cache.metadata(plan, [index]).read_bytes() == right
    assert cache.whole([index]) is not None


def test_metadata_that_cannot_be_written_leaves_nothing(
    cache, index, layout, tmp_path, monkeypatch
):
    plan = plan_metadata(merge([FILES]), [layout])

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snapshot.image.erofs_cache.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        cache.metadata(plan, [index])

    assert list((tmp_path / "erofs/v2/filling").iterdir()) == []
    assert list((tmp_path / "erofs/v2/images").iterdir()) == []


def test_a_sync_that_fails_gives_a_blob_no_name(cache, index, layout, monkeypatch):
    filling = cache.begin(index, layout)

    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("snapshot.image.erofs_cache.os.fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        cache.keep(filling)

    assert cache.complete(index, layout) is None
    filling.close()


def test_what_dead_mounts_left_is_removed_and_what_is_used_stays(cache, index, layout, tmp_path):
    left, used = cache.begin(index, layout), cache.begin(index, layout)
    os.close(left.descriptor)

    assert cache.clear() == 1

    assert not left.path.exists()
    assert used.path.exists()
    used.close()


def test_a_folder_whose_paths_the_kernel_does_not_take_is_refused(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)

    with pytest.raises(StateError, match="the kernel takes 255; give a shorter"):
        BlobCache(deep)


def test_a_blob_larger_than_the_file_system_holds_is_refused_and_leaves_nothing(
    cache, index, layout, tmp_path, monkeypatch
):
    def too_large(*_):
        raise OSError(27, "File too large")

    monkeypatch.setattr("snapshot.image.erofs_cache.os.truncate", too_large)

    with pytest.raises(StateError, match="16384 bytes long: File too large; mount the image"):
        cache.begin(index, layout)
    assert list((tmp_path / "erofs/v2/filling").iterdir()) == []


def test_a_layer_indexed_anew_in_another_order_takes_neither_old_blob_nor_old_metadata(
    cache, index, layout
):
    old = cache.metadata(plan_metadata(merge([FILES]), [layout]), [index]).read_bytes()
    first = whole(cache, index, layout)
    turned = an_index(FILES[::-1], STREAM)
    other = blob_layout(turned.entries)
    assert (turned.blob_digest, other.size_bytes) == (index.blob_digest, layout.size_bytes)

    assert cache.complete(turned, other) is None
    second = whole(cache, turned, other)
    metadata = cache.metadata(plan_metadata(merge([FILES[::-1]]), [other]), [turned])

    assert cache.whole([turned]) == (metadata, [second])
    found = {entry.path: data_by(metadata.read_bytes(), second, entry.path) for entry in FILES}
    assert found == {entry.path: content_of(entry, STREAM) for entry in FILES}
    assert data_by(old, first, "a") == content_of(FILES[0], STREAM), "who has it open reads on"


def data_by(metadata, blob, path):
    reader = ErofsReader(metadata, [blob.read_bytes()])
    inodes = {name: inode for name, _, inode in reader.tree()}
    return reader.data(inodes[path.encode()])


def test_metadata_is_never_cleared_before_it_has_its_name(cache, index, layout, monkeypatch):
    plan = plan_metadata(merge([FILES]), [layout])
    replace = Path.replace

    def another_mount_clears(path, target):
        assert cache.clear() == 0
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", another_mount_clears)

    assert cache.metadata(plan, [index]).exists()
