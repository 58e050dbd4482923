"""Registries that die, lie or stutter in mid-start, and disks that fill: right bytes or a clear error."""

import contextlib
import errno
import os
import subprocess
import tempfile

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import block_refs
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_layer
from snapshot.oci.layout import OciLayout
from snapshot.oci.registry import Registry
from snapshot.oci.store import MirroredStore
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_index, zran_friendly
from tests.support.snapshot.registries.fake import FakeRegistry, serving

TAR = a_tar(a_member("big", zran_friendly(4_000_000)))
BLOCKS = [TAR[i : i + (1 << 20)] for i in range(0, len(TAR), 1 << 20)]


@pytest.fixture
def fake():
    registry = FakeRegistry()
    registry.put(TAR)
    with serving(registry):
        yield registry


@pytest.fixture
def index(tmp_path):
    return an_index(tmp_path, TAR)


def client(fake):
    settings = RegistrySettings(timeout_s=60, attempts=3)
    return Registry(Transport(fake.address, settings, clock=FakeClock()), "a/b")


@pytest.fixture
def loader_of():
    made = []

    def make(store, disk=None):
        made.append(BlockLoader({"registry": RegistryTier(store)}, disk))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def answers(status):
    return lambda handler: handler.answer(status, b"no")


def breaks_off(handler):
    handler.break_off(200, len(TAR), TAR[:1000])


def lies(handler):
    """Answer the asked range with other bytes."""
    data = bytes(len(TAR))
    handler.blob(data)


def test_outages_and_breaks_that_end_cost_nothing_but_time(fake, index, loader_of):
    fake.faults = [answers(503), breaks_off]

    assert loader_of(client(fake)).block(index, 1) == BLOCKS[1]

    fake.assert_all_faults_fired()


def test_a_registry_that_is_down_is_an_error_and_is_asked_again_by_the_next_read(
    fake, index, loader_of
):
    fake.faults = [answers(503)] * 3
    loader = loader_of(client(fake))

    with pytest.raises(UnavailableError, match="answers 503"):
        loader.block(index, 1)

    fake.assert_all_faults_fired()
    assert loader.block(index, 1) == BLOCKS[1]


def test_a_registry_that_sends_other_bytes_is_an_error_and_never_data(fake, index, loader_of):
    fake.faults = [lies]
    loader = loader_of(client(fake))

    with pytest.raises(IntegrityError, match="no right bytes"):
        loader.block(index, 1)

    fake.assert_all_faults_fired()
    assert loader.block(index, 1) == BLOCKS[1]


def test_a_blob_that_vanished_is_an_error_that_says_so(fake, index, loader_of):
    fake.blobs.clear()

    with pytest.raises(UnavailableError, match="not found"):
        loader_of(client(fake)).block(index, 0)


def test_a_mirror_that_dies_is_replaced_by_the_origin(fake, index, loader_of):
    dying = FakeRegistry()
    dying.put(TAR)
    with serving(dying):
        loader = loader_of(MirroredStore(client(fake), [client(dying)]))
        assert loader.block(index, 0) == BLOCKS[0]
        assert fake.asked == []
        dying.faults = [answers(500)] * 3

        assert loader.block(index, 1) == BLOCKS[1]

        dying.assert_all_faults_fired()
    assert loader.block(index, 2) == BLOCKS[2]


def test_a_failed_prefetch_harms_no_later_reader(fake, index, loader_of):
    fake.faults = [answers(503)] * 3
    loader = loader_of(client(fake))

    loader.prefetch(index, list(block_refs(index, range(3))))
    with contextlib.suppress(UnavailableError):
        loader.block(index, 0)  # waits for the prefetch, if that has not failed already

    fake.assert_all_faults_fired()
    assert [loader.block(index, number) for number in range(4)] == BLOCKS[:4]


def test_a_disk_that_is_full_costs_no_read(fake, index, loader_of, tmp_path, monkeypatch):
    store = BlockStore(tmp_path / "blocks", 64 << 20)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BlockStore, "_write", full)
    loader = loader_of(client(fake), store)

    assert [loader.block(index, number) for number in range(4)] == BLOCKS[:4]
    loader.close()
    assert store.used_bytes == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB, of its own."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs root to mount a tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: no tmpfs can be mounted here: {done.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # a read may still be ending


def filled(folder):
    """Leave no byte free; return the file that takes the room."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(64 << 10))
    return folder / "filler"


def test_a_disk_smaller_than_the_cap_keeps_what_fits_and_every_read_is_right(
    fake, index, loader_of, small_disk, caplog
):
    store = BlockStore(small_disk / "blocks", 64 << 20)
    loader = loader_of(client(fake), store)

    assert [loader.block(index, number) for number in range(4)] == BLOCKS[:4]

    loader.close()
    kept = [number for number in range(4) if store.get(index.digest(number)) == BLOCKS[number]]
    assert 0 < len(kept) < 4
    assert store.used_bytes == sum(len(BLOCKS[number]) for number in kept), "no torn block is left"
    assert caplog.text.count("the disk is full") == 1


def test_a_disk_that_was_full_before_the_start_keeps_nothing_and_every_read_is_right(
    fake, index, loader_of, small_disk, caplog
):
    filler = filled(small_disk)
    store = BlockStore(small_disk / "blocks", 64 << 20)
    loader = loader_of(client(fake), store)

    assert [loader.block(index, number) for number in range(4)] == BLOCKS[:4]

    assert store.used_bytes == 0
    assert caplog.text.count("the disk is full") == 1
    filler.unlink()
    assert store.put_all({index.digest(0): BLOCKS[0]}), "when there is room again, it is used"
    assert BlockStore(small_disk / "blocks", 64 << 20).get(index.digest(0)) == BLOCKS[0]


def test_an_index_that_cannot_be_kept_serves_the_start_all_the_same(tmp_path, small_disk, caplog):
    filled(small_disk)
    store = OciLayout.create(tmp_path / "elsewhere")
    cache = IndexCache(small_disk / "indexes")

    found = index_layer(store, a_layer(store, TAR, "tar"), cache)

    assert found.stream_bytes == len(TAR)
    assert "is not kept" in caplog.text


def test_a_layer_that_no_disk_has_room_for_is_an_error_that_says_so(
    tmp_path, small_disk, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    store = OciLayout.create(tmp_path / "elsewhere")

    with pytest.raises(StateError, match=r"no room for it in .*small; set TMPDIR"):
        index_layer(store, a_layer(store, TAR, "tar"), IndexCache(tmp_path / "fresh"))

    assert list(small_disk.iterdir()) == []


def test_a_cache_that_cannot_be_written_for_another_reason_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(StateError, match="give another cache"):
        BlockStore(tmp_path / "file/blocks", 1 << 20)
