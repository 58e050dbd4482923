"""Calls whose answers POSIX defines, each made in a fresh folder, on a mount and on a local directory.

A case is a function of the folder. Its return value, or the errno that it raises, must be the same on both sides. The
folder holds ``f`` (a file), ``d`` (an empty directory), ``full/f`` and ``l`` (a link to ``f``), ``dangling`` and
``loop``.
"""
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH115, PTH116, PTH123, PTH202, PTH208, PTH211 -- system calls are tested

import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
from ctypes import CDLL, c_int, c_uint, get_errno

CASES = {}
LONG = "n" * 255
TOO_LONG = "n" * 256
DATA = bytes(range(256)) * 64
_LIBC = CDLL(None, use_errno=True)
NOREPLACE, EXCHANGE = 1, 2


def case(function):
    CASES[function.__name__] = function
    return function


def answer(call, folder):
    """Return the result of a case, or the name of its errno."""
    try:
        return call(folder)
    except OSError as error:
        return errno.errorcode[error.errno]


def answers(folder, *calls):
    """Return the answers of several calls, one after the other."""
    return [answer(lambda _, call=call: call(), folder) for call in calls]


def furnish(folder):
    """Make the files that every case expects."""
    folder.mkdir()
    (folder / "f").write_bytes(DATA)
    (folder / "d").mkdir()
    (folder / "full").mkdir()
    (folder / "full/f").write_bytes(b"inner")
    (folder / "l").symlink_to("f")
    (folder / "ld").symlink_to("d")
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")


def renameat2(source, target, flags):
    done = _LIBC.renameat2(
        c_int(-100), os.fsencode(source), c_int(-100), os.fsencode(target), c_uint(flags)
    )
    if done:
        raise OSError(get_errno(), "renameat2")


def opened(path, flags, mode=0o644):
    """Open and close; return nothing."""
    os.close(os.open(path, flags, mode))


def kinds(folder):
    return sorted((e.name, e.is_dir(follow_symlinks=False)) for e in os.scandir(folder))


# rename


@case
def rename_of_nothing(at):
    return answers(
        at,
        lambda: os.rename(at / "none", at / "x"),
        lambda: os.rename(at / "none/x", at / "x"),
        lambda: os.rename(at / "f", at / "none/x"),
        lambda: os.rename(at / "f/x", at / "x"),
        lambda: os.rename(at / "f", at / "f/x"),
    )


@case
def rename_over_each_kind(at):
    return answers(
        at,
        lambda: os.rename(at / "f", at / "d"),
        lambda: os.rename(at / "d", at / "f"),
        lambda: os.rename(at / "d", at / "full"),
        lambda: os.rename(at / "l", at / "d"),
        lambda: os.rename(at / "d", at / "l"),
        lambda: os.rename(at / "full", at / "d"),
        lambda: sorted(os.listdir(at / "d")),
        lambda: os.rename(at / "dangling", at / "f"),
        lambda: os.readlink(at / "f"),
    )


@case
def rename_into_itself(at):
    return answers(
        at,
        lambda: os.rename(at / "d", at / "d/x"),
        lambda: os.rename(at / "full", at / "full/f/x"),
        lambda: os.rename(at / "full", at / "full"),
        lambda: os.rename(at / "f", at / "f"),
        lambda: os.rename(at / "full/f", at / "full"),
    )


@case
def rename_of_links_moves_the_link(at):
    os.rename(at / "l", at / "moved")
    return os.readlink(at / "moved"), kinds(at)


@case
def rename_with_flags(at):
    return answers(
        at,
        lambda: renameat2(at / "f", at / "full/f", NOREPLACE),
        lambda: renameat2(at / "f", at / "d", NOREPLACE),
        lambda: renameat2(at / "f", at / "new", NOREPLACE),
        lambda: renameat2(at / "none", at / "new2", NOREPLACE),
        lambda: renameat2(at / "new", at / "x", 1 << 7),
    )


@case
def rename_to_a_long_name(at):
    return answers(
        at,
        lambda: os.rename(at / "f", at / LONG),
        lambda: os.rename(at / LONG, at / TOO_LONG),
        lambda: os.path.getsize(at / LONG),
    )


