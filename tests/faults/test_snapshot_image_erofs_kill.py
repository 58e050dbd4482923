"""Processes of a lazy EROFS mount killed by SIGKILL: readers get right bytes or an error, never zeroes."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshot.image.precontent_kernel import PreContent, mount_erofs, unmount
from tests.support.erofs_builders import a_file, a_stream, written
from tests.support.erofs_mounts import (
    LazyMount,
    drop_caches,
    needs_erofs,
    pushed,
    until,
    until_gone,
)
from tests.support.image_builders import a_member

pytestmark = pytest.mark.fuse

BIG = a_stream(4_000_000, seed=4)
READ = """
import sys
try:
    with open(sys.argv[1], "rb", buffering=0) as file:
        file.seek(int(sys.argv[2]))
        sys.stdout.write(file.read(4096).hex())
except OSError as error:
    sys.stdout.write(f"errno {error.errno}")
"""


@pytest.fixture
def image(tmp_path):
    needs_erofs(tmp_path)
    return pushed(tmp_path, [a_member("big", BIG)])


def reader(path, offset):
    words = [sys.executable, "-S", "-c", READ, str(path), str(offset)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def read(path, offset):
    return reader(path, offset).communicate(timeout=30)[0]


def kill(process):
    os.kill(process.pid, signal.SIGKILL)


def make_registry_hang(tmp_path):
    """Put a pipe in the place of the layer: whoever fetches waits for the other end."""
    blobs = sorted((tmp_path / "layout/blobs/sha256").iterdir(), key=lambda p: p.stat().st_size)
    layer = blobs[-1]
    layer.rename(layer.with_suffix(".kept"))
    os.mkfifo(layer)
    return layer


def test_readers_of_a_dead_mount_get_errors_and_what_was_read_stays_right(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        path, guard = mounted.root / "big", mounted.guard()
        assert read(path, 0) == BIG[:4096].hex()

        kill(mounted.process)
        mounted.process.wait(30)

        assert read(path, 3_900_000 // 4096 * 4096) == f"errno {errno.EIO}"
        assert read(path, 0) == BIG[:4096].hex()
        drop_caches()
        assert read(path, 0) == f"errno {errno.EIO}"
    until_gone(guard)


def test_a_reader_that_waits_when_the_process_dies_gets_an_error(image, tmp_path):
    with LazyMount(image, tmp_path, stream=False):
        pass  # the index is kept now, so that the next mount need not read the layer
    pipe = make_registry_hang(tmp_path)
    with LazyMount(image, tmp_path) as mounted:
        guard = mounted.guard()
        waiting = reader(mounted.root / "big", 0)
        with pipe.open("wb"):  # opens once the block is being fetched for the reader
            assert waiting.poll() is None

            kill(mounted.process)
            mounted.process.wait(30)

            assert waiting.communicate(timeout=30)[0] == f"errno {errno.EIO}"
    until_gone(guard)


def test_a_guard_that_dies_is_replaced_and_the_new_one_guards(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        first = mounted.guard()
        kill(first)
        second = mounted.guard(but=first)
        assert read(mounted.root / "big", 8192) == BIG[8192:12288].hex()

        kill(mounted.process)
        mounted.process.wait(30)

        assert read(mounted.root / "big", 2_000_896) == f"errno {errno.EIO}"
    until_gone(second)


def test_a_guard_is_deaf_to_signals_that_are_sent_to_a_whole_service(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        guard = mounted.guard()
        # It reads its numbers before it waits, and it waits with these signals ignored.
        ignored = until(lambda: ignored_by(guard.pid) & 1 << signal.SIGTERM - 1, "not ready")
        assert ignored
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard.pid, number)

        assert read(mounted.root / "big", 0) == BIG[:4096].hex()
        assert guard.is_running()
    until_gone(guard)


def ignored_by(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return int(line.split()[1], 16)
    return 0


def test_a_dead_mount_can_be_taken_away_and_mounted_anew(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        guard = mounted.guard()
        assert read(mounted.root / "big", 0) == BIG[:4096].hex()
        kill(mounted.process)
        mounted.process.wait(30)
        assert len(mounted.blobs("filling")) == 1
    until_gone(guard)

    with LazyMount(image, tmp_path) as again:
        assert len(again.blobs("filling")) == 1, "what the dead one left is removed"
        found = hashlib.sha256((again.root / "big").read_bytes()).hexdigest()

    assert found == hashlib.sha256(BIG).hexdigest()


def test_a_mount_that_died_while_streaming_leaves_no_blob_that_looks_whole(image, tmp_path):
    with LazyMount(image, tmp_path, stream=True, bandwidth=200_000) as mounted:
        assert read(mounted.root / "big", 0) == BIG[:4096].hex()
        kill(mounted.process)
        mounted.process.wait(30)

        kept = mounted.blobs("layers")
        assert [BIG in blob.read_bytes() for blob in kept] in ([], [True]), "it was whole, if kept"

    with LazyMount(image, tmp_path, through="auto") as again:
        assert again.kind.startswith("fuse") != bool(kept)
        assert (again.root / "big").read_bytes() == BIG


def test_a_layer_that_is_altered_under_the_mount_is_an_error_not_data(image, tmp_path):
    with LazyMount(image, tmp_path):
        pass
    layer = max((tmp_path / "layout/blobs/sha256").iterdir(), key=lambda p: p.stat().st_size)
    raw = bytearray(layer.read_bytes())
    raw[len(raw) // 2 :] = bytes(len(raw) - len(raw) // 2)
    layer.write_bytes(raw)

    with LazyMount(image, tmp_path) as mounted:
        assert read(mounted.root / "big", 3_899_392) == f"errno {errno.EIO}"
        assert read(mounted.root / "big", 0) == BIG[:4096].hex()


def test_a_reader_that_is_killed_while_it_waits_harms_nobody(image, tmp_path):
    with LazyMount(image, tmp_path):
        pass
    pipe = make_registry_hang(tmp_path)
    with LazyMount(image, tmp_path) as mounted:
        waiting = reader(mounted.root / "big", 0)
        with pipe.open("wb"):
            kill(waiting)
            waiting.communicate(timeout=30)
            pipe.unlink()
            pipe.with_suffix(".kept").rename(pipe)

        # What was being fetched for it fails as the pipe closes, for whoever joins until then.
        until(lambda: read(mounted.root / "big", 0) == BIG[:4096].hex(), "nobody can read")
        assert (mounted.root / "big").read_bytes() == BIG


def test_without_a_guard_the_kernel_lets_holes_be_read(tmp_path):
    """Why there is a guard. If this fails, the kernel has become kinder: see the design page."""
    needs_erofs(tmp_path)
    (tmp_path / "mnt").mkdir()
    metadata, plan, _ = written([[a_file("a", 8192)]])
    (tmp_path / "image").write_bytes(metadata)
    blob = tmp_path / "blob"
    blob.touch()
    os.truncate(blob, plan.blobs[0].size_bytes)
    group = PreContent()
    group.mark(str(blob))
    mount_erofs(str(tmp_path / "image"), [str(blob)], str(tmp_path / "mnt"), trusted=False)
    try:
        group.close()

        assert (tmp_path / "mnt/a").read_bytes() == bytes(8192)
    finally:
        unmount(str(tmp_path / "mnt"), lazily=False)
