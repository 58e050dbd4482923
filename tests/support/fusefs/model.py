"""A mount compared with a plain directory: the same operations on both must give the same answers.

``python -m tests.support.fusefs.model STEPS SEED`` runs a long comparison by hand.
"""
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH208, PTH211 -- system calls are tested

import contextlib
import errno
import mmap
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from fusefs.mounts.lifecycle import mount

NAMES = ["a", "b", "d/a", "d/b", "d/e/a", "f", "d", "d/e", "f/a"]
BLOB = random.Random(7).randbytes(1 << 16)
TINY = {"striping": {"unit": 4096, "count": 3}, "plain_limit": 4096}
TIMES = [1, 10**9]
MOST_BYTES = 1 << 20
"""More bytes than any file of the model has."""
FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "c": os.O_RDWR | os.O_CREAT,
}


def fast_directory(prefix):
    """Make a directory in memory if possible, because fsync of a disk would take most of the time."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=shm if shm.is_dir() else None))


class Side:
    """One of the two directories and its open files."""

    def __init__(self, root):
        self.root = Path(root)
        self.open_files = {}

    def at(self, name):
        return self.root / name

    def do(self, operation, *arguments):
        try:
            return "ok", getattr(self, operation)(*arguments)
        except OSError as error:
            return "error", errno.errorcode.get(error.errno, error.errno)

    def open(self, slot, name, mode):
        self.close(slot)
        if self.at(
            name
        ).is_dir():  # the answer of a descriptor of a directory differs between file systems
            raise IsADirectoryError(errno.EISDIR, "directory")
        self.open_files[slot] = os.open(self.at(name), FLAGS[mode], 0o644)

    def close(self, slot):
        if slot in self.open_files:
            os.close(self.open_files.pop(slot))

    def write(self, slot, offset, start, size):
        if slot in self.open_files:
            return os.pwrite(self.open_files[slot], BLOB[start : start + size], offset)
        return None

    def extend(self, slot, start, size):
        """Write at the end, as most files are written."""
        if slot in self.open_files:
            file = self.open_files[slot]
            os.lseek(file, 0, os.SEEK_END)
            return os.write(file, BLOB[start : start + size])
        return None

    def read(self, slot, offset, size):
        return os.pread(self.open_files[slot], size, offset) if slot in self.open_files else None

    def fsync(self, slot):
        if slot in self.open_files:
            os.fsync(self.open_files[slot])

    def ftruncate(self, slot, size):
        if slot in self.open_files:
            os.ftruncate(self.open_files[slot], size)

    def fstat(self, slot):
        if slot not in self.open_files:
            return None
        found = os.fstat(self.open_files[slot])
        return found.st_size, found.st_nlink

    def truncate(self, name, size):
        os.truncate(self.at(name), size)

    def rename(self, source, target):
        os.rename(self.at(source), self.at(target))

    def unlink(self, name):
        os.unlink(self.at(name))

    def mkdir(self, name, mode):
        os.mkdir(self.at(name), mode)

    def rmdir(self, name):
        os.rmdir(self.at(name))

    def symlink(self, name):
        os.symlink("../target", self.at(name))

    def readlink(self, name):
        return os.readlink(self.at(name))

    def listdir(self, name):
        return sorted(os.listdir(self.at(name)))

    def stat(self, name):
        found = os.lstat(self.at(name))
        is_directory = os.path.isdir(self.at(name))
        # A directory's time is compared only while it is a time that was set, because then no name has changed since.
        was_set = found.st_mtime in TIMES and found.st_mtime
        return is_directory, (oct(found.st_mode), was_set) if is_directory else found.st_size

    def chmod(self, name, mode):
        if self.at(name).exists() and not self.at(name).is_symlink():
            os.chmod(self.at(name), mode)
            return oct(os.stat(self.at(name)).st_mode)
        return None

    def utime(self, name, seconds):
        if self.at(name).exists() and not self.at(name).is_symlink():
            os.utime(self.at(name), (seconds, seconds))
            return os.stat(self.at(name)).st_mtime
        return None

    def content(self, name):
        return self.at(name).read_bytes() if self.at(name).is_file() else None

    def direct_content(self, name):
        """Read without the page cache."""
        if not self.at(name).is_file():
            return None
        file = os.open(self.at(name), os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, MOST_BYTES) as buffer:
            try:
                return buffer[: os.readv(file, [buffer])]
            finally:
                os.close(file)

    def uncache(self, slot):
        """Make the kernel drop its cache of an open file."""
        if slot in self.open_files:
            os.posix_fadvise(self.open_files[slot], 0, 0, os.POSIX_FADV_DONTNEED)

    def tree(self):
        """Return everything that exists, by path."""
        found = {}
        for folder, folders, files in os.walk(self.root):
            folders.sort()
            here = os.path.relpath(folder, self.root)
            for name in folders:
                found[os.path.join(here, name)] = oct(os.stat(os.path.join(folder, name)).st_mode)
            for name in files:
                path = os.path.join(folder, name)
                data = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes()
                found[os.path.join(here, name)] = data
        found.pop("./.omnifs", None)
        return found

    def empty(self):
        for slot in list(self.open_files):
            self.close(slot)
        for entry in self.root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


class Pair:
    """The mount and its model."""

    def __init__(self, mounted, model):
        self.mounted, self.model = Side(mounted), Side(model)
        self.history = []

    def do(self, operation, *arguments):
        self.history.append((operation, *arguments))
        wanted = self.model.do(operation, *arguments)
        found = self.mounted.do(operation, *arguments)
        if found != wanted:
            recent = "\n".join(map(str, self.history[-30:]))
            raise AssertionError(f"mount {_short(found)} model {_short(wanted)} after\n{recent}")

    def check(self):
        found, wanted = self.mounted.tree(), self.model.tree()
        if found != wanted:
            recent = "\n".join(map(str, self.history[-30:]))
            differ = [k for k in {*found, *wanted} if found.get(k) != wanted.get(k)]
            raise AssertionError(f"trees differ at {differ} after\n{recent}")

    def empty(self):
        self.mounted.empty()
        self.model.empty()
        self.history.clear()


def _short(result):
    text = repr(result)
    return text if len(text) < 200 else f"{text[:100]}...{len(text)}"


def random_operation(draw):
    """Return one operation; ``draw`` is a ``random.Random``."""
    slot, name, other = draw.randrange(4), draw.choice(NAMES), draw.choice(NAMES)
    size = draw.choice([0, 1, 100, 4095, 4096, 4097, 9000, 20_000])
    offset = draw.choice([0, 0, 1, 4096, 5000, 12_288, 30_000])
    start = draw.randrange(1000)
    kinds = [
        (12, ("open", slot, name, draw.choice(list(FLAGS)))),
        (8, ("close", slot)),
        (8, ("write", slot, offset, start, size)),
        (14, ("extend", slot, start, size)),
        (12, ("read", slot, offset, size)),
        (3, ("fsync", slot)),
        (2, ("ftruncate", slot, draw.choice([0, 1, 5000, 20_000]))),
        (4, ("fstat", slot)),
        (2, ("truncate", name, draw.choice([0, 10, 9000]))),
        (8, ("rename", name, other)),
        (5, ("unlink", name)),
        (4, ("mkdir", name, draw.choice([0o777, 0o777, 0o700]))),
        (2, ("rmdir", name)),
        (1, ("symlink", name)),
        (1, ("readlink", name)),
        (4, ("listdir", draw.choice(["d", "d/e", "f", "."]))),
        (6, ("stat", name)),
        (2, ("chmod", name, draw.choice([0o600, 0o644, 0o755]))),
        (2, ("utime", name, draw.choice(TIMES))),
        (5, ("content", name)),
        (3, ("direct_content", name)),
        (6, ("uncache", slot)),
    ]
    return draw.choices([k for _, k in kinds], [w for w, _ in kinds])[0]


def run(pair, steps, seed, *, check_every=200):
    draw = random.Random(seed)
    for step in range(steps):
        pair.do(*random_operation(draw))
        if step % check_every == check_every - 1:
            pair.check()


@contextlib.contextmanager
def mounted_pair(settings=None):
    base = fast_directory("fusefs-model-")
    for name in ("store", "mount", "model"):
        (base / name).mkdir()
    try:
        with mount(
            str(base / "store"), base / "mount", {"files": TINY, **(settings or {})}
        ) as root:
            pair = Pair(root, base / "model")
            yield pair
            pair.empty()
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    with mounted_pair() as running:
        run(running, int(sys.argv[1]), int(sys.argv[2]), check_every=1000)