@case
def rename_with_a_slash_behind(at):
    return answers(
        at,
        lambda: os.rename(f"{at}/f/", at / "x"),
        lambda: os.rename(at / "f", f"{at}/x/"),
        lambda: os.rename(f"{at}/d/", f"{at}/e/"),
        lambda: os.rename(at / "e", f"{at}/."),
        lambda: os.rename(f"{at}/e/..", at / "x"),
    )


# unlink, rmdir


@case
def unlink_each_kind(at):
    return answers(
        at,
        lambda: os.unlink(at / "none"),
        lambda: os.unlink(at / "d"),
        lambda: os.unlink(at / "full"),
        lambda: os.unlink(at / "f/x"),
        lambda: os.unlink(at / "none/x"),
        lambda: os.unlink(f"{at}/f/"),
        lambda: os.unlink(at / "loop/x"),
        lambda: os.unlink(at / "loop"),
        lambda: os.unlink(at / "l"),
        lambda: os.unlink(at / "f"),
        lambda: os.unlink(at / "f"),
        lambda: os.unlink(at / TOO_LONG),
        lambda: kinds(at),
    )


@case
def rmdir_each_kind(at):
    return answers(
        at,
        lambda: os.rmdir(at / "none"),
        lambda: os.rmdir(at / "f"),
        lambda: os.rmdir(at / "l"),
        lambda: os.rmdir(at / "ld"),
        lambda: os.rmdir(at / "full"),
        lambda: os.rmdir(f"{at}/d/."),
        lambda: os.rmdir(f"{at}/full/.."),
        lambda: os.rmdir(at / "d"),
        lambda: os.rmdir(at / "d"),
        lambda: os.rmdir(at / TOO_LONG),
        lambda: kinds(at),
    )


@case
def rmdir_while_a_file_in_it_is_made(at):
    with open(at / "d/new", "wb"):
        return answers(at, lambda: os.rmdir(at / "d"), lambda: os.listdir(at / "d"))


