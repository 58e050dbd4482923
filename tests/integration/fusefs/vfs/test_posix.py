"""What each call does on a mount: the same calls on a local directory, and every row of the user's tables."""
# ruff: noqa: PTH115, PTH208, PTH211 -- system calls are tested

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from fusefs.mounts.lifecycle import mount
from tests.support.fusefs.model import TINY, fast_directory
from tests.support.fusefs.posix import CASES, EXCHANGE, answer, furnish, opened, renameat2
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
BRIDGES = ["pyfuse3", "device"]
SPOOL_LIMIT = 1 << 20
DATA = os.urandom(50_000)


@pytest.fixture(scope="module")
def place():
    base = fast_directory("fusefs-posix-")
    for name in ("store", "pyfuse3", "device", "local", "other"):
        (base / name).mkdir()
    yield base
    shutil.rmtree(base)


@pytest.fixture(scope="module", params=BRIDGES)
def mounted(place, request):
    settings = {"files": TINY, "bridge": request.param, "spool_limit": SPOOL_LIMIT}
    with mount(str(place / "store"), place / request.param, settings) as root:
        yield root


@pytest.fixture(scope="module")
def other(place):
    """A second mount of the same store."""
    with mount(str(place / "store"), place / "other", {"files": TINY}) as root:
        yield root


@pytest.mark.parametrize("name", CASES)
def test_a_call_answers_as_on_a_local_directory(mounted, place, name):
    sides = place / "local" / f"{mounted.name}-{name}", mounted / f"{mounted.name}-{name}"
    for side in sides:
        furnish(side)

    wanted, found = (answer(CASES[name], side) for side in sides)

    assert found == wanted


# The table of what is as on a local disk: each row names the cases that compare it.

SAME = {
    "open": [
        "open_what_is_not_there",
        "open_directories_and_links",
        "open_exclusively",
        "open_through_a_dangling_link_makes_its_target",
        "open_modes_allow_what_they_say",
        "open_keeps_its_mode",
        "append_goes_to_the_end_wherever_the_offset_is",
        "temporary_files_of_python",
    ],
    "read, write": ["a_gap_reads_as_zeroes", "vectors_and_short_reads"],
    "truncate": ["truncate_at_open_and_later", "truncate_of_each_kind"],
    "rename": [name for name in CASES if name.startswith("rename_")],
    "unlink, rmdir": [name for name in CASES if name.startswith(("unlink_", "rmdir_"))],
    "mkdir": ["mkdir_each_kind", "mkdir_keeps_its_mode", "many_levels"],
    "readdir": ["a_listing_that_is_open_while_names_change", "names_of_any_bytes"],
    "symlink, readlink": ["symlinks", "links_are_followed_where_they_should_be"],
    "chmod, utime, access": [
        "chmod_each_kind",
        "times_are_kept_to_the_nanosecond",
        "a_change_moves_the_times_of_its_directory_and_of_no_other",
        "access_says_who_may",
        "chown_to_oneself",
    ],
    "user xattrs": ["user_xattrs"],
    "mmap": ["mmap_shared_for_reading_and_private", "mmap_shared_for_writing"],
    "fsync, fdatasync": ["fsync_of_files_and_directories"],
    "copy_file_range, sendfile": ["copies_by_the_kernel"],
    "lseek": ["seek_data_and_hole"],
    "posix_fallocate": ["posix_fallocate_makes_room"],
    "flock, fcntl, OFD locks": [
        "flock_between_two_opens",
        "locks_of_open_files_over_ranges",
        "fcntl_locks_between_processes",
    ],
}


def rows(heading):
    """Return the first column of the first table behind a line of the page."""
    page = (Path(__file__).parents[4] / "docs/how-to/files.md").read_text()
    lines = page[page.index(heading) :].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    found = []
    for line in lines[begin + 1 :]:
        if not line.startswith("|"):
            break
        found.append(re.sub(r"`", "", line.split(" | ")[0].strip("| ")))
    return found


def test_every_row_of_what_is_the_same_is_compared_and_every_case_is_in_a_row():
    assert rows("These calls work as on a local disk") == list(SAME)
    assert sorted(name for names in SAME.values() for name in names) == sorted(CASES)


