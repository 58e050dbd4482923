"""What the kernel offers programs on any filesystem: what works on the mount, and every errno that 0011 promises."""
# ruff: noqa: PTH116, PTH208 -- the calls of the operating system are what is tested

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.mounts.lifecycle import MountConfig, start
from omniload.base.linux.mount_table import fuse_mount_at
from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT, proven_mount
from tests.support.programs import finished

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
DATA = os.urandom(500_000)
LIBC = ctypes.CDLL(None, use_errno=True)
KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32
EXCHANGE, NOREPLACE = 2, 1
AT_FDCWD = -100


@pytest.fixture(scope="module")
def mounted():
    striping = {"unit": 65536, "count": 3}
    files = {"striping": striping, "plain_limit": 65536}
    with proven_mount(files=files, spool_limit=8 << 20) as running:
        yield running


@pytest.fixture
def folder(mounted, request):
    made = mounted.folder(request.node.name.replace("/", "-")[:100])
    (made / "f").write_bytes(DATA)
    yield made
    mounted.check()


@pytest.fixture
def file(folder):
    number = os.open(folder / "f", os.O_RDWR)
    yield number
    os.close(number)


def called(function, *arguments):
    """Call libc and raise what it reports."""
    if function(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def renamed(source, target, flags):
    called(
        LIBC.renameat2, AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags
    )  # fmt: skip


def test_a_shared_mapping_writes_and_another_sees_it(folder, file):
    with mmap.mmap(file, 0) as huge_page_buffer:
        huge_page_buffer[70_000:70_005] = b"HELLO"
        huge_page_buffer.flush()
        assert os.pread(file, 7, 69_999) == DATA[69_999:70_000] + b"HELLO" + DATA[70_005:70_006]
        huge_page_buffer[10:12] = b"XY"

    assert (folder / "f").read_bytes()[8:13] == DATA[8:10] + b"XY" + DATA[12:13]


def test_a_private_mapping_changes_nothing(folder, file):
    with mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE) as huge_page_buffer:
        huge_page_buffer[0:5] = b"HELLO"
        assert huge_page_buffer[:6] == b"HELLO" + DATA[5:6]

    assert (folder / "f").read_bytes() == DATA


def test_a_mapping_of_a_grown_file_is_kept_without_a_sync(folder):
    number = os.open(folder / "g", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, 200_000)
    with mmap.mmap(number, 0) as huge_page_buffer:
        huge_page_buffer[150_000:150_005] = b"WORLD"
    os.close(number)

    assert (folder / "g").read_bytes() == bytes(150_000) + b"WORLD" + bytes(49_995)


def test_direct_reads_and_writes_pass_the_page_cache(folder):
    number = os.open(folder / "f", os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(-1, 8192) as page:
        assert os.preadv(number, [page], 4096) == 8192
        assert page[:] == DATA[4096:12_288]
        assert os.pwritev(number, [page], 131_072) == 8192
    os.close(number)

    assert (folder / "f").read_bytes() == DATA[:131_072] + DATA[4096:12_288] + DATA[139_264:]


def test_ranges_are_copied_between_files(folder, file):
    target = os.open(folder / "g", os.O_WRONLY | os.O_CREAT)
    copied = 0
    while copied < 300_000:
        copied += os.copy_file_range(file, target, 300_000 - copied)
    sent = os.sendfile(target, file, 300_000, 100_000)
    os.close(target)

    assert (folder / "g").read_bytes() == DATA[: 300_000 + sent]


def test_a_file_is_data_to_its_end(file):
    assert os.lseek(file, 1000, os.SEEK_DATA) == 1000
    assert os.lseek(file, 1000, os.SEEK_HOLE) == len(DATA)
    with pytest.raises(OSError, match="No such device or address") as caught:
        os.lseek(file, len(DATA) + 1, os.SEEK_DATA)
    assert caught.value.errno == errno.ENXIO


def test_space_can_be_asked_for_the_portable_way(folder, file):
    os.posix_fallocate(file, 0, 700_000)
    os.fsync(file)

    assert (folder / "f").read_bytes() == DATA + bytes(200_000)


def test_locks_exclude_other_processes(folder, file):
    attempt = "import fcntl, sys; fcntl.{}(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    for kind in ("flock", "lockf"):
        getattr(fcntl, kind)(file, fcntl.LOCK_EX)
        done = finished([sys.executable, "-c", attempt.format(kind), folder / "f"], limit_s=240)
        assert "BlockingIOError" in done.stderr
        getattr(fcntl, kind)(file, fcntl.LOCK_UN)


def test_a_script_is_executed_from_the_mount(folder):
    (folder / "run.sh").write_text("#!/bin/sh\necho ran $0\n")
    (folder / "run.sh").chmod(0o755)

    done = subprocess.run([folder / "run.sh"], capture_output=True, text=True, check=True)

    assert done.stdout == f"ran {folder}/run.sh\n"


@pytest.mark.parametrize("name", [b"\xff\xfe", "é".encode(), b"a\nb\\c*?", b"n" * 255, b" .."])
def test_names_are_bytes(folder, name):
    path = os.fsencode(folder) + b"/" + name
    Path(os.fsdecode(path)).write_bytes(b"here")

    assert sorted(os.listdir(os.fsencode(folder))) == sorted([name, b"f"])
    assert Path(os.fsdecode(path)).read_bytes() == b"here"


def test_a_sync_of_the_whole_filesystem_and_of_a_directory_return(folder, file):
    called(LIBC.syncfs, file)
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)

    assert os.statvfs(folder).f_namemax == 255