@case
def unlink_while_open(at):
    file = os.open(at / "f", os.O_RDWR)
    os.unlink(at / "f")
    found = answers(
        at,
        lambda: os.pread(file, 10, 100),
        lambda: os.pwrite(file, b"after", 100),
        lambda: os.pread(file, 10, 100),
        lambda: os.fstat(file).st_nlink,
        lambda: os.fstat(file).st_size,
        lambda: os.ftruncate(file, 5),
        lambda: os.fsync(file),
        lambda: os.fchmod(file, 0o600),
        lambda: oct(os.fstat(file).st_mode),
        lambda: os.stat(at / "f"),
        lambda: opened(at / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        lambda: os.fstat(file).st_size,
        lambda: os.path.getsize(at / "f"),
    )
    os.close(file)
    return found, kinds(at)


# mkdir


@case
def mkdir_each_kind(at):
    return answers(
        at,
        lambda: os.mkdir(at / "f"),
        lambda: os.mkdir(at / "d"),
        lambda: os.mkdir(at / "l"),
        lambda: os.mkdir(at / "dangling"),
        lambda: os.mkdir(at / "loop"),
        lambda: os.mkdir(at / "f/x"),
        lambda: os.mkdir(at / "none/x"),
        lambda: os.mkdir(at / LONG),
        lambda: os.mkdir(at / TOO_LONG),
        lambda: os.mkdir(f"{at}/."),
        lambda: os.mkdir(f"{at}/new/"),
        lambda: kinds(at),
    )


@case
def mkdir_keeps_its_mode(at):
    before = os.umask(0o027)
    try:
        for name, mode in (("a", 0o777), ("b", 0o700), ("c", 0o1777), ("e", 0o555)):
            os.mkdir(at / name, mode)
    finally:
        os.umask(before)
    return [oct(os.stat(at / name).st_mode) for name in "abce"]


@case
def open_keeps_its_mode(at):
    before = os.umask(0o027)
    try:
        for name, mode in (("a", 0o777), ("b", 0o600), ("c", 0o644), ("e", 0o444)):
            opened(at / name, os.O_CREAT | os.O_WRONLY, mode)
    finally:
        os.umask(before)
    return [oct(os.stat(at / name).st_mode) for name in "abce"]


# open


@case
def open_what_is_not_there(at):
    return answers(
        at,
        lambda: opened(at / "none", os.O_RDONLY),
        lambda: opened(at / "none/x", os.O_RDWR | os.O_CREAT),
        lambda: opened(at / "f/x", os.O_RDONLY),
        lambda: opened(at / "f/x", os.O_WRONLY | os.O_CREAT),
        lambda: opened(at / "dangling", os.O_RDONLY),
        lambda: opened(at / "loop", os.O_RDONLY),
        lambda: opened(at / TOO_LONG, os.O_RDONLY),
        lambda: opened(at / TOO_LONG, os.O_WRONLY | os.O_CREAT),
        lambda: opened(f"{at}/f/", os.O_RDONLY),
        lambda: opened(f"{at}/new/", os.O_WRONLY | os.O_CREAT),
    )


@case
def open_directories_and_links(at):
    return answers(
        at,
        lambda: opened(at / "d", os.O_RDONLY),
        lambda: opened(at / "d", os.O_WRONLY),
        lambda: opened(at / "d", os.O_RDWR),
        lambda: opened(at / "d", os.O_RDONLY | os.O_TRUNC),
        lambda: opened(at / "d", os.O_CREAT | os.O_RDONLY),
        lambda: opened(at / "f", os.O_RDONLY | os.O_DIRECTORY),
        lambda: opened(at / "l", os.O_RDONLY | os.O_NOFOLLOW),
        lambda: opened(at / "ld", os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY),
        lambda: opened(at / "l", os.O_PATH | os.O_NOFOLLOW),
    )


@case
def open_exclusively(at):
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return answers(
        at,
        *(
            lambda name=name: opened(at / name, flags)
            for name in ("f", "d", "l", "dangling", "new", "new")
        ),
    )


@case
def open_through_a_dangling_link_makes_its_target(at):
    opened(at / "dangling", os.O_CREAT | os.O_WRONLY)
    return kinds(at)


@case
def open_modes_allow_what_they_say(at):
    only_read, only_write = os.open(at / "f", os.O_RDONLY), os.open(at / "f", os.O_WRONLY)
    found = answers(
        at,
        lambda: os.write(only_read, b"x"),
        lambda: os.read(only_write, 1),
        lambda: os.ftruncate(only_read, 3),
        lambda: os.write(only_write, b"x"),
        lambda: os.read(only_read, 3),
        lambda: os.pread(only_read, 1, -1),
        lambda: os.lseek(only_read, -1, os.SEEK_SET),
        lambda: os.lseek(only_read, 1 << 40, os.SEEK_SET),
        lambda: os.read(only_read, 1),
    )
    os.close(only_read)
    os.close(only_write)
    return found


@case
def append_goes_to_the_end_wherever_the_offset_is(at):
    file, other = os.open(at / "f", os.O_RDWR | os.O_APPEND), os.open(at / "f", os.O_WRONLY)
    os.ftruncate(file, 4)
    os.pwrite(other, b"XX", 6)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, b"end")
    found = os.pread(file, 100, 0), os.lseek(file, 0, os.SEEK_CUR)
    os.close(file)
    os.close(other)
    return found, os.path.getsize(at / "f")


@case
def truncate_at_open_and_later(at):
    opened(at / "f", os.O_WRONLY | os.O_TRUNC)
    sizes = [os.path.getsize(at / "f")]
    for size in (10, 5000, 3, 0, 70_000):
        os.truncate(at / "f", size)
        sizes.append(os.path.getsize(at / "f"))
    return sizes, (at / "f").read_bytes() == bytes(70_000)


@case
def truncate_of_each_kind(at):
    return answers(
        at,
        lambda: os.truncate(at / "d", 0),
        lambda: os.truncate(at / "none", 0),
        lambda: os.truncate(at / "dangling", 0),
        lambda: os.truncate(at / "f/x", 0),
        lambda: os.truncate(at / "f", -1),
        lambda: os.truncate(at / "l", 7),
        lambda: os.path.getsize(at / "f"),
    )


@case
def a_gap_reads_as_zeroes(at):
    file = os.open(at / "new", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, b"end", 20_000)
    found = os.pread(file, 5, 0), os.pread(file, 10, 19_998), os.fstat(file).st_size
    os.close(file)
    return found, (at / "new").read_bytes() == bytes(20_000) + b"end"