# The table of what is different: each row is walked.

DIFFERENT = {}


def row(name):
    def add(check):
        DIFFERENT[name] = check
        return check

    return add


def test_every_row_of_what_is_different_is_walked():
    assert rows("These calls differ from a local disk") == list(DIFFERENT)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_row_of_what_is_different_is_true(mounted, other, name):
    folder = mounted / (f"{mounted.name}-row-" + re.sub(r"\W", "-", name))
    folder.mkdir()

    DIFFERENT[name](folder, other / folder.name)


def refused(number, call, *arguments):
    with pytest.raises(OSError, match=r".") as caught:
        call(*arguments)
    assert errno.errorcode[caught.value.errno] == errno.errorcode[number]


@row("close")
def _(at, there):
    with (at / "f").open("wb", buffering=0) as file:
        file.write(DATA)
        assert os.listdir(at) == ["f"]
        assert os.listdir(there) == []
    assert (there / "f").read_bytes() == DATA


@row("fsync")
def _(at, there):
    with (at / "f").open("wb", buffering=0) as file:
        file.write(DATA)
        os.fsync(file.fileno())

        assert (there / "f").read_bytes() == DATA


@row("a file on two mounts")
def _(at, there):
    (at / "f").write_bytes(DATA)
    with (there / "f").open("rb", buffering=0) as old:
        (at / "f.new").write_bytes(DATA[::-1])
        (at / "f.new").rename(at / "f")

        # Who has it open there reads the old version, or is told that its bytes are gone,
        # also when somebody on that mount has opened the new one.
        for _ in range(2):
            assert answer(lambda _: os.pread(old.fileno(), 100, 0), at) in {DATA[:100], "ESTALE"}
            assert os.fstat(old.fileno()).st_size == len(DATA)
            assert (there / "f").read_bytes() == DATA[::-1]
        assert (there / "f").stat().st_ino != os.fstat(old.fileno()).st_ino


@row("inode numbers")
def _(at, there):
    (at / "f").write_bytes(DATA)
    number = (at / "f").stat().st_ino
    assert (there / "f").stat().st_ino == number, "as in any process"

    (at / "f").rename(at / "g")
    assert (at / "g").stat().st_ino == number
    with (at / "g").open("rb") as old:
        (at / "h").write_bytes(DATA)
        (at / "h").rename(at / "g")
        assert os.fstat(old.fileno()).st_ino == number != (at / "g").stat().st_ino


@row("O_EXCL on two mounts")
def _(at, there):
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    here, beyond = os.open(at / "f", flags), os.open(there / "f", flags)
    os.write(here, b"first")
    os.write(beyond, b"last")
    os.close(here)
    os.close(beyond)

    opened(at / "f", os.O_RDONLY)
    assert (at / "f").read_bytes() == b"last"
    refused(errno.EEXIST, opened, at / "f", flags)


@row("locks on two mounts")
def _(at, there):
    (at / "f").write_bytes(DATA)
    with (at / "f").open("rb") as here, (there / "f").open("rb") as beyond:
        fcntl.flock(here, fcntl.LOCK_EX)
        fcntl.flock(beyond, fcntl.LOCK_EX | fcntl.LOCK_NB)


@row("link")
def _(at, _there):
    (at / "f").write_bytes(DATA)
    refused(errno.EPERM, os.link, at / "f", at / "g")


@row("chown")
def _(at, _there):
    for path in (at / "f", at / "d"):
        path.mkdir() if path.name == "d" else path.touch()
        found = path.stat()
        refused(errno.EPERM, os.chown, path, found.st_uid + 1, -1)
        refused(errno.EPERM, os.chown, path, -1, found.st_gid + 1)


