"""Registries that die, lie or stutter in mid-start, and disks that fill: right bytes or a clear error."""

import contextlib
import errno
import os

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.image.block_store import BlockStore
from snapshot.image.index_file import IndexCache
from snapshot.image.layers import index_layer
from snapshot.image.loader import BlockLoader, RegistryTier
from snapshot.image.trace import block_refs
from snapshot.oci.layout import OciLayout
from snapshot.oci.mirrors import MirroredStore
from snapshot.oci.registry import Registry
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.image_builders import a_layer, a_member, a_tar, zran_friendly
from tests.support.registry_fake import FakeRegistry, serving

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
    store = OciLayout.create(tmp_path / "layout")
    return index_layer(store, a_layer(store, TAR, "tar"), IndexCache(tmp_path / "indexes"))


def client(fake):
    settings = RegistrySettings(timeout_s=5, attempts=3)
    return Registry(Transport(fake.address, settings, clock=FakeClock()), "a/b")


@pytest.fixture
def loader_of():
    made = []

    def make(store, disk=None):
        made.append(BlockLoader({"registry": RegistryTier(store)}, disk, clock=FakeClock()))
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