@case
def vectors_and_short_reads(at):
    file = os.open(at / "f", os.O_RDWR)
    size = os.fstat(file).st_size
    parts = [bytearray(10), bytearray(20)]
    found = answers(
        at,
        lambda: os.preadv(file, parts, 5),
        lambda: [bytes(part) for part in parts],
        lambda: os.pwritev(file, [b"ab", b"", b"cd"], 3),
        lambda: os.pread(file, 100, size - 3),
        lambda: os.pread(file, 100, size),
        lambda: os.pread(file, 100, size + 5),
        lambda: os.pread(file, 0, 0),
        lambda: os.pwrite(file, b"", 1 << 30),
        lambda: os.fstat(file).st_size - size,
    )
    os.close(file)
    return found


# links


@case
def symlinks(at):
    return answers(
        at,
        lambda: os.symlink("x", at / "f"),
        lambda: os.symlink("x", at / "d"),
        lambda: os.symlink("x", at / "l"),
        lambda: os.symlink("x", at / "none/l"),
        lambda: os.symlink("x", at / "f/l"),
        lambda: os.symlink("x", at / TOO_LONG),
        lambda: os.symlink("", at / "empty"),
        lambda: os.symlink("../" * 100 + "far", at / "far"),
        lambda: os.readlink(at / "far"),
        lambda: os.lstat(at / "far").st_size,
        lambda: os.symlink("täßt ☃", at / "text"),
        lambda: os.readlink(at / "text"),
        lambda: os.lstat(at / "text").st_size,
        lambda: oct(os.lstat(at / "l").st_mode),
        lambda: os.readlink(at / "f"),
        lambda: os.readlink(at / "d"),
        lambda: os.readlink(at / "none"),
        lambda: os.symlink("x" * 4096, at / "long"),
    )


@case
def links_are_followed_where_they_should_be(at):
    return answers(
        at,
        lambda: (at / "l").read_bytes() == DATA,
        lambda: os.stat(at / "dangling"),
        lambda: os.stat(at / "loop"),
        lambda: stat.S_IFMT(os.lstat(at / "loop").st_mode),
        lambda: os.chmod(at / "l", 0o600),
        lambda: oct(os.stat(at / "f").st_mode),
        lambda: os.chmod(at / "dangling", 0o600),
        lambda: os.listdir(at / "ld"),
    )


# attributes


@case
def chmod_each_kind(at):
    return answers(
        at,
        lambda: os.chmod(at / "none", 0o600),
        lambda: os.chmod(at / "f/x", 0o600),
        lambda: os.chmod(at / "f", 0o4751),
        lambda: oct(os.stat(at / "f").st_mode),
        lambda: os.chmod(at / "f", 0),
        lambda: oct(os.stat(at / "f").st_mode),
        lambda: os.chmod(at / "d", 0o1770),
        lambda: oct(os.stat(at / "d").st_mode),
        lambda: os.chmod(at / "d", 0o700),
        lambda: oct(os.stat(at / "d").st_mode),
        lambda: os.chmod(at / TOO_LONG, 0o700),
    )


@case
def times_are_kept_to_the_nanosecond(at):
    for name in ("f", "d"):
        os.utime(at / name, ns=(1, 1_234_567_890_123_456_789))
    os.utime(at / "l", ns=(2, 3_000_000_007), follow_symlinks=False)
    return [os.lstat(at / name).st_mtime_ns for name in ("f", "d", "l")], answers(
        at, lambda: os.utime(at / "none"), lambda: os.utime(at / "f/x")
    )


@case
def a_change_moves_the_times_of_its_directory_and_of_no_other(at):
    old = 1_000_000_000
    moved = []
    changes = [
        lambda: (at / "d/new").write_bytes(b"x"),
        lambda: (at / "d/new").write_bytes(b"again"),
        lambda: os.chmod(at / "d/new", 0o600),
        lambda: os.mkdir(at / "d/sub"),
        lambda: os.mknod(at / "d/sub/f"),
        lambda: os.rename(at / "d/new", at / "d/newer"),
        lambda: os.symlink("x", at / "d/link"),
        lambda: os.unlink(at / "d/newer"),
        lambda: os.rename(at / "d/sub", at / "sub"),
        lambda: os.rename(at / "f", at / "d/f"),
        lambda: os.chmod(at / "d", 0o700),
    ]
    for change in changes:
        os.utime(at / "d", (old, old))
        change()
        moved.append(os.stat(at / "d").st_mtime != old)
    return moved