@row("mknod, mkfifo, sockets")
def _(at, _there):
    refused(errno.EPERM, os.mkfifo, at / "pipe")
    if os.getuid() == 0:
        refused(errno.EPERM, os.mknod, at / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(at / "plain", stat.S_IFREG | 0o600)
    assert (at / "plain").stat().st_mode == stat.S_IFREG | 0o600


@row("RENAME_EXCHANGE")
def _(at, _there):
    (at / "f").touch()
    (at / "g").touch()
    refused(errno.EINVAL, renameat2, at / "f", at / "g", EXCHANGE)


@row("fallocate")
def _(at, _there):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with (at / "f").open("wb") as file:
        for mode in (0, 1, 3, 16):  # as it is, KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
            assert libc.fallocate(file.fileno(), mode, 0, 4096) == -1
            assert ctypes.get_errno() == errno.EOPNOTSUPP


@row("O_TMPFILE")
def _(at, _there):
    refused(errno.EOPNOTSUPP, opened, at, os.O_TMPFILE | os.O_RDWR)


@row("O_DIRECT")
def _(at, _there):
    (at / "f").write_bytes(DATA)
    file = os.open(at / "f", os.O_RDONLY | os.O_DIRECT)
    assert os.pread(file, 100, 3) == DATA[3:103]  # no alignment is asked for
    os.close(file)


@row("other xattrs")
def _(at, _there):
    (at / "f").touch()
    (at / "d").mkdir()
    for path in (at / "f", at / "d"):
        for name in ("trusted.x", "security.x"):
            refused(errno.EOPNOTSUPP, os.setxattr, path, name, b"1")
        os.setxattr(path, "user.fits", bytes(1500))
        refused(errno.ENOSPC, os.setxattr, path, "user.big", bytes(2000))
        assert os.listxattr(path) == ["user.fits"]


@row("symlink to a long target")
def _(at, _there):
    os.symlink("x" * 3500, at / "fits")
    assert os.readlink(at / "fits") == "x" * 3500
    refused(errno.ENOSPC, os.symlink, "x" * 4095, at / "long")


@row("atime, ctime")
def _(at, _there):
    (at / "f").touch()
    os.utime(at / "f", (1, 10**9))
    found = (at / "f").stat()
    assert found.st_atime == found.st_mtime == found.st_ctime == 10**9


@row("time of a directory")
def _(at, _there):
    os.utime(at, (5, 5))
    (at / "f").write_bytes(b"moves it")
    os.utime(at, (5, 5))
    assert at.stat().st_mtime == 5
    store = at.parents[1] / "store" / at.name
    (store / "beside").write_bytes(b"of another program")
    assert "beside" in os.listdir(at)
    assert at.stat().st_mtime == 5


@row("random writes beyond spool_limit")
def _(at, _there):
    with (at / "f").open("wb", buffering=0) as file:
        file.write(bytes(100))
        refused(errno.EFBIG, os.pwrite, file.fileno(), b"far", SPOOL_LIMIT + 1)
    assert (at / "f").stat().st_size == 100


@row("statfs")
def _(at, _there):
    store = at.parents[1] / "store"
    assert shutil.disk_usage(at).total == shutil.disk_usage(store).total
    assert os.statvfs(at).f_namemax == 255


@row("nlink of a directory")
def _(at, _there):
    for number in range(3):
        (at / f"{number}").mkdir()
    assert at.stat().st_nlink == 2


@row("/.omnifs, .omnifs-directory")
def _(at, _there):
    at.chmod(0o700)
    assert os.listdir(at) == []
    refused(errno.EPERM, (at / ".omnifs-directory").write_bytes, b"x")
    refused(errno.EPERM, os.rename, at, at.parent / ".omnifs")
    refused(errno.EPERM, os.mkdir, at.parent / ".omnifs/x")
    assert os.listdir(at.parent / ".omnifs") == ["stats.json"]


@row("symbolic links, pipes and devices in a local store itself")
def _(at, _there):
    store = at.parents[1] / "store" / at.name
    (store / "link").symlink_to("/etc")
    os.mkfifo(store / "pipe")
    assert os.listdir(at) == []
    refused(errno.ELOOP, os.stat, at / "link")
    refused(errno.ELOOP, os.listdir, at / "link/ssl")
    refused(errno.EPERM, os.stat, at / "pipe")
    (store / "link").unlink()
    (store / "pipe").unlink()
