"""A blob that is filled while it is read, without a mount: reading the file itself asks, too."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from omniload.base.errors import UnavailableError
from snapshot.image import erofs_filling
from snapshot.image.block_store import BlockStore
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_cache import BlobCache
from snapshot.image.erofs_filling import BlobFilling
from snapshot.image.fetcher import FetchSettings
from snapshot.image.loader import BlockLoader, BlockTier
from tests.support.erofs_builders import a_file, a_stream, an_index, filled
from tests.support.erofs_mounts import needs_erofs, until

pytestmark = pytest.mark.fuse

STREAM = a_stream(300_000)
FILES = [
    a_file("a", 100_000, at=512),
    a_file("b", 10, at=101_376),
    a_file("c", 150_000, at=102_400),
]
INDEX = an_index(FILES, STREAM)
LAYOUT = blob_layout(FILES)
BLOB = filled(LAYOUT, STREAM)


class Tier(BlockTier):
    """A tier that remembers what was asked, fails when told, and can be held."""

    def __init__(self):
        self.asked, self.failing = [], set()
        self.may_go = threading.Event()
        self.may_go.set()

    def fetch(self, index, blocks):
        self.may_go.wait(30)
        self.asked += [ref.number for ref in blocks]
        if self.failing & {ref.number for ref in blocks}:
            raise UnavailableError("this block is not to be had today")
        return {ref.digest: data_of(index, ref.number) for ref in blocks}, 1


def data_of(index, number):
    start, size = index.blocks_B["stream_offset"][number], index.blocks_B["size"][number]
    return STREAM[int(start) : int(start) + int(size)]


@contextmanager
def being_filled(folder, tier):
    needs_erofs(folder)
    disk = BlockStore(folder / "blocks", 10 << 20)
    made = []

    def settled(digest, came):
        made[0].settled(digest, came)

    loader = BlockLoader({"t": tier}, disk, on_settled=settled)
    filling = BlobFilling([(INDEX, LAYOUT)], loader, BlobCache(folder), slots=4)
    made.append(filling)
    try:
        yield filling
    finally:
        loader.close()
        filling.close(is_safe=True)


@contextmanager
def opened(filling):
    descriptor = os.open(filling.paths[0], os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_read_gets_what_the_layer_has_there(tmp_path):
    tier = Tier()

    with being_filled(tmp_path, tier) as filling, opened(filling) as file:
        assert os.pread(file, 5000, 20_000) == BLOB[20_000:25_000]
        assert os.pread(file, 10, len(BLOB) - 10) == BLOB[-10:]
        assert os.pread(file, len(BLOB) + 10, 0) == BLOB


def test_the_end_of_a_file_is_zeroes_up_to_the_next_block(tmp_path):
    with being_filled(tmp_path, Tier()) as filling, opened(filling) as file:
        assert os.pread(file, 4096, 102_400) == STREAM[101_376:101_386] + bytes(4086)


def test_blocks_are_fetched_once_for_many_readers(tmp_path):
    tier = Tier()
    with being_filled(tmp_path, tier) as filling, opened(filling) as file:
        tier.may_go.clear()
        with ThreadPoolExecutor(6) as pool:
            reads = [pool.submit(os.pread, file, 4096, 40_960) for _ in range(6)]
            tier.may_go.set()
            assert {read.result(30) for read in reads} == {BLOB[40_960:45_056]}

    assert len(tier.asked) == len(set(tier.asked))


def test_what_no_tier_has_is_an_error_and_is_asked_again(tmp_path):
    tier = Tier()
    tier.failing = {8, 9}
    with being_filled(tmp_path, tier) as filling, opened(filling) as file:
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file, 4096, 45_056)

        tier.failing = set()
        assert os.pread(file, 4096, 45_056) == BLOB[45_056:49_152]


def test_a_blob_that_is_whole_is_kept_and_asks_nobody(tmp_path):
    tier = Tier()
    with being_filled(tmp_path, tier) as filling, opened(filling) as file:
        assert not filling.is_complete
        os.pread(file, len(BLOB), 0)
        until(lambda: filling.is_complete, "the blob is not kept")

        kept = BlobCache(tmp_path).complete(INDEX, LAYOUT)
        assert kept is not None
        assert kept.read_bytes() == BLOB
        assert kept.stat().st_mode & 0o777 == 0o400
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file, len(BLOB), 0) == BLOB

    assert BlobCache(tmp_path).complete(INDEX, LAYOUT) == kept


def test_blocks_at_hand_are_filled_in_without_a_reader(tmp_path):
    with being_filled(tmp_path, Tier()) as filling:
        filling.at_hand(INDEX.digest(number) for number in range(len(INDEX.blocks_B)))

        until(lambda: filling.is_complete, "the blob is not filled from behind")
        kept = BlobCache(tmp_path).complete(INDEX, LAYOUT)
        assert kept is not None
        assert kept.read_bytes() == BLOB


def test_a_block_that_did_not_come_is_not_at_hand(tmp_path):
    tier = Tier()
    with being_filled(tmp_path, tier) as filling:
        filling.settled(INDEX.digest(3), False)
        filling.settled("sha256:" + "0" * 64, True)

    assert tier.asked == []


def test_the_rest_of_a_block_is_filled_behind_the_reader_that_needed_a_part(tmp_path):
    tier = Tier()
    index = an_index(FILES, STREAM, block_bytes=50_000)
    needs_erofs(tmp_path)
    alone = FetchSettings(tiers=("t",), beside_bytes=0)  # no neighbour comes along
    loader = BlockLoader({"t": tier}, None, alone)
    filling = BlobFilling([(index, LAYOUT)], loader, BlobCache(tmp_path), slots=2)
    try:
        with opened(filling) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file, 100, 8192)
            until(lambda: Path(filling.paths[0]).stat().st_blocks * 512 >= 45_000, "only a page")
            assert tier.asked == [0]
    finally:
        loader.close()
        filling.close(is_safe=True)


def test_a_reader_that_waits_at_the_end_gets_an_error(tmp_path):
    tier = Tier()
    tier.may_go.clear()
    with ThreadPoolExecutor(1) as pool, being_filled(tmp_path, tier) as filling:
        file = os.open(filling.paths[0], os.O_RDONLY)
        read = pool.submit(os.pread, file, 4096, 0)
        until(lambda: filling.is_asked, "nobody asks")
        filling.stop()

        with pytest.raises(OSError, match="Input/output error"):
            read.result(30)
        os.close(file)
        tier.may_go.set()


def test_a_blob_that_is_not_whole_is_removed_at_the_end(tmp_path):
    with being_filled(tmp_path, Tier()) as filling, opened(filling) as file:
        os.pread(file, 10, 0)
        (path,) = filling.paths

    assert not Path(path).exists()
    assert BlobCache(tmp_path).complete(INDEX, LAYOUT) is None


def test_in_use_means_that_somebody_else_has_a_blob_open(tmp_path):
    with being_filled(tmp_path, Tier()) as filling:
        assert filling.is_unused
        with opened(filling):
            assert not filling.is_unused
        assert filling.is_unused


def test_a_disk_that_takes_nothing_is_an_error_for_the_reader(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with being_filled(tmp_path, Tier()) as filling, opened(filling) as file:
        with monkeypatch.context() as broken:
            broken.setattr(erofs_filling.os, "pwrite", full)
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(file, 4096, 0)

        assert os.pread(file, 4096, 0) == BLOB[:4096]


def test_a_sync_that_fails_ends_the_process_before_anybody_reads_on(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(erofs_filling, "_leave_it_to_the_guard", ended.set)

    def broken(*_):
        raise OSError(5, "Input/output error")

    with being_filled(tmp_path, Tier()) as filling, opened(filling) as file:
        monkeypatch.setattr(BlobCache, "keep", broken)
        os.pread(file, len(BLOB), 0)

        assert ended.wait(30)
        assert not filling.is_complete