@case
def chown_to_oneself(at):
    mine = os.getuid(), os.getgid()
    return answers(
        at,
        lambda: os.chown(at / "f", *mine),
        lambda: os.chown(at / "f", -1, -1),
        lambda: os.chown(at / "d", mine[0], -1),
        lambda: os.chown(at / "l", *mine, follow_symlinks=False),
        lambda: os.chown(at / "none", *mine),
    )


@case
def user_xattrs(at):
    found = []
    for name in ("f", "d"):
        found += answers(
            at,
            lambda path=at / name: os.setxattr(path, "user.a", b"1"),
            lambda path=at / name: os.setxattr(path, "user.a", b"2", os.XATTR_CREATE),
            lambda path=at / name: os.setxattr(path, "user.b", b"2", os.XATTR_REPLACE),
            lambda path=at / name: os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE),
            lambda path=at / name: os.setxattr(path, "user.b", b"", os.XATTR_CREATE),
            lambda path=at / name: os.getxattr(path, "user.a"),
            lambda path=at / name: os.getxattr(path, "user.b"),
            lambda path=at / name: sorted(os.listxattr(path)),
            lambda path=at / name: os.removexattr(path, "user.a"),
            lambda path=at / name: os.removexattr(path, "user.a"),
            lambda path=at / name: os.getxattr(path, "user.a"),
            lambda path=at / name: os.setxattr(path, "user." + "n" * 251, b"x"),
        )
    return found, answers(
        at,
        lambda: os.setxattr(at / "none", "user.a", b"1"),
        lambda: os.setxattr(at / "l", "user.a", b"1", follow_symlinks=False),
    )


# content


@case
def mmap_shared_for_reading_and_private(at):
    with open(at / "f", "rb") as file:
        shared = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        private = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    private[5:8] = b"own"
    found = shared[:] == DATA, private[4:9], (at / "f").read_bytes() == DATA
    shared.close()
    private.close()
    return found


@case
def mmap_shared_for_writing(at):
    with open(at / "f", "r+b") as file:
        huge_page_buffer = mmap.mmap(file.fileno(), 0)
    huge_page_buffer[5:8] = b"own"
    huge_page_buffer.flush()
    now = (at / "f").read_bytes()[4:9]
    huge_page_buffer[0:1] = b"Z"
    huge_page_buffer.close()
    return now, (at / "f").read_bytes()[:1]


@case
def seek_data_and_hole(at):
    file = os.open(at / "f", os.O_RDONLY)
    size = os.fstat(file).st_size
    found = answers(
        at,
        lambda: os.lseek(file, 0, os.SEEK_DATA),
        lambda: os.lseek(file, 0, os.SEEK_HOLE) - size,
        lambda: os.lseek(file, 100, os.SEEK_DATA),
        lambda: os.lseek(file, size, os.SEEK_DATA),
        lambda: os.lseek(file, size + 1, os.SEEK_HOLE),
    )
    os.close(file)
    return found


@case
def copies_by_the_kernel(at):
    source, target = os.open(at / "f", os.O_RDONLY), os.open(at / "new", os.O_RDWR | os.O_CREAT)
    found = answers(
        at,
        lambda: os.copy_file_range(source, target, 5000, 100, 0),
        lambda: os.copy_file_range(source, target, 100, len(DATA), 0),
        lambda: os.copy_file_range(target, source, 10, 0, 0),
        lambda: os.sendfile(target, source, 100, 300),
        lambda: os.fstat(target).st_size,
        lambda: os.pread(target, 5000, 0) == (DATA[100:400] * 0 + DATA[100:5100])[:5000],
    )
    os.close(source)
    os.close(target)
    return found


@case
def fsync_of_files_and_directories(at):
    file, folder = os.open(at / "f", os.O_RDWR), os.open(at / "d", os.O_RDONLY)
    found = answers(
        at,
        lambda: os.write(file, b"x"),
        lambda: os.fsync(file),
        lambda: os.fdatasync(file),
        lambda: os.fsync(folder),
        lambda: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED),
    )
    os.close(file)
    os.close(folder)
    return found