@pytest.mark.skipif(os.getuid() != 0, reason="only root sets a mount's read-ahead")
@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_the_kernels_read_ahead_is_what_was_asked_for(bridge):
    with proven_mount(kernel_read_ahead=2 << 20, bridge=bridge) as it:
        (it.root / "f").write_bytes(DATA)
        assert (it.root / "f").read_bytes() == DATA

        device = fuse_mount_at(str(it.root)).device
        assert Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text() == "2048\n"


def on_directory(folder):
    (folder / "d").mkdir()
    return folder / "d"


def on_stale(mounted, folder):
    """Read what another mount replaced, past what is cached."""
    place = fast_directory("fusefs-other-")
    config = {"files": {"read_ahead": 0}, "store": mounted.store, "mountpoint": str(place)}
    process = start(MountConfig.model_validate(config), log_path=os.devnull)
    number = os.open(place / folder.name / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        (folder / "f").write_bytes(b"new")
        with mmap.mmap(-1, 4096) as page:
            os.preadv(number, [page], 262_144)
    finally:
        os.close(number)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        place.rmdir()


def falloc(file, mode, size=4096):
    called(LIBC.fallocate, file, mode, ctypes.c_long(0), ctypes.c_long(size))


REFUSED = {
    "spool beyond its limit": (errno.EFBIG, lambda m, f, n: os.truncate(f / "f", 9 << 20)),
    "size beyond the largest": (errno.EFBIG, lambda m, f, n: os.truncate(f / "f", 1 << 62)),
    "exchange of two names": (errno.EINVAL, lambda m, f, n: renamed(f / "f", f, EXCHANGE)),
    "rename that may not replace": (
        errno.EEXIST,
        lambda m, f, n: renamed(on_directory(f), f / "f", NOREPLACE),
    ),
    "directory into itself": (
        errno.EINVAL,
        lambda m, f, n: on_directory(f).rename(f / "d/below"),
    ),
    "directory over a file": (errno.ENOTDIR, lambda m, f, n: on_directory(f).rename(f / "f")),
    "file over a directory": (errno.EISDIR, lambda m, f, n: (f / "f").rename(on_directory(f))),
    "removing a full directory": (errno.ENOTEMPTY, lambda m, f, n: f.rmdir()),
    "create what is there": (
        errno.EEXIST,
        lambda m, f, n: os.open(f / "f", os.O_CREAT | os.O_EXCL),
    ),
    "what is not there": (errno.ENOENT, lambda m, f, n: os.stat(f / "none")),
    "version another mount replaced": (errno.ESTALE, lambda m, f, n: on_stale(m, f)),
    "attributes beyond the header": (
        errno.ENOSPC,
        lambda m, f, n: os.setxattr(f / "f", "user.big", bytes(5000)),
    ),
    "attribute of the system on a directory": (
        errno.EOPNOTSUPP,
        lambda m, f, n: os.setxattr(on_directory(f), "trusted.a", b"1"),
    ),
    "attribute of the system": (
        errno.EOPNOTSUPP,
        lambda m, f, n: os.setxattr(f / "f", "trusted.a", b"1"),
    ),
    "attribute that is not set": (errno.ENODATA, lambda m, f, n: os.getxattr(f / "f", "user.no")),
    "owner": (errno.EPERM, lambda m, f, n: os.chown(f / "f", 12345, 12345)),
    "hard link": (errno.EPERM, lambda m, f, n: os.link(f / "f", f / "g")),
    "pipe": (errno.EPERM, lambda m, f, n: os.mkfifo(f / "pipe")),
    "socket": (errno.EPERM, lambda m, f, n: bound(f / "s")),
    "name too long": (errno.ENAMETOOLONG, lambda m, f, n: (f / ("n" * 256)).touch()),
    "file in the store's own": (errno.EPERM, lambda m, f, n: (m.root / ".omnifs/x").touch()),
    "the store's own": (errno.EPERM, lambda m, f, n: (m.root / ".omnifs").rename(f / "x")),
    "unnamed file": (errno.EOPNOTSUPP, lambda m, f, n: os.open(f, os.O_TMPFILE | os.O_RDWR)),
    "space ahead": (errno.EOPNOTSUPP, lambda m, f, n: falloc(n, KEEP_SIZE)),
    "hole": (errno.EOPNOTSUPP, lambda m, f, n: falloc(n, KEEP_SIZE | PUNCH_HOLE)),
    "range cut out": (errno.EOPNOTSUPP, lambda m, f, n: falloc(n, COLLAPSE)),
    "range of zeroes": (errno.EOPNOTSUPP, lambda m, f, n: falloc(n, ZERO)),
    "range put in": (errno.EOPNOTSUPP, lambda m, f, n: falloc(n, INSERT)),
}


def bound(path):
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_PATH)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path has 108 bytes
        finally:
            os.close(folder)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_so_with_the_errno_of_the_table(mounted, folder, file, what):
    number, refused = REFUSED[what]

    with pytest.raises(OSError, match=r".") as caught:
        refused(mounted, folder, file)

    assert errno.errorcode[caught.value.errno] == errno.errorcode[number]
    assert (folder / "f").exists()
