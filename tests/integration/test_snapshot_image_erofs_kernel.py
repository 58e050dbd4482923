"""The kernel, and the tools that come with EROFS, read what we write."""

import os
import stat
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings

from omniload.base.errors import StateError
from snapshot.image.entries import Entry, Extent
from snapshot.image.precontent_kernel import mount_erofs, open_erofs, unmount
from tests.support.erofs_builders import (
    a_directory,
    a_file,
    a_stream,
    content_of,
    filled,
    layers_of_entries,
    written,
)
from tests.support.erofs_mounts import needs_erofs
from tests.support.registry import needs

pytestmark = pytest.mark.fuse

STREAM = a_stream(40_000)
TYPES = {
    "file": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "character": stat.S_IFCHR,
    "block": stat.S_IFBLK,
    "fifo": stat.S_IFIFO,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("erofs")
    needs_erofs(folder, filling=False)
    (folder / "mnt").mkdir()
    return folder


def laid_out(folder, layers):
    """Write an image and its blobs to files; return them and the tree."""
    image, plan, tree = written(layers)
    (folder / "image").write_bytes(image)
    blobs = []
    for number in plan.layers:
        blobs.append(folder / f"blob{number}")
        blobs[-1].write_bytes(filled(plan.blobs[number], STREAM))
    return folder / "image", blobs, tree


def compared(root, tree):
    """Compare every entry that the kernel shows with the tree."""
    found = {b""}
    for folder, folders, files in os.walk(root):
        above = os.path.relpath(folder, root)
        for name in (*folders, *files):
            found.add(name if above == b"." else above + b"/" + name)
    assert found == {os.fsencode(path) for path, _ in tree.walk()}
    for path, node in tree.walk():
        place = os.path.join(root, os.fsencode(path)) if path else root  # noqa: PTH118 -- bytes
        shown = os.lstat(place)
        assert shown.st_mode == TYPES[node.kind] | node.mode
        assert (shown.st_uid, shown.st_gid) == (node.uid, node.gid)
        assert shown.st_mtime_ns == node.mtime_ns
        assert shown.st_nlink == node.links
        names = os.listxattr(place, follow_symlinks=False)
        values = {name: os.getxattr(place, name, follow_symlinks=False) for name in names}
        assert values == dict(node.xattrs)
        if node.kind == "file":
            assert shown.st_size == node.size_bytes
            with open(place, "rb") as file:  # noqa: PTH123 -- bytes
                assert file.read() == content_of(node, STREAM)
        if node.kind == "symlink":
            assert os.readlink(place) == os.fsencode(node.target)  # noqa: PTH115 -- bytes
        if node.kind in {"character", "block"}:
            assert shown.st_rdev == os.makedev(*node.device)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(layers_of_entries(stream_bytes=len(STREAM)))
def test_the_kernel_shows_any_tree_as_it_is(place, layers):
    image, blobs, tree = laid_out(place, layers)

    mount_erofs(str(image), [str(blob) for blob in blobs], str(place / "mnt"), trusted=True)
    try:
        compared(os.fsencode(place / "mnt"), tree)
    finally:
        unmount(str(place / "mnt"), lazily=False)


def a_large_tree():
    entries = [a_directory(), a_directory("many")]
    entries += [a_file(f"many/{number:05}", number % 7, at=number) for number in range(4000)]
    entries += [a_file("big", 30_000, at=512, xattrs=(("user.x", bytes(5000)),))]
    return [entries, [a_file("many/.wh.00017", 0), a_file("big2", 20_000, at=4096)]]


def test_the_kernel_finds_each_of_many_names(place):
    image, blobs, tree = laid_out(place, a_large_tree())

    mount_erofs(str(image), [str(blob) for blob in blobs], str(place / "mnt"), trusted=False)
    try:
        compared(os.fsencode(place / "mnt"), tree)
        assert not (place / "mnt/many/00017").exists()
    finally:
        unmount(str(place / "mnt"), lazily=False)


def test_the_checker_of_the_format_finds_no_fault(place):
    needs("fsck.erofs")
    image, blobs, _ = laid_out(place, a_large_tree())
    devices = [f"--device={blob}" for blob in blobs]

    done = subprocess.run(
        ["fsck.erofs", *devices, image], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(devices) == 2


def test_the_dumper_of_the_format_reads_superblock_and_inodes(place):
    needs("dump.erofs")
    image, blobs, tree = laid_out(place, a_large_tree())
    devices = [f"--device={blob}" for blob in blobs]

    shown = subprocess.run(
        ["dump.erofs", *devices, "-s", image], capture_output=True, text=True, check=True
    ).stdout
    one = subprocess.run(
        ["dump.erofs", *devices, "--path=/big", image], capture_output=True, text=True, check=True
    ).stdout

    assert "0xE0F5E1E2" in shown
    assert "chunked_file" in shown
    assert "device_table" in shown
    assert str(len(tree.nodes)) in shown
    assert "30000" in one


def test_an_image_with_a_wrong_checksum_is_refused_in_the_kernels_words(place):
    image, blobs, _ = laid_out(place, [[a_file("a", 10)]])
    raw = bytearray(image.read_bytes())
    raw[3000] ^= 1
    image.write_bytes(raw)

    with pytest.raises(
        StateError, match=r"cannot be mounted as EROFS: .+; mount the image through"
    ):
        open_erofs(str(image), [str(blob) for blob in blobs], trusted=False)


def test_an_image_without_one_of_its_blobs_is_refused(place):
    image, blobs, _ = laid_out(place, a_large_tree())

    with pytest.raises(StateError, match="Invalid argument, dmesg"):
        open_erofs(str(image), [str(blobs[0])], trusted=False)


def test_a_place_that_is_not_there_is_refused_and_nothing_stays(place):
    image, blobs, _ = laid_out(place, [[a_file("a", 10)]])
    before = os.listdir("/proc/self/fd")  # noqa: PTH208

    with pytest.raises(StateError, match="nothing can be mounted at"):
        mount_erofs(str(image), [str(b) for b in blobs], str(place / "not-there"), trusted=False)

    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


@pytest.mark.parametrize("trusted", [False, True])
def test_device_nodes_count_only_where_the_image_is_trusted(place, trusted):
    null = Entry(path="null", kind="character", mode=0o666, device=(1, 3))
    image, blobs, _ = laid_out(place, [[null]])

    mount_erofs(str(image), [str(b) for b in blobs], str(place / "mnt"), trusted=trusted)
    try:
        if trusted:
            assert (place / "mnt/null").read_bytes() == b""
        else:
            with pytest.raises(PermissionError):
                (place / "mnt/null").read_bytes()
    finally:
        unmount(str(place / "mnt"), lazily=False)


def test_the_kernel_shows_what_is_larger_than_16_or_32_bits_hold(place):
    size, note = (5 << 30) + 4097, b"v" * 65_000
    name = "n" * 249
    pieces = (Extent(0, 512, 4096), Extent((5 << 30) + 4096, 9000, 1))
    entries = [
        a_directory(),
        a_file("sparse", size, extents=pieces, xattrs=(("user.large", note),)),
        *(
            Entry(path=f"{name}{number:06}", kind="hardlink", target="sparse")
            for number in range(66_000)
        ),
    ]
    image, blobs, _ = laid_out(place, [entries])
    root = place / "mnt"
    mount_erofs(str(image), list(map(str, blobs)), str(root), trusted=False)
    try:
        shown = (root / "sparse").stat()
        assert (shown.st_size, shown.st_nlink) == (size, 66_001)
        assert os.getxattr(root / "sparse", "user.large") == note
        assert sum(1 for _ in root.iterdir()) == 66_001
        file = os.open(root / f"{name}065999", os.O_RDONLY)
        try:
            assert os.pread(file, 8192, 0) == STREAM[512:4608] + bytes(4096)
            assert os.pread(file, 8192, 5 << 30) == bytes(4096) + STREAM[9000:9001]
        finally:
            os.close(file)
    finally:
        unmount(str(root), lazily=False)