@case
def posix_fallocate_makes_room(at):
    file = os.open(at / "new", os.O_RDWR | os.O_CREAT)
    os.write(file, b"begin")
    found = answers(
        at,
        lambda: os.posix_fallocate(file, 0, 9000),
        lambda: os.fstat(file).st_size,
        lambda: os.pread(file, 10, 0),
        lambda: os.posix_fallocate(file, -1, 5),
        lambda: os.posix_fallocate(file, 0, 0),
    )
    os.close(file)
    return found


# locks


def _lock(path, how):
    """Ask for a lock as another open file; return whether it was given."""
    file = os.open(path, os.O_RDWR)
    try:
        return how(file)
    finally:
        os.close(file)


@case
def flock_between_two_opens(at):
    first = os.open(at / "f", os.O_RDWR)

    def exclusive(file):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    fcntl.flock(first, fcntl.LOCK_SH)
    found = answers(
        at,
        lambda: _lock(at / "f", lambda f: fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)),
        lambda: _lock(at / "f", exclusive),
        lambda: fcntl.flock(first, fcntl.LOCK_UN),
        lambda: _lock(at / "f", exclusive),
    )
    os.close(first)
    return found


F_OFD_SETLK = 37
"""Lock command from linux/fcntl.h, for locks that belong to open files and not to processes."""


@case
def locks_of_open_files_over_ranges(at):
    first = os.open(at / "f", os.O_RDWR)

    def ask(kind, start, size):
        words = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, size, 0)
        return lambda file: len(fcntl.fcntl(file, F_OFD_SETLK, words))

    ask(fcntl.F_WRLCK, 0, 100)(first)
    found = answers(
        at,
        lambda: _lock(at / "f", ask(fcntl.F_WRLCK, 50, 10)),
        lambda: _lock(at / "f", ask(fcntl.F_RDLCK, 99, 1)),
        lambda: _lock(at / "f", ask(fcntl.F_WRLCK, 100, 10)),
    )
    os.close(first)
    return found, answers(at, lambda: _lock(at / "f", ask(fcntl.F_WRLCK, 50, 10)))


@case
def fcntl_locks_between_processes(at):
    first = os.open(at / "f", os.O_RDWR)
    fcntl.lockf(first, fcntl.LOCK_EX, 100, 0)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = answers(
                at,
                lambda: _lock(
                    at / "f", lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 50)
                ),
                lambda: _lock(
                    at / "f", lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 100)
                ),
            )
            os.write(writer, repr(told).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 1000)
    for file in (first, reader, writer):
        os.close(file)
    return told


# names


@case
def names_of_any_bytes(at):
    names = [b"\xff\xfe", b"a\nb", b" ", b"...", "ß☃".encode(), b"-rf", b"a\\b", b"\x01", b"*?"]
    for name in names:
        with open(os.fsencode(at / "d") + b"/" + name, "wb") as file:
            file.write(name)
    folder = os.fsencode(at / "d")
    found = {}
    for name in os.listdir(folder):
        with open(folder + b"/" + name, "rb") as file:
            found[name] = file.read()
    return found


@case
def many_levels(at):
    path = at / "d"
    for _ in range(40):
        path = path / "level"
        path.mkdir()
    (path / "f").write_bytes(b"deep")
    return (path / "f").read_bytes(), sum(len(files) for _, _, files in os.walk(at / "d"))


@case
def a_listing_that_is_open_while_names_change(at):
    with os.scandir(at / "full") as listing:
        os.unlink(at / "full/f")
        names = [entry.name for entry in listing]
    return names in ([], ["f"]), os.listdir(at / "full")


@case
def temporary_files_of_python(at):
    with tempfile.NamedTemporaryFile(dir=at, delete=False) as file:
        file.write(b"named")
    with tempfile.TemporaryFile(dir=at) as file:
        file.write(b"nameless")
        file.seek(0)
        return file.read(), len(os.listdir(at))


@case
def access_says_who_may(at):
    os.chmod(at / "f", 0o444)
    return [os.access(at / name, how) for name in ("f", "d", "none") for how in range(8)]
